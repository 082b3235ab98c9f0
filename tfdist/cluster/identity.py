"""Who am I: the rank of this process and the size of its job, read from the environment.

The only reader of the launcher's variables. Known are Open MPI, MPICH (and others with the PMI variables), `TF_CONFIG`
and SLURM's steps; without any of them the process is alone. Nothing here starts MPI or TensorFlow.

An MPI launcher comes first: its ranks also see what SLURM tells of the daemons that started them. TF_CONFIG must agree
with it, and with SLURM where srun itself started the processes. A batch script or a shell of salloc is no step: the
process there is alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Literal

from tfdist.errors import UsageError

__all__ = ["LAUNCHED", "Identity", "SlurmStep", "TfConfig", "identify"]

Launcher = Literal["alone", "mpi", "tf_config", "slurm"]

LAUNCHED = "TFDIST_LAUNCHED"
"""Variable that `tfdist launch` sets for its processes, whose output it shows together."""

# (rank, size, rank on this host, processes on this host)
_MPI_VARIABLES = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


@dataclasses.dataclass(frozen=True)
class TfConfig:
    """What `TF_CONFIG` says of the cluster."""

    workers: tuple[str, ...]
    """Addresses (`host:port`) of all training processes in the order of their ranks; a chief comes first."""
    rank: int
    """Among a chief, the parameter servers and the workers, in this order."""
    task_type: str
    task_index: int
    servers: tuple[str, ...] = ()
    """Addresses of parameter servers."""
    has_chief: bool = False

    @property
    def members(self) -> tuple[str, ...]:
        """The addresses of all processes in the order of their ranks."""
        chief = self.workers[:1] if self.has_chief else ()
        return (*chief, *self.servers, *self.workers[len(chief) :])


@dataclasses.dataclass(frozen=True)
class SlurmStep:
    """The step of a SLURM job that this process is a task of."""

    job: str
    """`job.step`, which no other step has."""
    first_host: str
    """Where task 0 is."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """The place of this process in its job."""

    launcher: Launcher
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    tf_config: TfConfig | None = None
    slurm: SlurmStep | None = None
    one_console: bool = False
    """Whether what all processes print comes to one console."""

    @property
    def is_chief(self) -> bool:
        """Whether this process does the job's side effects: printing and writing files."""
        return self.rank == 0


def identify(environ: Mapping[str, str] | None = None) -> Identity:
    """Read the launcher's variables.

    Raises:
        UsageError: the variables contradict each other or cannot be read.
    """
    environ = os.environ if environ is None else environ
    tf_config = _read_tf_config(environ.get("TF_CONFIG", ""))
    slurm = _read_slurm(environ)
    for rank, size, local_rank, local_size in _MPI_VARIABLES:
        # srun sets the PMI variables, too, but not those of the places on a host, and says itself who is who.
        if rank in environ and size in environ and (slurm is None or local_rank in environ):
            identity = Identity(
                launcher="mpi",
                rank=_number(environ, rank),
                size=_number(environ, size),
                local_rank=_number(environ, local_rank if local_rank in environ else rank),
                local_size=_number(environ, local_size if local_size in environ else size),
                tf_config=tf_config,
                one_console=True,
            )
            return _consistent(identity, "MPI")
    if tf_config is not None:
        members = tf_config.members
        host = members[tf_config.rank].rpartition(":")[0]
        here = [i for i, a in enumerate(members) if a.rpartition(":")[0] == host]
        identity = Identity(
            launcher="tf_config",
            rank=tf_config.rank,
            size=len(members),
            local_rank=here.index(tf_config.rank),
            local_size=len(here),
            tf_config=tf_config,
            one_console=LAUNCHED in environ,
        )
        if slurm is not None and slurm.size != identity.size:
            raise UsageError(
                f"TF_CONFIG describes {identity.size} process(es), but SLURM has started {slurm.size} in this step. "
                "Unset TF_CONFIG (under srun tfdist needs none), or start as many tasks as it names."
            )
        return identity
    return _consistent(slurm, "SLURM") if slurm is not None else Identity(launcher="alone")


