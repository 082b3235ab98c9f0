"""The channel of processes that no MPI connects: each holds one connection to rank 0, which passes messages on.

Used where TF_CONFIG or SLURM tells the processes of each other. Rank 0 listens at an address that all know only until
all have come, so that TensorFlow's server can have the port afterwards; a message is a length and JSON, never a pickle,
and a connection that does not bring the job's own tag within seconds is dropped, without keeping others waiting.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.cluster.channel import Failure, agreed, shared
from tfdist.cluster.identity import Identity
from tfdist.errors import EnvironmentProblem

__all__ = ["START_SECONDS", "TcpChannel", "open_tcp", "start_seconds"]

START_SECONDS = "TFDIST_START_SECONDS"
"""Variable of the environment: how long the processes of a job wait for each other when it starts."""

_GREETING_BYTES = 4096
_MESSAGE_BYTES = 1 << 28
_GREETING_SECONDS = 2.0
_STRANGERS = 64  # connections that may be greeted at a time, beside those of the job
_GONE_SECONDS = 25  # after which a host that no longer answers counts as gone

# Below the ports that Linux gives to outgoing connections, above those of known services.
_LOWEST_PORT, _PORTS, _TRIED_PORTS = 15000, 16000, 8

Address = tuple[str, int]


class TcpChannel:
    """All processes of the job make one, alike; it returns when all have come."""

    def __init__(self, rank: int, size: int, meeting: Sequence[Address], tag: str, names: Sequence[str] = ()) -> None:
        """Meet.

        Args:
            meeting: addresses at which rank 0 may be found; it takes the first one that is free.
            tag: what only the processes of this job know, or at least no other job on these hosts has.
            names: what ranks are called in messages.

        Raises:
            EnvironmentProblem: some have not come in time; names them.
        """
        self.rank = rank
        self.size = size
        self._names = list(names) or [f"rank {r}" for r in range(size)]
        self._deadline = time.monotonic() + start_seconds()
        self._gone: EnvironmentProblem | None = None
        self._peers = self._receive_all(meeting, tag) if rank == 0 else [self._find(meeting, tag)]

    @property
    def address(self) -> str | None:
        """See `Channel`."""
        if self.rank != 0 or not self._peers:
            return None
        return str(self._peers[0].getsockname()[0]).removeprefix("::ffff:")

    def __deepcopy__(self, memo: dict[int, Any]) -> TcpChannel:
        return self  # programs copy objects that hold a strategy; there is one group of processes

    def exchange(self, label: str, value: Any, failure: Failure | None = None) -> list[Any]:
        """See `Channel`. Raises EnvironmentProblem where another process has gone, and whenever it is called again."""
        if self._gone is not None:
            raise self._gone
        mine = [label, value, failure]
        if self.rank == 0:
            try:
                everything = [mine, *(self._receive(peer, r) for r, peer in enumerate(self._peers, start=1))]
            except EnvironmentProblem as gone:
                # All others wait for an answer, or will.
                self._tell({"gone": str(gone)})
                raise shared(gone) from None
            everything = self._tell(everything)
        else:
            with self._naming(0, label):
                _send(self._peers[0], json.dumps(mine).encode())
            everything = self._receive(self._peers[0], 0)
            if isinstance(everything, dict):
                self._gone = EnvironmentProblem(everything["gone"])
                raise shared(self._gone)
        return agreed(everything)

    def arrive(self) -> Callable[[], bool]:
        """See `Channel`."""

        def meet() -> None:
            with contextlib.suppress(Exception):  # one has gone, or is elsewhere: nobody to wait for
                self.exchange("the end of the job", None)

        meeting = threading.Thread(target=meet, daemon=True)
        meeting.start()
        return lambda: not meeting.is_alive()

    def abort(self, code: int) -> None:
        """End this process at once; the others find their connection to it closed, and the launcher ends them."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _receive_all(self, meeting: Sequence[Address], tag: str) -> list[socket.socket]:
        peers: dict[int, socket.socket] = {}
        places = threading.BoundedSemaphore(self.size + _STRANGERS)
        lock = threading.Lock()

        def greet(connection: socket.socket) -> None:
            rank = _greeted(connection, tag, self.size)
            with lock:
                if rank is None or rank in peers:
                    connection.close()
                else:
                    peers[rank] = connection
            places.release()

        with _listen(meeting, self.size) as listener:
            listener.settimeout(0.02)
            while len(peers) < self.size - 1:
                if time.monotonic() > self._deadline:
                    missing = [name for r, name in enumerate(self._names) if r and r not in peers]
                    raise EnvironmentProblem(
                        f"{', '.join(missing)} did not come within {start_seconds():g} s. Look at the output of that "
                        f"process, and whether its host reaches this one; {START_SECONDS} sets how long to wait."
                    )
                with contextlib.suppress(OSError):  # nobody, or one that has left already
                    connection, _ = listener.accept()
                    if places.acquire(blocking=False):
                        threading.Thread(target=greet, args=(connection,), daemon=True).start()
                    else:
                        connection.close()
        return [peers[r] for r in range(1, self.size)]

    def _find(self, meeting: Sequence[Address], tag: str) -> socket.socket:
        reasons: dict[str, str] = {}
        while time.monotonic() < self._deadline:
            for address in meeting:
                try:
                    return _greet(address, tag, self.rank)
                except (OSError, ValueError) as error:
                    reasons[f"{address[0]}:{address[1]}"] = str(error)
            time.sleep(0.1)
        places = ", ".join(f"{place} ({reason})" for place, reason in list(reasons.items())[:3])
        raise EnvironmentProblem(
            f"{self._names[0]} could not be reached within {start_seconds():g} s at {places}. Look at its output, and "
            f"whether this host reaches that one; {START_SECONDS} sets how long to wait."
        )

    def _receive(self, peer: socket.socket, rank: int) -> Any:
        with self._naming(rank, "a message"):
            return _receive(peer, _MESSAGE_BYTES)

    def _tell(self, message: Any) -> Any:
        """Send rank 0's answer to all; as it arrives there, with lists for tuples. One that has gone shows later."""
        text = json.dumps(message).encode()
        for peer in self._peers:
            with contextlib.suppress(OSError):
                _send(peer, text)
        return json.loads(text)

    @contextlib.contextmanager
    def _naming(self, rank: int, what: str) -> Any:
        try:
            yield
        except (OSError, ValueError) as error:
            self._gone = EnvironmentProblem(
                f"{self._names[rank]} has gone ({what}: {error or type(error).__name__}). Its own output tells why."
            )
            raise self._gone from None


