"""The connections of the heartbeat, over real sockets between threads, and what strangers can do to them: nothing."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tfdist.cluster import greeting, heartbeat
from tfdist.cluster.channel import Alone
from tfdist.cluster.greeting import connect, greeted, listen
from tfdist.cluster.heartbeat import BEAT, FAILED, GOODBYE, VERDICT, Message, Star
from tfdist.cluster.places import Place

TOKEN = bytes(range(32))
LENGTH = len(Message(BEAT).packed())


@contextlib.contextmanager
def listener(size: int = 3) -> Iterator[tuple[socket.socket, tuple[str, int]]]:
    with listen("127.0.0.1", size) as listening:
        yield listening, listening.getsockname()


@contextlib.contextmanager
def job(size: int) -> Iterator[list[Star]]:
    """The stars of all ranks."""
    with listener(size) as (listening, place), ThreadPoolExecutor(size) as threads:
        hub = threads.submit(greeted, listening, TOKEN, size, 20)
        others = [threads.submit(connect, place, TOKEN, rank, 20) for rank in range(1, size)]
        stars = [Star(hub.result()), *(Star({0: other.result()}) for other in others)]
    try:
        yield stars
    finally:
        for star in stars:
            star.close()


def received(star: Star, count: int = 1) -> list[tuple[int, Message | None]]:
    events: list[tuple[int, Message | None]] = []
    deadline = time.monotonic() + 10
    while len(events) < count and time.monotonic() < deadline:
        events += star.receive(0.1)
    return events


class TestMessages:
    def test_they_arrive_as_they_were_sent(self) -> None:
        beat = Message(BEAT, Place(17, 71, "waiting for input", 2.5, True))
        verdict = Message(VERDICT, Place(phase="lost"), rank=2, code=7, text="rank 2 has died: größer")
        with job(3) as (hub, one, two):
            two.send(beat)
            assert received(hub) == [(2, beat)]
            hub.send(verdict)
            assert received(one) == received(two) == [(0, verdict)]

    def test_all_have_one_size_and_long_words_are_cut(self) -> None:
        long = Message(FAILED, Place(phase="ä" * 500), text="ß" * 5000)
        assert len(long.packed()) == LENGTH
        back = Message.unpacked(long.packed())
        assert long.text.startswith(back.text)
        assert len(back.text) == 200

    def test_a_last_message_arrives_though_much_has_not_been_read(self) -> None:
        with job(2) as (hub, one):
            for _ in range(50):
                hub.send(Message(BEAT))
            with ThreadPoolExecutor(1) as threads:
                leaving = threads.submit(one.leave, Message(GOODBYE))
                assert received(hub, 2) == [(1, Message(GOODBYE)), (1, None)]
                leaving.result()

    def test_one_that_reads_nothing_does_not_hold_the_others_up(self) -> None:
        with job(3) as (hub, _, two):
            hub.send(Message(BEAT), ranks=[1] * 50_000)  # more than sockets hold
            assert len(hub._waiting[1]) <= heartbeat._MOST_WAITING + LENGTH
            hub.send(Message(GOODBYE))
            assert received(two) == [(0, Message(GOODBYE))]

    def test_a_process_that_has_gone_is_told_once(self) -> None:
        with job(2) as (hub, one):
            one.close()
            assert received(hub) == [(1, None)]
            hub.send(Message(BEAT))
            assert hub.receive(0.1) == []

    @pytest.mark.parametrize("data", [b"\0" * LENGTH, b"\xff" * LENGTH, os.urandom(LENGTH)[1:] + b"\0"])
    def test_what_cannot_be_read_ends_the_connection(self, data: bytes) -> None:
        if data[0] in (BEAT, GOODBYE, FAILED, VERDICT):
            data = b"\x09" + data[1:]
        with job(2) as (hub, one):
            one._connections[0].sendall(data)
            assert received(hub) == [(1, None)]


class TestStrangers:
    @pytest.mark.parametrize(
        "said",
        [
            b"",
            b"GET / HTTP/1.1\r\n\r\n" * 10,
            os.urandom(4096),
            struct.pack(">Q", 2**63),
            pickle.dumps(["a pickle"] * 10),
            bytes(16) + struct.pack(">I", 1),
            TOKEN[16:] + struct.pack(">I", 1),
            TOKEN[:16] + struct.pack(">I", 0),
            TOKEN[:16] + struct.pack(">I", 3),
            TOKEN[:15],
        ],
    )
    def test_they_are_dropped_and_the_job_meets(self, said: bytes) -> None:
        with listener(3) as (listening, place), socket.create_connection(place) as stranger:
            stranger.sendall(said)
            stranger.settimeout(10)
            with ThreadPoolExecutor(3) as threads:
                hub = threads.submit(greeted, listening, TOKEN, 3, 20)
                others = [threads.submit(connect, place, TOKEN, rank, 20) for rank in (2, 1)]
                assert sorted(hub.result()) == [1, 2]
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(100) == b"", "nothing is told to them"
                for connection in (*hub.result().values(), *(other.result() for other in others)):
                    connection.close()

    def test_slow_ones_are_dropped_in_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(greeting, "_GREETING_SECONDS", 0.5)
        with (
            listener(2) as (listening, place),
            socket.create_connection(place) as slow,
            ThreadPoolExecutor(1) as threads,
        ):
            hub = threads.submit(greeted, listening, TOKEN, 2, 60)
            for byte in itertools.chain(TOKEN[:15], itertools.repeat(0)):
                try:
                    slow.sendall(bytes([byte]))
                except OSError:
                    break
                time.sleep(0.1)
            with connect(place, TOKEN, 1, 20), hub.result()[1]:
                pass

    def test_many_do_not_keep_the_job_out(self) -> None:
        with listener(300) as (listening, place), contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as threads:
            hub = threads.submit(greeted, listening, TOKEN, 2, 20)
            for _ in range(200):
                stack.enter_context(socket.create_connection(place))
            one = stack.enter_context(threads.submit(connect, place, TOKEN, 1, 20).result())
            stack.enter_context(hub.result()[1])
            assert one.getpeername() == place

    def test_a_greeting_that_is_said_again_is_dropped(self) -> None:
        with listener(3) as (listening, place), ThreadPoolExecutor(2) as threads:
            hub = threads.submit(greeted, listening, TOKEN, 3, 1)
            first = connect(place, TOKEN, 1, 5)
            with pytest.raises(OSError):
                connect(place, TOKEN, 1, 0)
            assert list(hub.result()) == [1]
            first.close()
            hub.result()[1].close()

    def test_another_program_that_answers_is_not_taken_for_rank_0(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(1) as threads:
            joining = threads.submit(connect, other.getsockname(), TOKEN, 1, 0)
            connection, _ = other.accept()
            connection.sendall(bytes(16))
            with pytest.raises(ConnectionError, match="another program answers there"):
                joining.result()
            connection.close()


class Told(Alone):
    """The channel of rank 1, to which rank 0 has told a place where nobody listens."""

    rank, size = 1, 2

    def __init__(self, place: tuple[str, int]) -> None:
        self.place = place

    def exchange(self, label: str, value: Any, failure: Any = None) -> list[Any]:
        return [[*self.place, "00" * 32] if label == "where the heartbeat goes" else "", value]


def test_a_rank_that_does_not_reach_rank_0_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "MEET_SECONDS", 0.2)
    with listener() as (_, place):
        pass
    star, reason = heartbeat.open_star(Told(place), ["lab0", "lab1"])
    assert star is None
    assert reason == f"rank 1 (host lab1) does not reach 127.0.0.1:{place[1]} (Connection refused)"
