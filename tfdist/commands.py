"""The commands of tfdist: a dataclass for each, whose fields are its flags."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Literal

from tfdist.cluster.hosts import MOST_PROCESSES
from tfdist.config import Settings, within
from tfdist.errors import UsageError, closest
from tfdist.strategies.table import check_backend

__all__ = [
    "ChaosCommand",
    "CheckCommand",
    "CheckpointsCommand",
    "CompareCommand",
    "EvaluateCommand",
    "LaunchCommand",
    "TrainCommand",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainCommand(Settings):
    """The command line of `tfdist train`: what to train, how, and where the report goes."""

    task: str = "digits"
    """A built-in task (digits), or your own as path/to/file.py:ClassName or package.module:ClassName."""
    task_args: tuple[str, ...] = ()
    """Fields of the task to set, as name=value."""
    report: Path | None = None
    """Write what was done and measured to this JSON file."""
    export: tuple[Path, ...] = ()
    """Write the trained model to these files, whose names end in .keras, or folders, as SavedModels. Both load without
    tfdist."""
    verbose: bool = False
    """Print the resolved cluster and what was set for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckCommand:
    """The command line of `tfdist check`."""

    backends: tuple[str, ...] = ()
    """Backends to check. Unset: all that work on this machine."""
    replicas: tuple[int, ...] = (2,)
    """Numbers of replicas; one_device, the reference, has one."""
    cases: tuple[str, ...] = ()
    """Cases to run, by the beginning of their names. Unset: all."""
    json: Path | None = None
    """Write all values to this JSON file."""
    list: bool = False
    """Say what the cases are and what their numbers mean, and run nothing."""

    def __post_init__(self) -> None:
        for name in self.backends:
            check_backend(name)
        for count in self.replicas:
            within("replicas", count, 1, 64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """The command line of `tfdist evaluate`."""

    checkpoint: Path | None = None
    """A checkpoint, or a folder of checkpoints, of which the newest is taken."""
    split: tuple[str, ...] = ()
    """Splits of the task. Unset: those that training evaluates."""
    task: str | None = None
    """As of tfdist train. Unset: what the checkpoint was trained with."""
    task_args: tuple[str, ...] = ()
    """Fields of the task to set, as name=value."""
    backend: str | None = None
    """As of tfdist train; any backend can evaluate what another one has trained."""
    replicas: int | None = None
    """Devices of each process."""
    global_batch_size: int | None = None
    """Examples over all replicas that are worked on at a time. Unset: as in training."""
    json: Path | None = None
    """Write the results to this JSON file."""
    quiet: bool = False
    """Print nothing but results and errors."""

    def __post_init__(self) -> None:
        if self.checkpoint is None:
            raise UsageError("evaluate needs a checkpoint. Set --checkpoint to one, or to a folder of checkpoints.")
        check_backend(self.backend)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointsCommand:
    """The command line of `tfdist checkpoints`."""

    folder: Path
    """A folder of checkpoints, or a checkpoint."""
    verify: bool = False
    """Check the SHA-256 of all files. Ends with 1 where one is damaged."""
    diff: tuple[str, ...] = dataclasses.field(default=(), metadata={"metavar": ("A", "B")})
    """Say what differs between two checkpoints, given by their steps or paths."""
    json: Path | None = None
    """Write all of it to this JSON file."""

    def __post_init__(self) -> None:
        if self.diff and self.verify:
            raise UsageError("--diff and --verify are both set. Checksums are checked by --diff, too: leave one out.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChaosCommand:
    """The command line of `tfdist chaos`."""

    backend: str = "horovod"
    """horovod, multi_worker_mirrored or parameter_server."""
    kills: int = 20
    """Faults to inject in all."""
    faults: tuple[str, ...] = ("kill",)
    """Kinds of faults, which come about equally often: kill (SIGKILL of one rank), kill-all (of all ranks), launcher
    (SIGKILL of tfdist launch), term and usr1 (to one rank, as at a preemption), stop (SIGSTOP of one rank)."""
    seed: int = 1
    """Of the faults and their moments."""
    processes: int | None = None
    """Of each job. Unset: 2; on parameter_server 4, which are a chief, a server and two workers."""
    task: str | None = None
    """As of tfdist train."""
    task_args: tuple[str, ...] = ()
    """Fields of the task to set, as name=value."""
    steps: int = 500
    """Training steps of each job: enough for a few saves after each of three faults."""
    save_every: int = 20
    """Steps between two saves."""
    timeout: float = 300.0
    """Seconds after which a job that does not go on counts as lost."""
    json: Path | None = None
    """Write all faults and what followed to this JSON file."""

    def __post_init__(self) -> None:
        if self.backend not in ("horovod", "multi_worker_mirrored", "parameter_server"):
            raise UsageError(
                f"backend={self.backend!r} must be horovod, multi_worker_mirrored or parameter_server: others train in "
                "one process."
            )
        kinds = ("kill", "kill-all", "launcher", "term", "usr1", "stop")
        for kind in self.faults:
            if kind not in kinds:
                raise UsageError(f"faults={kind!r} must be one of {', '.join(kinds)}.{closest(kind, kinds)}")
        for name in ("kills", "steps", "save_every"):
            within(name, getattr(self, name), 1, 2**31 - 1)
        within("processes", self.processes, 4 if self.backend == "parameter_server" else 2, MOST_PROCESSES)
        within("timeout", self.timeout, 1, 1e6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """The command line of `tfdist compare`, up to the `--` before further arguments of `tfdist train`."""

    backends: tuple[str, ...] = ()
    """Backends to compare, with commas or spaces between them. Unset: all synchronous ones that work here."""
    replicas: tuple[str, ...] = ("2",)
    """Numbers of replicas, with commas or spaces between them; one_device has one. Runs are compared with the first of
    equal number, and those with the first of all."""
    task: str = "digits"
    """As of tfdist train."""
    task_args: tuple[str, ...] = ()
    """Fields of the task to set, as name=value."""
    steps: int = 50
    """Training steps that are compared number by number."""
    rounds: int = 3
    """Rounds of timed runs; 0 compares numbers only."""
    network: tuple[str, ...] = ()
    """Networks to predict efficiency for, as 100gbit,2us: bandwidth and latency."""
    seed: int = 0
    """Of the order of timed runs. (That of training is an argument of tfdist train.)"""
    against: Path | None = None
    """An earlier comparison's JSON file; changed numbers, and speed lost beyond noise, are named, and end with 1."""
    json: Path | None = None
    """Write all of it to this JSON file."""
    html: Path | None = None
    """Write a page with tables and pictures to this file."""
    png: Path | None = None
    """Write the pictures to this folder."""
    timeout: float = 600.0
    """Seconds after which a run is ended."""

    def __post_init__(self) -> None:
        for name in self.chosen_backends:
            check_backend(name)
        for word in _parts(self.replicas):
            if not re.fullmatch(r"[0-9]{1,4}", word):
                raise UsageError(f"replicas={word!r} must be a whole number; several as 1,2,4.")
        for count in self.counts:
            within("replicas", count, 1, 64)
        within("steps", self.steps, 1, 2**31 - 1)
        within("rounds", self.rounds, 0, 1000)
        within("timeout", self.timeout, 1, 1e6)

    @property
    def chosen_backends(self) -> tuple[str, ...]:
        """Their names, each once."""
        return tuple(dict.fromkeys(_parts(self.backends)))

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of replicas, each once."""
        return tuple(dict.fromkeys(int(word) for word in _parts(self.replicas)))


def _parts(words: tuple[str, ...]) -> list[str]:
    """What stands between commas."""
    return [part for word in words for part in word.split(",") if part]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchCommand:
    """The command line of `tfdist launch`, up to the `--` that parts it from the arguments of `tfdist train`."""

    processes: int | None = None
    """Processes to start on this machine."""
    hosts: str | None = None
    """Or on these hosts, as HOST or HOST:PROCESSES with commas between them. The others are reached through rsh, and
    have this Python and this folder under the same paths."""
    hostfile: Path | None = None
    """Or on those that stand in this file, a line each: HOST, HOST:PROCESSES or HOST slots=PROCESSES."""
    rsh: str = "ssh -o BatchMode=yes"
    """Command that runs another command on another host; the host's name and the command follow it."""
    max_restarts: int = 0
    """How often the whole job is started again, in all, when it has failed with something that another start may mend;
    with checkpoint_dir it goes on from the newest checkpoint."""
    min_processes: int | None = None
    """With max_restarts: go on with the hosts that are left when others are lost, if they run at least so many
    processes. Unset: the job needs all hosts."""
    worker_restarts: int | None = None
    """With parameter servers: how often workers that died are started again by themselves, in all. Unset: 3."""
    grace: float | None = None
    """With checkpoint_dir: seconds that processes have for saving and leaving after a first SIGTERM, SIGHUP, SIGUSR1
    or Ctrl-C. Unset: 30."""
    start_seconds: float = 60.0
    """How long hosts may take to answer."""
    dry_run: Literal["no", "plan", "kubernetes"] = "no"
    """Start nothing, and print what would be started, or the same as a job for Kubeflow's operators."""
    image: str = "tfdist:latest"
    """Container image of the Kubernetes job. Python with tfdist must be in it, and for horovod also MPI and sshd."""
    job_name: str = "tfdist"
    """Name of the Kubernetes job."""

    def __post_init__(self) -> None:
        within("processes", self.processes, 1, MOST_PROCESSES)
        within("worker_restarts", self.worker_restarts, 0, 2**31 - 1)
        within("max_restarts", self.max_restarts, 0, 2**31 - 1)
        within("min_processes", self.min_processes, 1, MOST_PROCESSES)
        if self.min_processes is not None and self.max_restarts == 0:
            raise UsageError(
                f"min_processes={self.min_processes} has no effect without max_restarts. Set that to 1 or more, too."
            )
        if self.grace is not None and not 0 < self.grace < math.inf:
            raise UsageError(f"grace={self.grace!r} must be a finite number above 0.")
        if not 0 < self.start_seconds < math.inf:
            raise UsageError(f"start_seconds={self.start_seconds!r} must be a finite number above 0.")
        if not self.rsh.split():
            raise UsageError("rsh='' runs nothing. Write a command such as ssh, or leave it out.")
        # Kubernetes takes names of DNS labels only, and appends to them what tells pods apart.
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", self.job_name):
            raise UsageError(
                f"job_name={self.job_name!r} is no name for a Kubernetes job. Use 1 to 40 small letters, digits and "
                "hyphens, beginning with a letter."
            )
