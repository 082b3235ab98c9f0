"""`tfdist launch`: from its command line to a plan, and to what is done with the plan."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tfdist.cluster.hosts import Host, hosts_of
from tfdist.cluster.launch import address_host, members, specs, table
from tfdist.cluster.mpirun import Mpi, mpirun, version_of
from tfdist.cluster.supervise import Launch, supervise
from tfdist.commands import LaunchCommand, TrainCommand
from tfdist.errors import EnvironmentProblem, UsageError
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
        EnvironmentProblem: there is no mpirun to start an MPI job with.
    """
    hosts = hosts_of(command.processes, command.hosts, command.hostfile)
    count = sum(host.processes for host in hosts)
    backend = train.backend or "multi_worker_mirrored"  # as the processes choose it where there is TF_CONFIG
    kind = BACKENDS[backend]
    _check(backend, count, hosts, arguments)
    check_options(backend, train.options)
    train.check_for(backend)
    if train.replicas is not None and not kind.devices:
        raise UsageError(
            f"replicas={train.replicas} does not go with backend={backend!r}: its replicas are processes. Set "
            "processes or hosts of tfdist launch instead."
        )
    servers = (train.parameter_servers or 1) if kind.asynchronous else 0
    planned = members(hosts, servers)
    _check_supervision(command, train, hosts, servers)
    if command.dry_run == "kubernetes":
        from tfdist.cluster.kubernetes import Job, manifest

        roles = tuple(member.role for member in planned)
        print(manifest(Job(command.job_name, command.image, roles, tuple(arguments), mpi=kind.mpi)), end="")
        return 0
    argv = (sys.executable, "-m", "tfdist", "train", *arguments)
    if command.dry_run == "plan":
        if kind.mpi:
            argv = _mpi(command, "mpirun", "").command(hosts, argv)
        has_addresses = kind.processes and not kind.mpi
        addresses = [f"{address_host(member.host, hosts)}:<free port>" for member in planned]
        print(table(specs(planned, addresses if has_addresses else None, argv)))
        return 0
    _tell_of_restarts(command, train)
    return supervise(
        Launch(
            hosts=hosts,
            servers=servers,
            argv=argv,
            # A folder that was to be without checkpoints has some by then.
            argv_again=(*argv, "--resume", "auto") if train.resume == "never" else None,
            folder=str(Path.cwd()),
            has_servers=kind.processes,
            mpi=_found_mpi(command) if kind.mpi else None,
            quiet=train.quiet,
            rsh=tuple(shlex.split(command.rsh)),
            worker_restarts=3 if command.worker_restarts is None else command.worker_restarts,
            max_restarts=command.max_restarts,
            min_processes=command.min_processes,
            saves=train.checkpoint_dir is not None,
            grace=30.0 if command.grace is None else command.grace,
            start_seconds=command.start_seconds,
        )
    )


def _found_mpi(command: LaunchCommand) -> Mpi:
    program = mpirun()
    if program is None:
        raise EnvironmentProblem("there is no mpirun beside this Python or on PATH. Run make setup, or install an MPI.")
    return _mpi(command, program, version_of(program))


def _mpi(command: LaunchCommand, program: str, version: str) -> Mpi:
    rsh = None if command.rsh == LaunchCommand.rsh else tuple(shlex.split(command.rsh))
    return Mpi(program, version, rsh, ("PYTHONPATH",) if "PYTHONPATH" in os.environ else ())


def _tell_of_restarts(command: LaunchCommand, train: TrainCommand) -> None:
    if not command.max_restarts or train.quiet:
        return
    if train.checkpoint_dir is None:
        told = "there is no checkpoint_dir, so that training begins anew with each of the max_restarts"
    elif train.resume not in ("auto", "never"):
        told = f"each of the max_restarts goes back to resume={train.resume}"
    else:
        return
    print(f"tfdist: {told}={command.max_restarts}.", file=sys.stderr, flush=True)


def _check_supervision(command: LaunchCommand, train: TrainCommand, hosts: Sequence[Host], servers: int) -> None:
    """Raises UsageError for settings of supervision that have no effect here, or cannot have it."""
    if command.worker_restarts is not None and not servers:
        raise UsageError(
            f"worker_restarts={command.worker_restarts} has no effect without parameter servers, since synchronous "
            "workers cannot go on without each other. Use max_restarts, or leave it out."
        )
    if command.grace is not None and train.checkpoint_dir is None:
        raise UsageError(
            f"grace={command.grace:g} has no effect without checkpoint_dir: there is nothing to save. Set "
            "--checkpoint-dir after --, or leave it out."
        )
    least, count = command.min_processes, sum(host.processes for host in hosts)
    if least is None:
        return
    if least > count:
        raise UsageError(
            f"min_processes={least} is more than the {count} process(es) to be started. Use {count} or less."
        )
    if len(hosts) == 1:
        raise UsageError(f"min_processes={least} has no effect with one host: no other is left when it is lost.")
    if servers and least < servers + 2:
        raise UsageError(
            f"min_processes={least} is too few for a chief, {servers} parameter server(s) and a worker. Use "
            f"{servers + 2} or more."
        )


def _check(backend: str, count: int, hosts: Sequence[Host], arguments: Sequence[str]) -> None:
    kind = BACKENDS[backend]
    words = shlex.join(arguments)
    if not kind.processes and count > 1:
        raise UsageError(
            f"backend={backend!r} trains in one process, but {count} processes are to be started. Leave launch out: "
            f"python -m tfdist train {words}"
        )
    if not kind.processes and not hosts[0].is_this:
        raise UsageError(f"backend={backend!r} trains in one process; start it on {hosts[0].name} without launch.")