def _consistent(identity: Identity, launcher: str) -> Identity:
    if not (0 <= identity.rank < identity.size and 0 <= identity.local_rank < identity.local_size):
        raise UsageError(
            f"the launcher's variables say rank {identity.rank} of {identity.size}, local rank {identity.local_rank} "
            f"of {identity.local_size}, which cannot be. Unset them; the launcher sets them itself."
        )
    config = identity.tf_config
    if config is not None and (len(config.members), config.rank) != (identity.size, identity.rank):
        raise UsageError(
            f"TF_CONFIG says process {config.rank} of {len(config.members)}, but {launcher} says rank {identity.rank} "
            f"of {identity.size}. Unset TF_CONFIG (under mpirun tfdist needs none), or start the processes without "
            "mpirun."
        )
    return identity


def _read_slurm(environ: Mapping[str, str]) -> Identity | None:
    """The task of a step of several tasks. SLURM_PROCID and SLURM_NTASKS alone are in every batch script, too."""
    if "SLURM_PROCID" not in environ or _number(environ, "SLURM_STEP_NUM_TASKS", "1") < 2:
        return None
    here = environ.get("SLURM_GTIDS") or environ["SLURM_PROCID"]
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "localhost"
    return Identity(
        launcher="slurm",
        rank=_number(environ, "SLURM_PROCID"),
        size=_number(environ, "SLURM_STEP_NUM_TASKS"),
        local_rank=_number(environ, "SLURM_LOCALID", "0"),
        local_size=len(here.split(",")),
        slurm=SlurmStep(
            job=f"{environ.get('SLURM_JOB_ID', '0')}.{environ.get('SLURM_STEP_ID', '0')}",
            first_host=_first_host(nodes),
        ),
        one_console=True,
    )


def _first_host(nodes: str) -> str:
    """The first of SLURM's list of nodes, as in `gpu[07-09,12],login` or `rack[1-2]n[01-04]`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group())


def _number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    text = environ.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"{name}={text!r} in the environment is not a number. Unset it; the launcher sets it itself."
        ) from None


def _addresses(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(a, str) and re.fullmatch(r".+:\d+", a) for a in value):
        raise TypeError(f"{value!r} is not a list of host:port")
    return value


def _read_tf_config(text: str) -> TfConfig | None:
    if not text.strip():
        return None
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        chiefs, servers, workers = (_addresses(cluster.get(role, [])) for role in ("chief", "ps", "worker"))
        task_type, index = str(task["type"]), int(task["index"])
        if index != float(task["index"]):
            raise ValueError(f"the index {task['index']} is not a whole number")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"TF_CONFIG cannot be read ({type(error).__name__}: {error}). It must look like "
            '{"cluster": {"worker": ["host0:port", "host1:port"]}, "task": {"type": "worker", "index": 0}}; '
            "unset it to train on this machine alone."
        ) from None
    for role in (set(cluster) | {task_type}) - {"chief", "ps", "worker"}:
        raise UsageError(
            f"TF_CONFIG names the role {role!r}; tfdist knows 'chief', 'worker' and, for backend='parameter_server', "
            "'ps'. Remove it."
        )
    tasks = {"chief": chiefs, "ps": servers, "worker": workers}[task_type]
    if not 0 <= index < len(tasks):
        raise UsageError(
            f"TF_CONFIG says task {task_type} {index}, but its cluster has {len(chiefs)} chief(s), {len(workers)} "
            f"worker(s) and {len(servers)} parameter server(s). Make the index fit the cluster."
        )
    before = {"chief": 0, "ps": len(chiefs), "worker": len(chiefs) + len(servers)}[task_type]
    return TfConfig(
        workers=(*chiefs, *workers),
        rank=before + index,
        task_type=task_type,
        task_index=index,
        servers=tuple(servers),
        has_chief=bool(chiefs),
    )