@functools.cache
def open_tcp(identity: Identity) -> TcpChannel:
    """The channel of a job that TF_CONFIG or SLURM describes; one per process.

    Under TF_CONFIG all meet at the first process's own port, before TensorFlow listens there. SLURM gives no ports:
    there they meet at one of several that follow from the numbers of job and step.

    Raises:
        EnvironmentProblem: not all have come in time.
    """
    if identity.tf_config is not None:
        members = identity.tf_config.members
        tag = hashlib.sha256(json.dumps(members).encode()).hexdigest()
        names = [f"rank {r} ({address})" for r, address in enumerate(members)]
        return TcpChannel(identity.rank, identity.size, [_address(members[0])], tag, names)
    step = identity.slurm
    assert step is not None
    tag = f"{step.job} of user {os.getuid()}"
    host = "127.0.0.1" if identity.local_size == identity.size else step.first_host
    start = int.from_bytes(hashlib.sha256(tag.encode()).digest()[:4])
    meeting = [(host, _LOWEST_PORT + (start + 7919 * i) % _PORTS) for i in range(_TRIED_PORTS)]
    return TcpChannel(identity.rank, identity.size, meeting, tag)


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def start_seconds() -> float:
    """How long the processes of a job wait for each other when it starts. Raises EnvironmentProblem for no number."""
    text = os.environ.get(START_SECONDS, "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise EnvironmentProblem(f"{START_SECONDS}={text!r} must be a number of seconds above 0.")
    return seconds


def _listen(meeting: Sequence[Address], size: int) -> socket.socket:
    """At the first of the ports that is free; on loopback only, where the job has this one host."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    reason: OSError | None = None
    for host, port in meeting:
        local = host in ("127.0.0.1", "localhost")
        listener = socket.socket(socket.AF_INET if local else family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if "TF_GRPC_REUSE_PORT" in os.environ:  # beside a launcher's socket that holds the port for us
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            listener.bind(("127.0.0.1" if local else "", port))
            listener.listen(size + 16)
            return listener
        except OSError as error:
            listener.close()
            reason = error
    ports = ", ".join(str(port) for _, port in meeting)
    raise EnvironmentProblem(f"this host has no free port among {ports} ({reason}). End what listens there.")


# A greeting has three parts: "job, rank" from a process, "job" from rank 0, and "job" again. So neither takes the other
# for connected where that one has given up in the meantime.


def _greet(address: Address, tag: str, rank: int) -> socket.socket:
    """Connect to rank 0. Raises OSError or ValueError where it is not there, or someone else is."""
    connection = socket.create_connection(address, timeout=_GREETING_SECONDS)
    try:
        _send(connection, json.dumps({"tfdist": tag, "rank": rank}).encode())
        if _receive(connection, _GREETING_BYTES, _GREETING_SECONDS) != {"tfdist": tag}:
            raise ValueError("another program answers there")
        _send(connection, json.dumps({"tfdist": tag}).encode())
        _settle(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _greeted(connection: socket.socket, tag: str, size: int) -> int | None:
    """The rank of a process of this job that has connected; None for anything else."""
    try:
        connection.settimeout(_GREETING_SECONDS)
        greeting = _receive(connection, _GREETING_BYTES, _GREETING_SECONDS)
        rank = greeting["rank"] if isinstance(greeting, dict) and greeting.get("tfdist") == tag else None
        if not isinstance(rank, int) or not 0 < rank < size:
            return None
        _send(connection, json.dumps({"tfdist": tag}).encode())
        if _receive(connection, _GREETING_BYTES, _GREETING_SECONDS) != {"tfdist": tag}:
            return None
        _settle(connection)
        return rank
    except (OSError, ValueError, KeyError):
        return None


def _settle(connection: socket.socket) -> None:
    """For the time of the job: no time limit, but a host that has vanished is noticed."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    # The same while something that was sent has not been confirmed, when nothing else is sent to keep alive.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _GONE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send(connection: socket.socket, text: bytes) -> None:
    connection.sendall(struct.pack(">Q", len(text)) + text)


def _receive(connection: socket.socket, most: int, seconds: float | None = None) -> Any:
    """One message. Raises OSError or ValueError where none comes in time, or one that is too long or no JSON."""
    deadline = None if seconds is None else time.monotonic() + seconds
    (length,) = struct.unpack(">Q", _exactly(connection, 8, deadline))
    if length > most:
        raise ValueError(f"a message of {length} bytes")
    try:
        return json.loads(_exactly(connection, length, deadline))
    except RecursionError:
        raise ValueError("a message that is nested too deeply") from None


def _exactly(connection: socket.socket, length: int, deadline: float | None) -> bytes:
    parts = []
    while length:
        if deadline is not None:  # of all parts together: each may come just in time
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        part = connection.recv(min(length, 1 << 20))
        if not part:
            raise ConnectionError("the connection is closed")
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError("it came too slowly")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
