"""The addresses at which TensorFlow's servers meet: free ports, this host's own address, and no proxy between them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence

__all__ = ["hold_port", "own_address", "past_proxies"]


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


def past_proxies(addresses: Sequence[str]) -> None:
    """Keep grpc, which honours the proxy variables, from sending the traffic between ranks through a proxy."""
    hosts = [address.rpartition(":")[0] for address in addresses]
    for name in ("no_grpc_proxy", "no_proxy"):
        if hosts and (name in os.environ or name == "no_proxy"):
            known = [host for host in os.environ.get(name, "").split(",") if host]
            os.environ[name] = ",".join([*known, *(host for host in dict.fromkeys(hosts) if host not in known)])
