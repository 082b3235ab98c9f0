"""Several hosts on one machine: network namespaces on a switch of their own, which the machine's network never sees.

Used by the tests of this folder. A lab needs root and `ip` (Debian: iproute2), and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.jobs import LIMIT, Ended, Job, environment, mpirun, python

__all__ = ["Lab", "lab", "need"]

AGENT = Path(__file__).with_name("enter.sh")
ON_HOST = Path(__file__).with_name("on_host.sh")
SUBNET = "10.79.0.0/24"  # each lab has its own switch, so that all labs can use the same addresses

_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Lab:
    """Hosts that run commands. They share the machine's files, and nothing of its network."""

    name: str
    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    hosts_file: Path

    def start(self, host: str, command: Sequence[object], env: Mapping[str, str] | None = None) -> Job:
        """Start a command on `host`."""
        return Job([str(ON_HOST), host, *map(str, command)], {**environment(env), **self._variables()})

    def run(
        self, host: str, command: Sequence[object], timeout: float = LIMIT, env: Mapping[str, str] | None = None
    ) -> Ended:
        """Run a command on `host`."""
        return self.start(host, command, env).finish(timeout)

    def start_mpi(
        self,
        hosts: Sequence[str] | Path,
        script: str | Path,
        *args: object,
        flags: Sequence[object] = (),
        env: Mapping[str, str] | None = None,
    ) -> Job:
        """`mpirun --host … python script args`, started on the first host; `hosts` may be a host file."""
        where = ["--hostfile", hosts] if isinstance(hosts, Path) else ["--host", ",".join(hosts)]
        agent = ["--prtemca", "plm_ssh_agent", AGENT]
        first = self.hosts[0]
        # Hosts that are reached by ssh have no environment of ours, so mpirun is told what to hand on.
        handed_on = ["-x", "PYTHONPATH"]
        return self.start(first, [mpirun(), *agent, *where, *handed_on, *flags, *python(script, args)], env)

    def run_mpi(
        self,
        hosts: Sequence[str] | Path,
        script: str | Path,
        *args: object,
        flags: Sequence[object] = (),
        env: Mapping[str, str] | None = None,
        timeout: float = LIMIT,
    ) -> Ended:
        """As `start_mpi`, to its end."""
        return self.start_mpi(hosts, script, *args, flags=flags, env=env).finish(timeout)

    def cut(self, host: str) -> None:
        """Take the link of `host` down: nothing goes in or out, and nobody is told."""
        _ip("-n", self._switch, "link", "set", host, "down")

    def mend(self, host: str) -> None:
        """Bring the link of `host` up again."""
        _ip("-n", self._switch, "link", "set", host, "up")

    def mute(self, host: str) -> None:
        """From now on nothing that `host` sends reaches another host, while it hears them. It is not told."""
        for other, address in zip(self.hosts, self.addresses, strict=True):
            if other != host:  # it sends to a link address that nobody has, and the switch drops that
                neighbour = ["neighbour", "replace", address, "lladdr", "02:00:00:00:00:99", "nud", "permanent"]
                _ip("-n", f"{self.name}-{host}", *neighbour, "dev", "eth0")

    def processes(self, host: str) -> list[int]:
        """The ids of all processes on `host`."""
        return _running([f"{self.name}-{host}"])

    @property
    def _switch(self) -> str:
        return f"{self.name}-switch"

    def _variables(self) -> dict[str, str]:
        return {"TFDIST_LAB": self.name, "TFDIST_LAB_HOSTS": str(self.hosts_file)}


@contextlib.contextmanager
def lab(count: int, rate: str | None = None) -> Iterator[Lab]:
    """A lab of `count` hosts, node0 onwards.

    Args:
        count: how many hosts.
        rate: a limit for each link in both directions, as `tc` writes it ("200mbit").
    """
    need("ip")
    _remove_orphans()
    name = f"tfdist-{os.getpid()}-{next(_numbers)}"
    hosts = tuple(f"node{i}" for i in range(count))
    addresses = tuple(f"10.79.0.{i + 1}" for i in range(count))
    with tempfile.TemporaryDirectory(prefix="tfdist-lab-") as folder:
        hosts_file = Path(folder) / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{a} {h}" for a, h in zip(addresses, hosts, strict=True))]
        hosts_file.write_text("\n".join(lines) + "\n")
        made = Lab(name, hosts, addresses, hosts_file)
        try:
            _build(made, rate)
            yield made
        finally:
            _remove(name)


def need(*programs: str) -> None:
    """Skip the test where it cannot have hosts of its own."""
    if os.getuid() != 0:
        pytest.skip("hosts of their own need root")
    for program in programs:
        if not _found(program):
            pytest.skip(f"no {program} here: see scripts/test_tools.sh")


def _found(program: str) -> bool:
    folders = [*os.get_exec_path(), "/usr/sbin", "/sbin"]
    return any(os.access(Path(folder) / program, os.X_OK) for folder in folders)


def _build(lab: Lab, rate: str | None) -> None:
    switch = f"{lab.name}-switch"
    try:
        _ip("netns", "add", switch)
    except RuntimeError as error:
        pytest.skip(f"this machine allows no network namespaces: {error}")
    _ip("-n", switch, "link", "add", "switch", "type", "bridge")
    _ip("-n", switch, "link", "set", "switch", "up")
    for host, address in zip(lab.hosts, lab.addresses, strict=True):
        there = f"{lab.name}-{host}"
        _ip("netns", "add", there)
        _ip("-n", switch, "link", "add", host, "type", "veth", "peer", "name", "eth0", "netns", there)
        _ip("-n", switch, "link", "set", host, "master", "switch", "up")
        _ip("-n", there, "address", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", there, "link", "set", "lo", "up")
        _ip("-n", there, "link", "set", "eth0", "up")
        for namespace, device in ((there, "eth0"), (switch, host)) if rate else ():
            limit = ["root", "tbf", "rate", str(rate), "burst", "128kb", "latency", "200ms"]
            _call("tc", "-n", namespace, "qdisc", "add", "dev", device, *limit)


def _remove(name: str) -> None:
    """Remove the lab of this name, and end what still runs on its hosts."""
    namespaces = [found for found in _ip("netns", "list").split() if found.startswith(f"{name}-")]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in _running(namespaces):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + 5
        while _running(namespaces) and time.monotonic() < deadline:
            time.sleep(0.05)
    for namespace in namespaces:
        _ip("netns", "delete", namespace)


def _remove_orphans() -> None:
    """Remove the labs of test runs that were killed: a lab's name holds the id of the process that made it."""
    for name in {found.rpartition("-")[0] for found in _ip("netns", "list").split() if found.startswith("tfdist-")}:
        if not Path("/proc", name.split("-")[1]).exists():
            with contextlib.suppress(RuntimeError):  # another run may be removing it
                _remove(name)


def _running(namespaces: Sequence[str]) -> list[int]:
    return [int(pid) for namespace in namespaces for pid in _ip("netns", "pids", namespace).split()]


def _ip(*args: str) -> str:
    return _call("ip", *args)


def _call(*command: str) -> str:
    """What a command of iproute2 printed."""
    env = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    if answer.returncode:
        raise RuntimeError(f"{' '.join(command)}: {answer.stderr.strip()}")
    return answer.stdout
