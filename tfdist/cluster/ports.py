"""The addresses at which TensorFlow's servers meet: free ports, this host's own address, and no proxy between them."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence

from tfdist.cluster.channel import Channel, shared
from tfdist.errors import EnvironmentProblem

__all__ = ["hold_port", "meet", "own_address", "past_proxies", "require_free", "require_reachable", "unreachable"]

_REACH_SECONDS = 20.0
_PROBE_SECONDS = 1.0


@contextlib.contextmanager
def hold_port() -> Iterator[socket.socket]:
    """A free port that stays ours until TensorFlow's server listens on it.

    The socket is bound but does not listen. With SO_REUSEPORT on both, the server binds the same port beside
    it, so there is no moment at which another program could take the port.
    """
    os.environ["TF_GRPC_REUSE_PORT"] = "true"
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if held.family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind(("", 0))
        yield held


def own_address() -> str:
    """The address by which other hosts reach this one."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; the system chooses the interface that leads outside
        return str(probe.getsockname()[0])
    return socket.gethostname()


def meet(channel: Channel, label: str, port: int) -> list[str]:
    """The addresses (`host:port`) of all ranks, each of which holds a port. On loopback where there is one host."""
    ranks = channel.exchange(label, [socket.gethostname(), own_address(), port])
    one_host = len({host for host, _, _ in ranks}) == 1
    return [f"{'127.0.0.1' if one_host else address}:{port}" for _, address, port in ranks]


def require_reachable(channel: Channel, addresses: Sequence[str]) -> None:
    """Check from every rank that all hosts can be reached. A port where nobody listens yet will do.

    Raises:
        EnvironmentProblem: names who cannot be reached from where, and why; on every rank.
    """
    if channel.size == 1:
        return
    problems = channel.exchange("reaching the others", [socket.gethostname(), unreachable(addresses, _REACH_SECONDS)])
    for rank, (host, reasons) in enumerate(problems):
        if reasons:
            places = ", ".join(f"{address} ({reason})" for address, reason in reasons.items())
            raise shared(
                EnvironmentProblem(
                    f"rank {rank} (host {host}) does not reach {places} within {_REACH_SECONDS:g} s. Look at the "
                    "network between the hosts: names, routes, firewalls."
                )
            )


def unreachable(addresses: Sequence[str], seconds: float, *, serving: bool = False) -> dict[str, str]:
    """Those of the addresses whose host does not answer in time, with the reason.

    Args:
        serving: whether a gRPC server must answer there, too. (The system takes connections for a process that is
            stopped, and another program may listen.)
    """
    deadline = time.monotonic() + seconds
    reasons: dict[str, str] = {}
    for address in addresses:
        host, _, port = address.rpartition(":")
        while True:
            left = max(_PROBE_SECONDS, deadline - time.monotonic())
            try:
                with socket.create_connection((host.strip("[]"), int(port)), timeout=left) as connection:
                    if serving:
                        _require_grpc(connection)
                break
            except OSError as error:
                if isinstance(error, ConnectionRefusedError) and not serving:
                    break
                if time.monotonic() >= deadline:
                    reasons[address] = error.strerror or str(error) or type(error).__name__
                    break
                time.sleep(0.1)
    return reasons


def _require_grpc(connection: socket.socket) -> None:
    """Raises OSError where nobody answers as HTTP/2 servers do (RFC 9113, 3.4): with a frame of settings."""
    connection.settimeout(_PROBE_SECONDS)
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    answer = b""
    while len(answer) < 9:
        part = connection.recv(9 - len(answer))
        if not part:
            raise ConnectionError("the connection is closed")
        answer += part
    if answer[3] != 4:
        raise ConnectionError("another program answers there")


def require_free(channel: Channel, own: str) -> None:
    """Check that each rank can listen at its own address.

    Raises:
        EnvironmentProblem: names the first that cannot, and why; on every rank.
    """
    port = int(own.rpartition(":")[2])
    reason = None
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if "TF_GRPC_REUSE_PORT" in os.environ:  # a launcher's agent holds the port for us
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if tried.family == socket.AF_INET6:
            tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            tried.bind(("", port))
            tried.listen()
        except OSError as error:
            reason = error.strerror or str(error)
    for rank, problem in enumerate(channel.exchange("the own port", [own, reason])):
        if problem[1] is not None:
            raise shared(
                EnvironmentProblem(
                    f"rank {rank} cannot listen at its address {problem[0]}: {problem[1]}. End what listens there, or "
                    "give it another port in TF_CONFIG."
                )
            )


def past_proxies(addresses: Sequence[str]) -> None:
    """Keep grpc, which honours the proxy variables, from sending the traffic between ranks through a proxy."""
    hosts = [address.rpartition(":")[0] for address in addresses]
    for name in ("no_grpc_proxy", "no_proxy"):
        if hosts and (name in os.environ or name == "no_proxy"):
            known = [host for host in os.environ.get(name, "").split(",") if host]
            os.environ[name] = ",".join([*known, *(host for host in dict.fromkeys(hosts) if host not in known)])
