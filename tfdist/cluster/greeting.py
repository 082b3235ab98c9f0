"""How the processes of a job find rank 0 for their heartbeat, and how rank 0 tells them from strangers: by a token."""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import struct
import time

__all__ = ["TOKEN_BYTES", "connect", "greeted", "listen"]

TOKEN_BYTES = 32
"""Half of the token is brought, the other half is the answer."""

_HALF = TOKEN_BYTES // 2
_GREETING = struct.Struct(f">{_HALF}sI")
_GREETING_SECONDS = 2.0
_STRANGERS = 64  # connections that may be about to greet at a time, beside those of the job


def listen(address: str, size: int) -> socket.socket:
    """At a port of its own choice. Raises OSError."""
    family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place[:2], family=family, backlog=size + 16)


def connect(place: tuple[str, int], token: bytes, rank: int, seconds: float) -> socket.socket:
    """To rank 0. Raises OSError where it is not there in time, or someone else is."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _greet(place, token, rank)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def greeted(listener: socket.socket, token: bytes, size: int, seconds: float) -> dict[int, socket.socket]:
    """The connections of the ranks from 1 on, as far as they have come in time. All others are dropped."""
    connections: dict[int, socket.socket] = {}
    strangers: dict[socket.socket, tuple[float, bytearray]] = {}
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:

        def drop(stranger: socket.socket) -> None:
            selector.unregister(stranger)
            del strangers[stranger]
            stranger.close()

        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        while len(connections) < size - 1 and time.monotonic() < deadline:
            for key, _ in selector.select(0.1):
                if key.fileobj is listener:
                    with contextlib.suppress(OSError):  # no more of them
                        while True:
                            new, _ = listener.accept()
                            new.setblocking(False)
                            strangers[new] = time.monotonic() + _GREETING_SECONDS, bytearray()
                            selector.register(new, selectors.EVENT_READ)
                            if len(strangers) > size + _STRANGERS:
                                drop(next(iter(strangers)))
                    continue
                stranger = key.fileobj
                assert isinstance(stranger, socket.socket)
                if stranger not in strangers:  # dropped just now
                    continue
                rank = _rank_of(stranger, strangers[stranger][1], token, size, connections)
                if rank is None:
                    continue
                if rank:
                    selector.unregister(stranger)
                    del strangers[stranger]
                    connections[rank] = stranger
                else:
                    drop(stranger)
            for stranger in [s for s, (until, _) in strangers.items() if time.monotonic() > until]:
                drop(stranger)
        for stranger in list(strangers):
            drop(stranger)
    return connections


def _rank_of(
    stranger: socket.socket, said: bytearray, token: bytes, size: int, known: dict[int, socket.socket]
) -> int | None:
    """Which rank this is; None: not known yet; 0: none of ours."""
    try:
        part = stranger.recv(_GREETING.size - len(said))
        if not part:
            return 0
        said += part
        if len(said) < _GREETING.size:
            return None
        brought, rank = _GREETING.unpack(bytes(said))
        if not hmac.compare_digest(brought, token[:_HALF]) or not 0 < rank < size or rank in known:
            return 0
        stranger.sendall(token[_HALF:])
        return int(rank)
    except BlockingIOError:
        return None
    except OSError:
        return 0


def _greet(place: tuple[str, int], token: bytes, rank: int) -> socket.socket:
    connection = socket.create_connection(place, timeout=_GREETING_SECONDS)
    try:
        connection.sendall(_GREETING.pack(token[:_HALF], rank))
        answer, until = b"", time.monotonic() + _GREETING_SECONDS
        while len(answer) < _HALF:
            connection.settimeout(max(1e-3, until - time.monotonic()))
            part = connection.recv(_HALF - len(answer))
            if not part:
                raise ConnectionError("the connection was closed")
            answer += part
        if not hmac.compare_digest(answer, token[_HALF:]):
            raise ConnectionError("another program answers there")
    except BaseException:
        connection.close()
        raise
    return connection
