"""How processes meet and talk without MPI: over real sockets, mostly between threads of this process.

What ranks say to each other, errors included, is in `test_channel.py`, for this channel and MPI's alike.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import free_ports, run_tf_config
from tfdist.cluster import tcp_channel
from tfdist.cluster.channel import together
from tfdist.cluster.identity import Identity, SlurmStep, TfConfig, identify
from tfdist.cluster.ports import hold_port
from tfdist.cluster.tcp_channel import START_SECONDS, TcpChannel, open_tcp, start_seconds
from tfdist.errors import EnvironmentProblem

Address = tuple[str, int]
TAG = "the job"


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START_SECONDS, "20")
    monkeypatch.delenv("TF_GRPC_REUSE_PORT", raising=False)


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


def at_once(*work: Callable[[], Any]) -> list[Any]:
    """What each of these gives or raises, run side by side."""

    def outcome(one: Callable[[], Any]) -> Any:
        try:
            return one()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(work)) as threads:
        return [future.result(timeout=120) for future in [threads.submit(outcome, one) for one in work]]


def joining(rank: int, size: int, meeting: Sequence[Address], tag: str = TAG) -> Callable[[], TcpChannel]:
    return lambda: TcpChannel(rank, size, meeting, tag)


@contextlib.contextmanager
def job(size: int, port: int) -> Iterator[list[TcpChannel]]:
    channels = at_once(*(joining(rank, size, [("127.0.0.1", port)]) for rank in range(size)))
    try:
        yield channels
    finally:
        for channel in channels:
            leave(channel)


def leave(channel: TcpChannel) -> None:
    """As when its process ends."""
    for peer in channel._peers:
        peer.close()


def said(channels: Sequence[TcpChannel], value: Callable[[int], Any] = lambda rank: rank) -> list[Any]:
    """What each gets out of one exchange."""
    return at_once(*(lambda c=c: c.exchange("label", value(c.rank)) for c in channels))  # type: ignore[misc]


def problem(error: Any) -> str:
    assert isinstance(error, EnvironmentProblem), error
    return str(error)


def framed(message: Any) -> bytes:
    text = json.dumps(message).encode()
    return struct.pack(">Q", len(text)) + text


class TestTalking:
    def test_places_are_those_that_were_given(self, port: int) -> None:
        with job(3, port) as channels:
            assert [(channel.rank, channel.size) for channel in channels] == [(0, 3), (1, 3), (2, 3)]

    def test_messages_of_any_size_and_kind_reach_every_rank_alike(self, port: int) -> None:
        sizes = (0, 3_000_000, 70_000)  # more than sockets hold
        with job(3, port) as channels:
            for value, want in (
                (lambda rank: "ü" * sizes[rank], ["ü" * size for size in sizes]),
                (lambda rank: {"rank": (rank, None, 1.5, True)}, [{"rank": [r, None, 1.5, True]} for r in range(3)]),
            ):
                assert said(channels, value) == [want] * 3

    def test_a_copy_is_the_same_channel(self, port: int) -> None:
        with job(2, port) as channels:
            assert copy.deepcopy({"channel": channels[0]})["channel"] is channels[0]


class TestGoing:
    @pytest.mark.parametrize("gone", [1, 2, 3])
    def test_one_that_has_gone_is_named_on_all_ranks(self, port: int, gone: int) -> None:
        with job(4, port) as channels:
            leave(channels[gone])
            left = [channel for channel in channels if channel.rank != gone]
            for _ in range(2):  # and for ever
                errors = said(left)
                assert {problem(error) for error in errors} == {
                    f"rank {gone} has gone (a message: the connection is closed). Its own output tells why."
                }
                assert all(error.shared for error in errors)

    def test_it_is_named_where_the_others_work_together(self, port: int) -> None:
        """The error of an exchange inside must not lead to another exchange, in which the ranks wait for each other."""
        with job(3, port) as channels:
            leave(channels[2])

            def work(channel: TcpChannel) -> Any:
                return together(channel, "work", lambda: channel.exchange("inside", None))

            errors = at_once(*(lambda c=c: work(c) for c in channels[:2]))  # type: ignore[misc]
            assert [problem(error).startswith("rank 2 has gone") for error in errors] == [True, True]

    def test_rank_0_is_named_by_each_of_the_others(self, port: int) -> None:
        with job(3, port) as channels:
            leave(channels[0])
            for _ in range(2):
                errors = said(channels[1:])
                assert [problem(error).startswith("rank 0 has gone") for error in errors] == [True, True]
                assert not any(error.shared for error in errors), "there is no chief to print it"

    def test_a_host_that_has_vanished_is_noticed(self, port: int) -> None:
        with job(2, port) as channels:
            for channel in channels:
                (peer,) = channel._peers
                assert peer.gettimeout() is None
                assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                idle, between, count, unconfirmed = (
                    peer.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (
                        socket.TCP_KEEPIDLE,
                        socket.TCP_KEEPINTVL,
                        socket.TCP_KEEPCNT,
                        socket.TCP_USER_TIMEOUT,
                    )
                )
                assert idle + between * count == unconfirmed / 1000 == 25

    def test_a_process_that_aborts(self, tmp_path: Path) -> None:
        program = tmp_path / "program.py"
        program.write_text(
            "from tfdist.cluster.identity import identify\n"
            "from tfdist.cluster.tcp_channel import open_tcp\n"
            "channel = open_tcp(identify())\n"
            "channel.abort(3) if channel.rank == 1 else channel.exchange('one that never comes', None)\n"
        )
        chief, other = run_tf_config(2, program, timeout=300)
        assert (chief.code, other.code) == (1, 3), (chief.output, other.output)
        assert "EnvironmentProblem: rank 1 (127.0.0.1:" in chief.output


class TestArriving:
    def test_all_have_arrived_once_the_last_one_has(self, port: int) -> None:
        with job(3, port) as channels:
            first, second = (channel.arrive() for channel in channels[:2])
            assert not first()
            assert not second()
            third = channels[2].arrive()
            assert [comes_true(done) for done in (first, second, third)] == [True] * 3

    def test_nobody_waits_for_one_that_has_gone(self, port: int) -> None:
        with job(3, port) as channels:
            leave(channels[2])
            arrived = [channel.arrive() for channel in channels[:2]]
            assert [comes_true(done) for done in arrived] == [True, True]

    def test_one_at_the_end_while_another_goes_on_is_out_of_step(self, port: int) -> None:
        with job(2, port) as channels:
            done = channels[1].arrive()
            with pytest.raises(Exception, match="rank 0 is at 'more', rank 1 at 'the end of the job'"):
                channels[0].exchange("more", None)
            assert comes_true(done)


def comes_true(done: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.001)
    return done()


class TestWaiting:
    def test_those_that_did_not_come_are_named(self, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(START_SECONDS, "0.5")
        names = ["rank 0 (a:1)", "rank 1 (b:1)", "rank 2 (c:1)", "rank 3 (d:1)"]
        meeting = [("127.0.0.1", port)]
        chief, other = at_once(lambda: TcpChannel(0, 4, meeting, TAG, names), joining(2, 4, meeting))
        assert problem(chief) == (
            "rank 1 (b:1), rank 3 (d:1) did not come within 0.5 s. Look at the output of that process, and whether its "
            "host reaches this one; TFDIST_START_SECONDS sets how long to wait."
        )
        leave(other)

    def test_rank_0_that_is_not_there_is_named_with_its_address(
        self, port: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(START_SECONDS, "0.3")
        with pytest.raises(EnvironmentProblem) as caught:
            TcpChannel(1, 2, [("127.0.0.1", port)], TAG)
        assert str(caught.value) == (
            f"rank 0 could not be reached within 0.3 s at 127.0.0.1:{port} ([Errno 111] Connection refused). Look at "
            "its output, and whether this host reaches that one; TFDIST_START_SECONDS sets how long to wait."
        )

    def test_connections_without_end_do_not_put_it_off(self, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(START_SECONDS, "0.5")
        over = threading.Event()

        def knock() -> None:
            while not over.is_set():
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()

        def chief() -> Any:
            try:
                return TcpChannel(0, 2, [("127.0.0.1", port)], TAG)
            finally:
                over.set()

        def give_up() -> None:
            over.wait(20)
            over.set()

        outcome, *_ = at_once(chief, knock, give_up)
        assert problem(outcome).startswith("rank 1 did not come within 0.5 s.")

    @pytest.mark.parametrize(("text", "seconds"), [(None, 300.0), ("7", 7.0), ("0.5", 0.5)])
    def test_how_long(self, text: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(START_SECONDS) if text is None else monkeypatch.setenv(START_SECONDS, text)
        assert start_seconds() == seconds

    @pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "inf"])
    def test_no_number_of_seconds(self, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(START_SECONDS, text)
        with pytest.raises(EnvironmentProblem, match=f"TFDIST_START_SECONDS='{text}' must be a number of seconds"):
            start_seconds()


STRANGERS = {
    "nothing": b"",
    "a part of a length": b"\0\0\0",
    "random bytes": bytes(range(255, 0, -1)),
    "a browser": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a huge length": struct.pack(">Q", 1 << 62),
    "no json": struct.pack(">Q", 3) + b"{{{",
    "no text": struct.pack(">Q", 2) + b"\xff\xfe",
    "nested without end": struct.pack(">Q", 4000) + b"[" * 4000,
    "no greeting": framed([1, 2]),
    "a number": framed(7),
    "another job": framed({"tfdist": "another job", "rank": 1}),
    "no job": framed({"rank": 1}),
    "no rank": framed({"tfdist": TAG}),
    "rank 0 itself": framed({"tfdist": TAG, "rank": 0}),
    "a rank too many": framed({"tfdist": TAG, "rank": 3}),
    "a negative rank": framed({"tfdist": TAG, "rank": -1}),
    "a rank in words": framed({"tfdist": TAG, "rank": "1"}),
    "a rank that never answers": framed({"tfdist": TAG, "rank": 1}),
}


def knocking(address: Address, text: bytes) -> socket.socket:
    """A connection over which something has been sent, once somebody listens there."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            stranger = socket.create_connection(address, timeout=20)
            stranger.sendall(text)
            return stranger
        time.sleep(0.002)


