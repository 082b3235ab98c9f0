"""The backends by name. Knowing them costs nothing: each is imported when it is opened."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from tfdist.cluster.channel import Channel
from tfdist.cluster.identity import Identity
from tfdist.errors import UsageError, closest

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["BACKENDS", "Backend", "Options", "Place", "check_backend", "check_options", "open_strategy", "resolve"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What a backend is opened with. None: by a rule; see `tfdist.Settings`."""

    replicas: int | None = None
    intra_op_threads: int | None = None
    parameter_servers: int | None = None
    collectives: Literal["auto", "ring", "nccl"] = "auto"
    gpu_memory: Literal["grow", "all"] = "grow"
    reproducible: bool = False


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a strategy is opened: what its opener needs to know."""

    identity: Identity
    channel: Channel
    replicas: int
    """Local replicas."""
    threads: int
    """Threads of one TensorFlow operation."""
    options: Options = Options()


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to train."""

    opener: str
    """`module:function`; the function takes a `Place` and returns a strategy. In a process that only serves others it
    returns the function that does so, until the job is over."""
    processes: bool
    """Whether it spans several processes, or is one process."""
    devices: bool = False
    """Whether a process may hold several replicas."""
    mpi: bool = False
    """Whether its processes can only be started by MPI."""
    asynchronous: bool = False
    """Whether steps run side by side on workers, each on its own, by `tf.distribute.coordinator`."""
    adasum: bool = False
    """Whether its `strategy.extended` has `adasum`."""
    own_copies: bool = False
    """Whether each replica has a copy of every variable that may differ from the others'."""
    one_copy: bool = False
    """Whether a variable has one value for all replicas, on a device that may not be theirs."""
    fixed_shapes: bool = False
    """Whether a collective in a compiled loop must have the same shapes in every round (TensorFlow keeps the first)."""


_HERE = "tfdist.strategies"
BACKENDS = {
    "horovod": Backend(f"{_HERE}.horovod:open_horovod", processes=True, mpi=True, adasum=True, own_copies=True),
    "multi_worker_mirrored": Backend(
        f"{_HERE}.multi_worker:open_multi_worker", processes=True, devices=True, fixed_shapes=True
    ),
    "parameter_server": Backend(
        f"{_HERE}.parameter_server:open_parameter_server", processes=True, asynchronous=True, one_copy=True
    ),
    "mirrored": Backend(f"{_HERE}.native:open_mirrored", processes=False, devices=True),
    "central_storage": Backend(f"{_HERE}.native:open_central_storage", processes=False, devices=True, one_copy=True),
    "one_device": Backend(f"{_HERE}.native:open_one_device", processes=False),
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
    name = name or _default(replicas, identity, gpus)
    backend = BACKENDS[name]
    servers = identity.tf_config.servers if identity.tf_config else ()
    if servers and not backend.asynchronous:
        raise UsageError(
            f"TF_CONFIG names {len(servers)} parameter server(s) ('ps'), which backend={name!r} has none of. Use "
            "--backend parameter_server, or leave 'ps' out."
        )
    if not backend.processes and identity.size > 1:
        raise UsageError(
            f"backend={name!r} trains in one process, but the launcher started {identity.size}. Leave the launcher out "
            f"(python … --backend mirrored --replicas {identity.size}), or use --backend horovod or "
            "multi_worker_mirrored."
        )
    if replicas is not None and not backend.devices and (backend.processes or replicas > 1):
        if name == "one_device":
            raise UsageError(f"replicas={replicas} does not go with backend='one_device'. Use --backend mirrored.")
        processes = replicas + 2 if backend.asynchronous else replicas  # a chief and a server beside the workers
        raise UsageError(
            f"replicas={replicas} does not go with backend={name!r}: its replicas are processes. "
            f"Start them with: mpirun -np {processes} python …"
        )
    if not backend.devices:
        return name, 1
    if not backend.processes or (identity.launcher in ("tf_config", "slurm") and identity.local_size == 1):
        return name, replicas or max(1, gpus)  # all of this host
    return name, replicas or 1


def check_options(name: str, options: Options) -> None:
    """Raises UsageError where an option has no effect on the backend."""
    if options.parameter_servers is not None and not BACKENDS[name].asynchronous:
        raise UsageError(
            f"parameter_servers={options.parameter_servers} has no effect with backend={name!r}. Leave it out, or use "
            "backend='parameter_server'."
        )
    if options.collectives != "auto" and name != "multi_worker_mirrored":
        raise UsageError(
            f"collectives={options.collectives!r} has no effect with backend={name!r}. Leave it out, or use "
            "backend='multi_worker_mirrored'."
        )


def _default(replicas: int | None, identity: Identity, gpus: int) -> str:
    if identity.tf_config is not None and identity.tf_config.servers:
        return "parameter_server"
    launched = {"mpi": "horovod", "tf_config": "multi_worker_mirrored", "slurm": "multi_worker_mirrored"}
    return launched.get(identity.launcher, "mirrored" if (replicas or gpus) > 1 else "one_device")


def open_strategy(name: str, place: Place) -> tf.distribute.Strategy | Callable[[], None]:
    """Open a backend.

    Returns:
        Its strategy; or, in a process that only serves others, what does so until the job is over.

    Raises:
        EnvironmentProblem: a package or a device that it needs is missing.
    """
    module, _, function = BACKENDS[name].opener.partition(":")
    opened: tf.distribute.Strategy | Callable[[], None] = getattr(importlib.import_module(module), function)(place)
    return opened
