"""What `tfdist launch` starts: a plan that only depends on its arguments. `supervise.py` carries it out."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence

from tfdist.cluster.hosts import Host
from tfdist.cluster.identity import LAUNCHED
from tfdist.errors import UsageError

__all__ = ["Member", "ProcessSpec", "address_host", "members", "specs", "table"]


@dataclasses.dataclass(frozen=True)
class Member:
    """A process's place in the job."""

    rank: int
    role: str
    """worker, chief or ps, as in `TF_CONFIG`."""
    index: int
    """Its number among those of its role."""
    host: str

    @property
    def name(self) -> str:
        """As in `worker 1`."""
        return f"{self.role} {self.index}"


@dataclasses.dataclass(frozen=True)
class ProcessSpec:
    """A process to start."""

    member: Member
    address: str | None
    """Where its TensorFlow server listens; None for a process that has none."""
    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    """Added to that of its host."""


def members(hosts: Sequence[Host], servers: int = 0) -> tuple[Member, ...]:
    """The processes in the order of their ranks, host after host.

    Args:
        servers: 0 for synchronous training, in which all are workers. Else rank 0 is the chief, ranks 1 to `servers`
            are parameter servers, and the rest are workers.

    Raises:
        UsageError: there are too few processes for a chief, the servers and one worker.
    """
    places = [host.name for host in hosts for _ in range(host.processes)]
    if servers and len(places) < servers + 2:
        raise UsageError(
            f"backend='parameter_server' with parameter_servers={servers} needs a chief, {servers} server(s) and a "
            f"worker or more, but {len(places)} process(es) are to be started. Start {servers + 2} or more."
        )
    roles = ["chief"] + ["ps"] * servers if servers else []
    roles += ["worker"] * (len(places) - len(roles))
    return tuple(
        Member(rank, role, roles[:rank].count(role), host)
        for rank, (role, host) in enumerate(zip(roles, places, strict=True))
    )


def address_host(host: str, hosts: Sequence[Host]) -> str:
    """The name in a process's address: the loopback where all is on one host, else the host's as given."""
    return "127.0.0.1" if len(hosts) == 1 else host


def specs(planned: Sequence[Member], addresses: Sequence[str] | None, argv: Sequence[str]) -> tuple[ProcessSpec, ...]:
    """The processes to start.

    Args:
        addresses: `host:port` by rank; None for a job of one process without a server.
        argv: what each of them runs.
    """
    if addresses is None:
        return tuple(ProcessSpec(member, None, tuple(argv), ()) for member in planned)
    cluster: dict[str, list[str]] = {}
    for member, address in zip(planned, addresses, strict=True):
        cluster.setdefault(member.role, []).append(address)
    return tuple(
        ProcessSpec(member, address, tuple(argv), tuple(_environment(cluster, member).items()))
        for member, address in zip(planned, addresses, strict=True)
    )


def _environment(cluster: Mapping[str, list[str]], member: Member) -> dict[str, str]:
    config = {"cluster": cluster, "task": {"type": member.role, "index": member.index}}
    # The agent holds the port; with this, TensorFlow's server binds it beside the agent.
    return {"TF_CONFIG": json.dumps(config), "TF_GRPC_REUSE_PORT": "true", LAUNCHED: "1"}


def table(processes: Sequence[ProcessSpec]) -> str:
    """The plan for people: one line for each process, then the command they share."""
    rows = [("rank", "role", "host", "address")]
    for spec in processes:
        rows.append((str(spec.member.rank), spec.member.name, spec.member.host, spec.address or "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", f"each runs: {shlex.join(processes[0].argv)}"])