class TestStrangers:
    def test_none_of_them_keeps_the_job_from_forming(self, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each stays, and none is given up before the job must have formed."""
        monkeypatch.setattr(tcp_channel, "_GREETING_SECONDS", 60.0)
        address = ("127.0.0.1", port)
        strangers: list[socket.socket] = []

        def later(rank: int) -> TcpChannel:
            if rank == 1:
                strangers.extend(knocking(address, text) for text in STRANGERS.values())
            return TcpChannel(rank, 3, [address], TAG)

        channels = at_once(*(lambda r=r: later(r) for r in range(3)))  # type: ignore[misc]
        assert said(channels) == [[0, 1, 2]] * 3
        for one in (*strangers, *itertools.chain.from_iterable(channel._peers for channel in channels)):
            one.close()

    @pytest.mark.parametrize("name", STRANGERS)
    def test_each_is_dropped(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tcp_channel, "_GREETING_SECONDS", 0.05)
        ours, theirs = tcp_pair()
        with ours, theirs:
            theirs.sendall(STRANGERS[name])
            assert tcp_channel._greeted(ours, TAG, 3) is None

    def test_one_that_has_left_again_does_not_take_the_place_of_the_next(self, port: int) -> None:
        """A process may have given up waiting for an answer, and come once more."""
        address = ("127.0.0.1", port)

        def once_more() -> TcpChannel:
            knocking(address, STRANGERS["a rank that never answers"]).close()
            return TcpChannel(1, 2, [address], TAG)

        channels = at_once(joining(0, 2, [address]), once_more)
        assert said(channels) == [[0, 1]] * 2
        for channel in channels:
            leave(channel)

    def test_one_that_sends_slowly_has_no_more_time_than_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tcp_channel, "_GREETING_SECONDS", 0.3)
        ours, theirs = tcp_pair()
        over = threading.Event()

        def trickle() -> int:
            for number, byte in enumerate(struct.pack(">Q", 4000) + b" " * 4000):
                if over.wait(0.05):
                    return number
                theirs.send(bytes([byte]))
            return 4008

        def greet() -> int | None:
            try:
                return tcp_channel._greeted(ours, TAG, 3)
            finally:
                over.set()

        with ours, theirs:
            greeted, sent = at_once(greet, trickle)
        assert greeted is None
        assert sent < 100

    def test_nothing_is_kept_of_a_message_that_is_too_long(self) -> None:
        ours, theirs = tcp_pair()
        with ours, theirs:
            theirs.sendall(struct.pack(">Q", 4097) + b"x" * 100)
            with pytest.raises(ValueError, match="a message of 4097 bytes"):
                tcp_channel._receive(ours, 4096)
            assert len(ours.recv(1000)) == 100, "not even read"
            theirs.sendall(struct.pack(">Q", 4096) + b'"' + b"x" * 4094 + b'"')
            assert tcp_channel._receive(ours, 4096) == "x" * 4094

    def test_only_so_many_are_greeted_at_a_time(self, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tcp_channel, "_STRANGERS", 3)
        monkeypatch.setattr(tcp_channel, "_GREETING_SECONDS", 1.0)
        address = ("127.0.0.1", port)

        def chief() -> TcpChannel:
            return TcpChannel(0, 2, [address], TAG)

        def other() -> tuple[int, TcpChannel]:
            strangers = [knocking(address, b"") for _ in range(20)]
            dropped = 0
            for stranger in strangers[5:]:  # three strangers and two processes fit
                with contextlib.suppress(ConnectionResetError):
                    dropped += stranger.recv(1) == b""
            channel = TcpChannel(1, 2, [address], TAG)
            for stranger in strangers:
                stranger.close()
            return dropped, channel

        first, (dropped, second) = at_once(chief, other)
        assert dropped == 15
        assert said([first, second]) == [[0, 1]] * 2
        leave(first), leave(second)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        return listener.accept()[0], theirs


class TestPorts:
    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2", socket.gethostname()])
    def test_rank_0_is_found_by_the_name_of_its_host(self, host: str, port: int) -> None:
        channels = at_once(*(joining(rank, 2, [(host, port)]) for rank in range(2)))
        assert said(channels) == [[0, 1]] * 2
        for channel in channels:
            leave(channel)

    @pytest.mark.parametrize("held", [False, True], ids=["alone", "beside a launcher's socket"])
    @pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
    def test_tensorflow_can_have_the_port_afterwards(
        self, host: str, held: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TF_GRPC_REUSE_PORT", "")
        with contextlib.ExitStack() as stack:
            if held:
                port = stack.enter_context(hold_port()).getsockname()[1]
            else:
                monkeypatch.delenv("TF_GRPC_REUSE_PORT")
                port = free_ports(1)[0]
            channels = at_once(*(joining(rank, 2, [(host, port)]) for rank in range(2)))
            # As grpc listens.
            family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
            server = stack.enter_context(socket.socket(family))
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if held:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            server.bind(("", port))
            server.listen()
            server.settimeout(20)
            client = stack.enter_context(socket.create_connection((host, port), timeout=20))
            accepted, peer = server.accept()
            accepted.close()
            assert peer[1] == client.getsockname()[1]
            assert said(channels) == [[0, 1]] * 2, "both at the same port"
            for channel in channels:
                leave(channel)

    def test_a_port_that_is_taken(self, port: int) -> None:
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(EnvironmentProblem, match=rf"no free port among {port} \(.*in use.*\)\. End what listens"),
        ):
            TcpChannel(0, 2, [("127.0.0.1", port)], TAG)


def tf_config(port: int, rank: int) -> Identity:
    members = [f"127.0.0.1:{port}", "127.0.0.1:2", "127.0.0.1:3"]
    config = {"cluster": {"worker": members}, "task": {"type": "worker", "index": rank}}
    return identify({"TF_CONFIG": json.dumps(config)})


class TestOpening:
    def test_by_tf_config(self, port: int) -> None:
        channels = at_once(*(lambda r=r: open_tcp(tf_config(port, r)) for r in range(3)))  # type: ignore[misc]
        assert said(channels) == [[0, 1, 2]] * 3
        assert open_tcp(tf_config(port, 1)) is channels[1], "one per process"
        leave(channels[2])
        message = "rank 2 (127.0.0.1:3) has gone (a message: the connection is closed). Its own output tells why."
        assert [problem(error) for error in said(channels[:2])] == [message] * 2
        leave(channels[0]), leave(channels[1])

    def test_processes_of_another_cluster_do_not_belong(self, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(START_SECONDS, "0.5")
        other = tf_config(port, 1)
        assert isinstance(other.tf_config, TfConfig)
        members = (*other.tf_config.workers[:2], "127.0.0.1:4")
        config = TfConfig(members, 1, "worker", 1)
        stranger = Identity("tf_config", 1, 3, 1, 3, tf_config=config)
        chief, refused = at_once(lambda: open_tcp(tf_config(port, 0)), lambda: open_tcp(stranger))
        assert problem(chief).startswith("rank 1 (127.0.0.1:2), rank 2 (127.0.0.1:3) did not come within 0.5 s.")
        assert problem(refused).startswith(f"rank 0 (127.0.0.1:{port}) could not be reached within 0.5 s at 127.0.0.1:")


@pytest.fixture
def two_ports(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """SLURM's jobs have these two to meet at."""
    for first in range(23000, 24000, 2):
        with contextlib.suppress(OSError):
            for port in (first, first + 1):
                socket.create_server(("", port)).close()
            monkeypatch.setattr(tcp_channel, "_LOWEST_PORT", first)
            monkeypatch.setattr(tcp_channel, "_PORTS", 2)
            return first, first + 1
    pytest.fail("no two free ports")


def step(job: str, rank: int) -> Callable[[], TcpChannel]:
    identity = Identity("slurm", rank, 2, rank, 2, slurm=SlurmStep(job, "node1"))
    return lambda: open_tcp.__wrapped__(identity)


class TestSlurm:
    @pytest.mark.usefixtures("two_ports")
    def test_jobs_at_once_find_their_own(self) -> None:
        outcomes = at_once(step("7.0", 1), step("7.1", 1), step("7.0", 0), step("7.1", 0))
        for one, channels in (("7.0", outcomes[0::2]), ("7.1", outcomes[1::2])):
            values = said(channels, lambda rank, one=one: f"{one} {rank}")  # type: ignore[misc]
            assert values == [[f"{one} 0", f"{one} 1"]] * 2
            for channel in channels:
                leave(channel)

    @pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", framed({"tfdist": "mine"})])
    @pytest.mark.parametrize("taken", [0, 1])
    def test_a_port_that_another_program_has_is_passed_over(
        self, two_ports: tuple[int, int], taken: int, answer: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tcp_channel, "_GREETING_SECONDS", 0.5)
        with socket.create_server(("127.0.0.1", two_ports[taken])) as program:

            def serve() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = program.accept()
                        connection.sendall(answer)
                        answered.append(connection)

            answered: list[socket.socket] = []
            serving = threading.Thread(target=serve, daemon=True)
            serving.start()
            channels = at_once(step("7.0", 0), step("7.0", 1))
            assert said(channels) == [[0, 1]] * 2
            assert channels[1]._peers[0].getpeername()[1] == two_ports[1 - taken]
            program.shutdown(socket.SHUT_RDWR)
            serving.join(20)
            for one in answered:
                one.close()
            for channel in channels:
                leave(channel)

    def test_where_they_meet(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given = []
        monkeypatch.setattr(tcp_channel, "TcpChannel", lambda *args: given.append(args))
        for job, local_size in (("7.0", 2), ("7.0", 1), ("7.1", 2)):
            open_tcp.__wrapped__(Identity("slurm", 1, 2, 0, local_size, slurm=SlurmStep(job, "node1")))
        here, elsewhere, other = given
        assert [(rank, size) for rank, size, _, _ in given] == [(1, 2)] * 3
        assert here[3] == elsewhere[3] == f"7.0 of user {os.getuid()}" != other[3]
        ports = [[port for _, port in meeting] for _, _, meeting, _ in given]
        assert ports[0] == ports[1] != ports[2]
        assert {host for host, _ in here[2]} == {"127.0.0.1"}
        assert {host for host, _ in elsewhere[2]} == {"node1"}
        for some in ports:
            assert len(set(some)) == 8
            assert all(15000 <= port < 31000 for port in some)
