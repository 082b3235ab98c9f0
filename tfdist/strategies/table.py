"""The backends by name. Knowing them costs nothing: each is imported when it is opened."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING

from tfdist.cluster.channel import Channel
from tfdist.cluster.identity import Identity
from tfdist.errors import UsageError, closest

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["BACKENDS", "Backend", "Place", "check_backend", "open_strategy", "resolve"]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a strategy is opened: what its opener needs to know."""

    identity: Identity
    channel: Channel
    replicas: int
    """Local replicas of a single-process backend; 1 for the others."""
    threads: int
    """Threads of one TensorFlow operation."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to train."""

    opener: str
    """`module:function`; the function takes a `Place` and returns a strategy."""
    processes: bool
    """Whether it spans several processes, each with one replica, or one process with several replicas."""
    mpi: bool = False
    """Whether its processes find each other through MPI alone, so that mpirun must start them."""
    servers: bool = False
    """Whether some of its processes are parameter servers, and one directs the rest."""
    adasum: bool = False
    """Whether its `strategy.extended` has `adasum`."""
    fixed_shapes: bool = False
    """Whether a collective in a compiled loop must have the same shapes in every round (TensorFlow keeps the first)."""


BACKENDS = {
    "horovod": Backend("tfdist.strategies.horovod:open_horovod", processes=True, mpi=True, adasum=True),
    "multi_worker_mirrored": Backend(
        "tfdist.strategies.multi_worker:open_multi_worker", processes=True, fixed_shapes=True
    ),
    "mirrored": Backend("tfdist.strategies.native:open_mirrored", processes=False),
    "one_device": Backend("tfdist.strategies.native:open_one_device", processes=False),
}


def check_backend(name: str | None) -> None:
    """Raises UsageError unless `name` is a backend or None."""
    if name is not None and name not in BACKENDS:
        raise UsageError(f"backend={name!r} is unknown. Choose one of {', '.join(BACKENDS)}.{closest(name, BACKENDS)}")


def resolve(name: str | None, replicas: int | None, identity: Identity, gpus: int) -> tuple[str, int]:
    """The backend and the number of its local replicas, from what was asked for and what is there.

    Args:
        gpus: GPUs that TensorFlow sees in this process.

    Raises:
        UsageError: they do not go together.
    """
    if name is None:
        launched = {"mpi": "horovod", "tf_config": "multi_worker_mirrored"}
        alone = "mirrored" if (replicas or gpus) > 1 else "one_device"
        name = launched.get(identity.launcher, alone)
    backend = BACKENDS[name]
    if backend.processes:
        if replicas is not None:
            raise UsageError(
                f"replicas={replicas} does not go with backend={name!r}: its replicas are processes. "
                f"Start them with: mpirun -np {replicas} python …"
            )
        return name, 1
    if identity.size > 1:
        raise UsageError(
            f"backend={name!r} trains in one process, but the launcher started {identity.size}. Leave mpirun out "
            f"(python … --backend mirrored --replicas {identity.size}), or use --backend horovod or "
            "multi_worker_mirrored."
        )
    if name == "one_device":
        if replicas not in (None, 1):
            raise UsageError(f"replicas={replicas} does not go with backend='one_device'. Use --backend mirrored.")
        return name, 1
    return name, replicas or max(1, gpus)


def open_strategy(name: str, place: Place) -> tf.distribute.Strategy:
    """Open a backend.

    Raises:
        EnvironmentProblem: a package or a device that it needs is missing.
    """
    module, _, function = BACKENDS[name].opener.partition(":")
    strategy: tf.distribute.Strategy = getattr(importlib.import_module(module), function)(place)
    return strategy
