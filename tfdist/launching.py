"""`tfdist launch`: from its command line to a plan, and to what is done with the plan."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tfdist.cluster.hosts import Host, hosts_of
from tfdist.cluster.launch import address_host, members, specs, table
from tfdist.cluster.supervise import Launch, supervise
from tfdist.config import LaunchCommand, TrainCommand
from tfdist.errors import UsageError
from tfdist.strategies.table import BACKENDS, check_options

__all__ = ["launch"]


def launch(command: LaunchCommand, train: TrainCommand, arguments: Sequence[str]) -> int:
    """Start the processes and wait for their end, or print what would be started.

    Args:
        train: the parsed `arguments` of `tfdist train`.

    Returns:
        The exit code.

    Raises:
        UsageError: the settings do not go together. Nothing has been started.
    """
    hosts = hosts_of(command.processes, command.hosts, command.hostfile)
    count = sum(host.processes for host in hosts)
    backend = train.backend or "multi_worker_mirrored"  # as the processes choose it where there is TF_CONFIG
    kind = BACKENDS[backend]
    _check(backend, count, hosts, arguments, dry=command.dry_run != "no")
    check_options(backend, train.options)
    train.check_for(backend)
    if train.replicas is not None and not kind.devices:
        raise UsageError(
            f"replicas={train.replicas} does not go with backend={backend!r}: its replicas are processes. Set "
            "processes or hosts of tfdist launch instead."
        )
    servers = (train.parameter_servers or 1) if kind.asynchronous else 0
    planned = members(hosts, servers)
    if command.dry_run == "kubernetes":
        from tfdist.cluster.kubernetes import Job, manifest

        roles = tuple(member.role for member in planned)
        print(manifest(Job(command.job_name, command.image, roles, tuple(arguments), mpi=kind.mpi)), end="")
        return 0
    argv = (sys.executable, "-m", "tfdist", "train", *arguments)
    if command.dry_run == "plan":
        if kind.mpi:
            argv = ("mpirun", *_mpi_places(command), "-np", str(count), *argv)
        has_addresses = kind.processes and not kind.mpi
        addresses = [f"{address_host(member.host, hosts)}:<free port>" for member in planned]
        print(table(specs(planned, addresses if has_addresses else None, argv)))
        return 0
    return supervise(
        Launch(
            hosts=hosts,
            members=planned,
            argv=argv,
            folder=str(Path.cwd()),
            has_servers=kind.processes,
            quiet=train.quiet,
            rsh=tuple(shlex.split(command.rsh)),
            worker_restarts=command.worker_restarts,
            start_seconds=command.start_seconds,
        )
    )


def _check(backend: str, count: int, hosts: Sequence[Host], arguments: Sequence[str], *, dry: bool) -> None:
    kind = BACKENDS[backend]
    words = shlex.join(arguments)
    if kind.mpi and not dry:
        raise UsageError(
            f"backend={backend!r} is started by MPI, not by tfdist launch. Use: mpirun -np {count} python -m tfdist "
            f"train {words}"
        )
    if not kind.processes and count > 1:
        raise UsageError(
            f"backend={backend!r} trains in one process, but {count} processes are to be started. Leave launch out: "
            f"python -m tfdist train {words}"
        )
    if not kind.processes and not hosts[0].is_this:
        raise UsageError(f"backend={backend!r} trains in one process; start it on {hosts[0].name} without launch.")


def _mpi_places(command: LaunchCommand) -> list[str]:
    if command.hosts is not None:
        return ["--host", command.hosts]
    return ["--hostfile", str(command.hostfile)] if command.hostfile is not None else []
