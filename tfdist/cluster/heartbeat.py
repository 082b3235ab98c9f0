"""The connections of a job's heartbeat: each process holds one to rank 0, and small messages of one size go over it.

Rank 0 listens until all have come, then never again. It takes a connection for one of the job's only if it brings,
within seconds, the token that all know from their channel. A message is a struct of fixed size, never a pickle, so
nothing that arrives takes memory; what cannot be read ends its connection.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterable

from tfdist.cluster.channel import Channel
from tfdist.cluster.greeting import TOKEN_BYTES, connect, greeted, listen
from tfdist.cluster.places import Place
from tfdist.cluster.ports import own_address

__all__ = ["BEAT", "FAILED", "GOODBYE", "VERDICT", "Message", "Star", "open_star"]

MEET_SECONDS = 20.0
"""How long the processes try to reach rank 0, after which the job goes on without a heartbeat."""

_LEAVE_SECONDS = 1.0
_MESSAGE = struct.Struct(">BBiiqqd48s400s")
_MOST_WAITING = 16 * _MESSAGE.size  # bytes that a peer has not taken; no more beats are added to them
_GONE_SECONDS = 25

BEAT, GOODBYE, FAILED, VERDICT = range(1, 5)
"""Kinds of messages: where I am; I have done my part; I end the job; the job ends, since …"""


@dataclasses.dataclass(frozen=True)
class Message:
    """What one process tells another."""

    kind: int
    place: Place = dataclasses.field(default_factory=Place)
    rank: int = 0
    """Of a verdict: whom it concerns."""
    code: int = 0
    """Exit code."""
    text: str = ""

    def packed(self) -> bytes:
        """As it travels; long texts are cut."""
        place = self.place
        words = place.phase.encode()[:48], self.text.encode()[:400]
        return _MESSAGE.pack(
            self.kind, place.begun, self.rank, self.code, place.step, place.marks, place.seconds, *words
        )

    @classmethod
    def unpacked(cls, data: bytes) -> Message:
        """The message. Raises ValueError where it is none."""
        kind, begun, rank, code, step, marks, seconds, *words = _MESSAGE.unpack(data)
        phase, text = (word.rstrip(b"\0").decode(errors="ignore") for word in words)
        if kind not in (BEAT, GOODBYE, FAILED, VERDICT) or not 0 <= seconds < 1e12:
            raise ValueError(f"a message of kind {kind}")
        return cls(kind, Place(step, marks, phase, seconds, bool(begun)), rank, code, text)


class Star:
    """The connections that one process holds: rank 0 to all others, the others to rank 0. For one thread."""

    def __init__(self, connections: dict[int, socket.socket]) -> None:
        self._selector = selectors.DefaultSelector()
        self._connections = dict(connections)
        self._received = {rank: bytearray() for rank in connections}
        self._waiting = {rank: bytearray() for rank in connections}
        for rank, connection in connections.items():
            _settle(connection)
            self._selector.register(connection, selectors.EVENT_READ, rank)

    @property
    def ranks(self) -> list[int]:
        """To whom there is a connection."""
        return list(self._connections)

    def receive(self, seconds: float) -> list[tuple[int, Message | None]]:
        """What has come, with its sender; None: the connection is closed. Waits for the first word so long."""
        if not self._connections:
            time.sleep(seconds)
            return []
        events: list[tuple[int, Message | None]] = []
        for key, _ in self._selector.select(seconds):
            events += self._receive_from(key.data)
        for rank in list(self._connections):
            if not self._push(rank):
                events.append((rank, None))
        return events

    def send(self, message: Message, ranks: Iterable[int] | None = None) -> None:
        """To these ranks, or all; without waiting for any. A beat is left out where the last ones were not taken."""
        packed = message.packed()
        for rank in self.ranks if ranks is None else ranks:
            if rank in self._connections and (message.kind != BEAT or len(self._waiting[rank]) < _MOST_WAITING):
                self._waiting[rank] += packed
                self._push(rank, closing=False)

    def leave(self, message: Message) -> None:
        """Send a last message, and end all connections once it has arrived, or a second has passed."""
        self.send(message)
        deadline = time.monotonic() + _LEAVE_SECONDS
        ended: set[int] = set()
        while self._connections and time.monotonic() < deadline:
            for rank in self.ranks:
                # Only what is sent ends: a connection that is closed with something unread takes back what it has sent.
                if rank not in ended and not self._waiting[rank]:
                    ended.add(rank)
                    with contextlib.suppress(OSError):
                        self._connections[rank].shutdown(socket.SHUT_WR)
            self.receive(0.05)
        self.close()

    def close(self) -> None:
        """After which nothing is sent or received."""
        for rank in self.ranks:
            self._drop(rank)
        self._selector.close()

    def _receive_from(self, rank: int) -> list[tuple[int, Message | None]]:
        received = self._received[rank]
        try:
            part = self._connections[rank].recv(64 * _MESSAGE.size)
        except BlockingIOError:
            return []
        except OSError:
            part = b""
        received += part
        events: list[tuple[int, Message | None]] = []
        while len(received) >= _MESSAGE.size:
            data = bytes(received[: _MESSAGE.size])
            del received[: _MESSAGE.size]
            try:
                events.append((rank, Message.unpacked(data)))
            except ValueError:
                part = b""
                break
        if not part:
            self._drop(rank)
            events.append((rank, None))
        return events

    def _push(self, rank: int, *, closing: bool = True) -> bool:
        """Send what waits, as far as it is taken. False where the connection has broken; it is dropped if `closing`."""
        waiting = self._waiting[rank]
        try:
            while waiting:
                del waiting[: self._connections[rank].send(waiting)]
        except BlockingIOError:
            pass
        except OSError:
            if closing:
                self._drop(rank)
            return False
        return True

    def _drop(self, rank: int) -> None:
        connection = self._connections.pop(rank)
        self._selector.unregister(connection)
        connection.close()


def open_star(channel: Channel, hosts: list[str]) -> tuple[Star | None, str]:
    """The connections of this process, made on every process of a job at once.

    Where any cannot reach rank 0 there are none, on all processes, and the second value says why.

    Args:
        hosts: of all ranks; with one host, rank 0 listens on its loopback address.
    """
    one_host = len(set(hosts)) == 1
    listener, token, told = None, secrets.token_bytes(TOKEN_BYTES), ["", 0, ""]
    reason = ""
    with contextlib.ExitStack() as stack:
        if channel.rank == 0:
            address = "127.0.0.1" if one_host else channel.address or own_address()
            try:
                listener = stack.enter_context(listen(address, channel.size))
                told = [address, listener.getsockname()[1], token.hex()]
            except OSError as error:
                reason = f"rank 0 (host {hosts[0]}) cannot listen at {address}: {error.strerror or error}"
        address, port, token_text = channel.exchange("where the heartbeat goes", told)[0]
        token = bytes.fromhex(token_text)
        connections: dict[int, socket.socket] = {}
        if port and listener is not None:
            connections = greeted(listener, token, channel.size, MEET_SECONDS)
            if len(connections) < channel.size - 1:
                reason = "not all ranks have come to rank 0"
        elif port:
            try:
                connections = {0: connect((address, port), token, channel.rank, MEET_SECONDS)}
            except OSError as error:
                why = error.strerror or str(error) or type(error).__name__
                reason = f"rank {channel.rank} (host {hosts[channel.rank]}) does not reach {address}:{port} ({why})"
    reasons = [reason for reason in channel.exchange("the heartbeat", reason) if reason]
    reasons.sort(key=lambda reason: reason.startswith("not all"))  # one that was there knows better why
    if reasons:
        for connection in connections.values():
            connection.close()
        return None, reasons[0]
    return Star(connections), ""


def _settle(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _GONE_SECONDS)
