"""Everything that must be ready before a model can be built: who we are, how we talk, and an open strategy."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tfdist.cluster import runtime
from tfdist.cluster.channel import Alone, Channel, open_mpi, together
from tfdist.cluster.identity import Identity, identify
from tfdist.errors import EnvironmentProblem
from tfdist.strategies.table import BACKENDS, Place, check_backend, open_strategy, resolve

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["Session", "open_session", "process", "strategy"]


@dataclasses.dataclass(frozen=True)
class Session:
    """An open backend."""

    backend: str
    strategy: tf.distribute.Strategy
    identity: Identity
    channel: Channel
    intra_op_threads: int
    adasum: Callable[[list[Any]], list[Any]] | None = None
    """Combines gradients of all replicas by Adasum, inside a replica; None where the backend has no such thing."""

    @property
    def fixed_shapes(self) -> bool:
        """Whether a collective must have the same shapes in all steps of a compiled loop."""
        return BACKENDS[self.backend].fixed_shapes

    @property
    def is_chief(self) -> bool:
        """Whether this process prints and writes files for the job."""
        return self.identity.is_chief

    def place(self) -> dict[str, Any]:
        """Where this process runs and what it uses, for people."""
        identity = self.identity
        return {
            "rank": f"{identity.rank}/{identity.size}",
            "host": socket.gethostname(),
            "local rank": f"{identity.local_rank}/{identity.local_size}",
            "launcher": identity.launcher,
            "cores": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "intra-op threads": self.intra_op_threads,
            "devices": ",".join(self.strategy.extended.worker_devices),
        }


_alone = Alone()
_sessions: dict[tuple[str, int], Session] = {}


def process() -> tuple[Identity, Channel]:
    """The identity of this process and its channel to the others; starts MPI where a launcher did.

    Raises:
        UsageError, EnvironmentProblem: the launcher's variables cannot be used, or MPI does not see its job.
    """
    identity = identify()
    runtime.prepare(identity)  # before MPI starts
    return identity, open_mpi(identity) if identity.launcher == "mpi" else _alone


def open_session(backend: str | None, replicas: int | None, intra_op_threads: int | None) -> Session:
    """Open a backend on every process. The same backend a second time gives the same session.

    Raises:
        UsageError: the settings do not go together, or with the launcher.
        EnvironmentProblem: something that the backend needs is missing.
    """
    identity, channel = process()

    def work() -> Session:
        runtime.import_tensorflow()
        import tensorflow as tf

        name, local = resolve(backend, replicas, identity, len(tf.config.list_physical_devices("GPU")))
        threads = runtime.intra_op_threads(identity, local, intra_op_threads)
        if (name, local) in _sessions:
            _set_threads(threads, local)
            return _sessions[name, local]
        _set_threads(threads, local)
        strategy = open_strategy(name, Place(identity, channel, local, threads))
        adasum = strategy.extended.adasum if BACKENDS[name].adasum else None
        session = Session(name, strategy, identity, channel, threads, adasum)
        _sessions[name, local] = session
        return session

    return together(channel, "opening the backend", work)


def strategy(
    backend: str | None = None, *, replicas: int | None = None, intra_op_threads: int | None = None
) -> tf.distribute.Strategy:
    """A backend's strategy for a program of your own, opened as the trainer opens it.

    Call it on every process, before any other TensorFlow operation.

    Args:
        backend: horovod, multi_worker_mirrored, mirrored or one_device; None chooses as `Settings.backend` does.
        replicas: devices of a single-process backend.
        intra_op_threads: threads of one TensorFlow operation; None: by the rule of all backends.

    Raises:
        UsageError: there is no such backend, or the settings do not go together.
        EnvironmentProblem: something that the backend needs is missing.
    """
    check_backend(backend)
    return open_session(backend, replicas, intra_op_threads).strategy


def _set_threads(intra_op: int, local_replicas: int) -> None:
    import tensorflow as tf

    threading = tf.config.threading
    try:
        if threading.get_intra_op_parallelism_threads() != intra_op:
            threading.set_intra_op_parallelism_threads(intra_op)
        # Replicas of one process run side by side only if each has a thread to wait in.
        if threading.get_inter_op_parallelism_threads() == 0 and local_replicas > (os.cpu_count() or 1):
            threading.set_inter_op_parallelism_threads(local_replicas)
    except RuntimeError:
        raise EnvironmentProblem(
            f"intra_op_threads={intra_op} cannot be set: TensorFlow has already run an operation in this process. "
            "Create the Trainer before any other TensorFlow operation; build datasets and tensors in the Task."
        ) from None
