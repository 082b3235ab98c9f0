"""Addresses at which processes meet: who is reached, who is not and why, and what a proxy must not see."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.jobs import free_ports
from tfdist.cluster import ports
from tfdist.cluster.channel import Alone
from tfdist.cluster.ports import (
    hold_port,
    meet,
    own_address,
    past_proxies,
    require_free,
    require_reachable,
    unreachable,
)
from tfdist.errors import EnvironmentProblem

HOST = socket.gethostname()
NOWHERE = "no-such-host.invalid"


class Answering(Alone):
    """The channel of rank 0 in a job whose other ranks say what the test says."""

    def __init__(self, *others: Any) -> None:
        self.others = others
        self.size = 1 + len(others)
        self.said: list[tuple[str, Any]] = []

    def exchange(self, label: str, value: Any, failure: Any = None) -> list[Any]:
        self.said.append((label, value))
        return [value, *self.others]


@contextlib.contextmanager
def answering(server: socket.socket, answer: bytes = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])) -> Iterator[str]:
    """A server that answers each connection as a gRPC server begins; its address."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.close()


class TestMeeting:
    def test_on_one_host_it_is_loopback(self) -> None:
        channel = Answering([HOST, "10.0.0.9", 2], [HOST, "10.0.0.9", 3])
        assert meet(channel, "meeting", 1) == ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]
        assert channel.said == [("meeting", [HOST, own_address(), 1])]

    def test_between_hosts_it_is_the_address_of_each(self) -> None:
        channel = Answering([HOST, "10.0.0.8", 2], ["another", "10.0.0.9", 3])
        assert meet(channel, "meeting", 1) == [f"{own_address()}:1", "10.0.0.8:2", "10.0.0.9:3"]

    def test_a_held_port_is_ours_and_does_not_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TF_GRPC_REUSE_PORT", raising=False)
        with hold_port() as held:
            port = held.getsockname()[1]
            assert os.environ["TF_GRPC_REUSE_PORT"] == "true"
            with pytest.raises(OSError, match="in use"):
                socket.create_server(("127.0.0.1", port))
            assert list(unreachable([f"127.0.0.1:{port}"], 0.1, serving=True)) == [f"127.0.0.1:{port}"]
            server = socket.create_server(("", port), reuse_port=True)
            with answering(server):
                assert unreachable([f"127.0.0.1:{port}"], 5, serving=True) == {}


class TestReaching:
    def test_a_host_is_there_where_nobody_listens_unless_somebody_must(self) -> None:
        address = f"127.0.0.1:{free_ports(1)[0]}"
        assert unreachable([address], 20) == {}
        assert unreachable([address], 0, serving=True) == {address: "Connection refused"}

    def test_servers_are_there_by_each_kind_of_address(self) -> None:
        with contextlib.ExitStack() as stack:
            four = socket.create_server(("127.0.0.1", 0))
            port = four.getsockname()[1]
            stack.enter_context(answering(four))
            addresses = [f"127.0.0.1:{port}", f"localhost:{port}"]
            if socket.has_dualstack_ipv6():
                six = socket.create_server(("::1", 0), family=socket.AF_INET6)
                addresses.append(f"[::1]:{six.getsockname()[1]}")
                stack.enter_context(answering(six))
            assert unreachable(addresses, 20, serving=True) == {}

    @pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["nothing", "another program"])
    def test_who_only_listens_does_not_serve(self, answer: bytes) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server, answering(server, answer):
            address = f"127.0.0.1:{server.getsockname()[1]}"
            assert unreachable([address], 0) == {}
            assert list(unreachable([address], 0, serving=True)) == [address]

    def test_one_that_comes_in_time_is_waited_for(self) -> None:
        port = free_ports(1)[0]
        with contextlib.ExitStack() as servers:
            start = threading.Timer(
                0.3, lambda: servers.enter_context(answering(socket.create_server(("127.0.0.1", port))))
            )
            start.start()
            assert unreachable([f"127.0.0.1:{port}"], 20, serving=True) == {}
            start.join()

    def test_those_that_are_not_there_share_the_time(self) -> None:
        free = [f"127.0.0.1:{port}" for port in free_ports(4)]
        start = time.monotonic()
        with answering(socket.create_server(("127.0.0.1", 0))) as there:
            found = list(unreachable([*free, there, f"{NOWHERE}:1"], 0.5, serving=True))
            assert found == [*free, f"{NOWHERE}:1"]
        assert time.monotonic() - start < 20


class TestOwnPort:
    def test_a_free_port_will_do_and_one_that_a_launcher_holds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TF_GRPC_REUSE_PORT", raising=False)
        require_free(Alone(), f"127.0.0.1:{free_ports(1)[0]}")
        with hold_port() as held:
            require_free(Alone(), f"127.0.0.1:{held.getsockname()[1]}")

    def test_a_port_that_is_taken_is_told_to_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TF_GRPC_REUSE_PORT", raising=False)
        with socket.create_server(("", 0)) as server:
            own = f"127.0.0.1:{server.getsockname()[1]}"
            with pytest.raises(EnvironmentProblem, match=f"rank 0 cannot listen at its address {own}: Address already"):
                require_free(Alone(), own)


class TestRequiring:
    def test_one_process_reaches_itself(self) -> None:
        require_reachable(Alone(), [f"{NOWHERE}:1"])

    def test_all_reach_all(self) -> None:
        channel = Answering(["b", {}], ["c", {}])
        require_reachable(channel, [f"127.0.0.1:{free_ports(1)[0]}"])
        assert channel.said == [("reaching the others", [HOST, {}])]

    def test_who_does_not_reach_whom_is_told_on_every_rank(self) -> None:
        channel = Answering(["b", {"10.0.0.9:3": "timed out", "10.0.0.8:3": "No route to host"}], ["c", {"x:1": "y"}])
        with pytest.raises(EnvironmentProblem) as caught:
            require_reachable(channel, [])
        assert str(caught.value) == (
            "rank 1 (host b) does not reach 10.0.0.9:3 (timed out), 10.0.0.8:3 (No route to host) within 20 s. Look at "
            "the network between the hosts: names, routes, firewalls."
        )
        assert caught.value.shared

    def test_what_this_rank_does_not_reach_is_told_to_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ports, "_REACH_SECONDS", 0.2)
        channel = Answering(["b", {}])
        with pytest.raises(EnvironmentProblem, match=rf"rank 0 \(host {HOST}\) does not reach {NOWHERE}:1 \(.+\)"):
            require_reachable(channel, [f"{NOWHERE}:1"])
        assert list(channel.said[0][1][1]) == [f"{NOWHERE}:1"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"no_proxy": "a,b"}),
        ({"no_proxy": "b,c"}, {"no_proxy": "b,c,a"}),
        ({"no_grpc_proxy": "c", "no_proxy": ""}, {"no_grpc_proxy": "c,a,b", "no_proxy": "a,b"}),
    ],
)
def test_no_proxy_stands_between_ranks(
    before: dict[str, str], after: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    past_proxies(["a:1", "b:1", "a:2"])
    past_proxies(["a:1"])
    past_proxies([])
    names = ("no_proxy", "no_grpc_proxy")
    assert {name: os.environ[name] for name in names if name in os.environ} == after
