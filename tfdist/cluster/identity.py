"""Who am I: the rank of this process and the size of its job, read from the environment.

The only reader of the launcher's variables. Known are Open MPI, MPICH (and others with the PMI variables) and
`TF_CONFIG`; without any of them the process is alone. Nothing here starts MPI or TensorFlow.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Literal

from tfdist.errors import UsageError

__all__ = ["Identity", "TfConfig", "identify"]

Launcher = Literal["alone", "mpi", "tf_config"]

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
    """The parts of `TF_CONFIG` that synchronous training needs."""

    workers: tuple[str, ...]
    """Addresses (`host:port`) of all training processes in the order of their ranks; a chief comes first."""
    rank: int
    task_type: str
    task_index: int


@dataclasses.dataclass(frozen=True)
class Identity:
    """The place of this process in its job."""

    launcher: Launcher
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    tf_config: TfConfig | None = None

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
    for rank, size, local_rank, local_size in _MPI_VARIABLES:
        if rank in environ and size in environ:
            identity = Identity(
                launcher="mpi",
                rank=_number(environ, rank),
                size=_number(environ, size),
                local_rank=_number(environ, local_rank if local_rank in environ else rank),
                local_size=_number(environ, local_size if local_size in environ else size),
                tf_config=tf_config,
            )
            return _consistent(identity)
    if tf_config is not None:
        host = tf_config.workers[tf_config.rank].rpartition(":")[0]
        here = [i for i, a in enumerate(tf_config.workers) if a.rpartition(":")[0] == host]
        return Identity(
            launcher="tf_config",
            rank=tf_config.rank,
            size=len(tf_config.workers),
            local_rank=here.index(tf_config.rank),
            local_size=len(here),
            tf_config=tf_config,
        )
    return Identity(launcher="alone")


def _consistent(identity: Identity) -> Identity:
    if not (0 <= identity.rank < identity.size and 0 <= identity.local_rank < identity.local_size):
        raise UsageError(
            f"the launcher's variables say rank {identity.rank} of {identity.size}, local rank {identity.local_rank} "
            f"of {identity.local_size}, which cannot be. Unset them; the launcher sets them itself."
        )
    config = identity.tf_config
    if config is not None and (len(config.workers), config.rank) != (identity.size, identity.rank):
        raise UsageError(
            f"TF_CONFIG says worker {config.rank} of {len(config.workers)}, but MPI says rank {identity.rank} of "
            f"{identity.size}. Unset TF_CONFIG (under mpirun tfdist needs none), or start the processes without "
            "mpirun."
        )
    return identity


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise UsageError(
            f"{name}={environ[name]!r} in the environment is not a number. Unset it; the launcher sets it itself."
        ) from None


def _addresses(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(a, str) and ":" in a for a in value):
        raise TypeError(f"{value!r} is not a list of host:port")
    return value


def _read_tf_config(text: str) -> TfConfig | None:
    if not text.strip():
        return None
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        chiefs, workers = (_addresses(cluster.get(role, [])) for role in ("chief", "worker"))
        task_type, index = str(task["type"]), int(task["index"])
        if index != float(task["index"]):
            raise ValueError(f"the index {task['index']} is not a whole number")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"TF_CONFIG cannot be read ({type(error).__name__}: {error}). It must look like "
            '{"cluster": {"worker": ["host0:port", "host1:port"]}, "task": {"type": "worker", "index": 0}}; '
            "unset it to train on this machine alone."
        ) from None
    for role in (set(cluster) | {task_type}) - {"chief", "worker"}:
        raise UsageError(
            f"TF_CONFIG names the role {role!r}; the synchronous backends know 'chief' and 'worker'. Remove it."
        )
    if not 0 <= index < len(chiefs if task_type == "chief" else workers):
        raise UsageError(
            f"TF_CONFIG says task {task_type} {index}, but its cluster has {len(chiefs)} chief(s) and "
            f"{len(workers)} worker(s). Make the index fit the cluster."
        )
    rank = index if task_type == "chief" else len(chiefs) + index
    return TfConfig(workers=(*chiefs, *workers), rank=rank, task_type=task_type, task_index=index)
