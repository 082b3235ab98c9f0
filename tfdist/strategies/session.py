"""Everything that must be ready before a model can be built: who we are, how we talk, and an open strategy."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from tfdist.cluster import runtime
from tfdist.cluster.channel import Alone, Channel, open_mpi, together
from tfdist.cluster.identity import Identity, identify
from tfdist.cluster.tcp_channel import open_tcp
from tfdist.errors import EnvironmentProblem
from tfdist.strategies.table import BACKENDS, Options, Place, check_backend, check_options, open_strategy, resolve

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
    options: Options
    """What it was opened with."""
    adasum: Callable[[list[Any]], list[Any]] | None = None
    """Combines gradients of all replicas by Adasum, inside a replica; None where the backend has no such thing."""

    @property
    def fixed_shapes(self) -> bool:
        """Whether a collective must have the same shapes in all steps of a compiled loop."""
        return BACKENDS[self.backend].fixed_shapes

    @property
    def one_copy(self) -> bool:
        """Whether a variable has one value for all replicas, on a device that may not be theirs."""
        return BACKENDS[self.backend].one_copy

    @property
    def asynchronous(self) -> bool:
        """Whether steps run side by side on workers, each on its own, by `tf.distribute.coordinator`."""
        return BACKENDS[self.backend].asynchronous

    @property
    def is_chief(self) -> bool:
        """Whether this process prints and writes files for the job."""
        return self.identity.is_chief

    def headline(self) -> str:
        """What is open, in a line."""
        count = self.strategy.num_replicas_in_sync
        kind = "one step at a time on each worker" if self.asynchronous else f"{count} replica(s) in sync"
        return f"backend {self.backend}, {kind}, started by {_STARTED_BY[self.identity.launcher]}"

    def places(self) -> list[dict[str, Any]]:
        """Where each process of the job runs and what it has, for people. Called on every process."""
        if self.asynchronous:
            cluster = self.strategy.cluster
            addresses = (cluster.chief, *cluster.servers, *cluster.workers)
            return [{"rank": rank, "role": cluster.role_of(rank), "address": a} for rank, a in enumerate(addresses)]
        return self.channel.exchange("showing the cluster", self._place())

    def _place(self) -> dict[str, Any]:
        identity = self.identity
        return {
            "rank": f"{identity.rank}/{identity.size}",
            "host": socket.gethostname(),
            "local rank": f"{identity.local_rank}/{identity.local_size}",
            "cores": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "intra-op threads": self.intra_op_threads,
            "devices": ", ".join(d.rpartition("/")[2].removeprefix("device:") for d in self._devices()),
        }

    def _devices(self) -> Sequence[str]:
        devices: Sequence[str] = self.strategy.extended.worker_devices
        return devices


_STARTED_BY = {"alone": "nobody", "mpi": "MPI", "tf_config": "TF_CONFIG", "slurm": "srun"}

_alone = Alone()
_sessions: dict[tuple[str, int], Session] = {}


def process() -> tuple[Identity, Channel]:
    """The identity of this process and its channel to the others; starts MPI where a launcher did.

    Raises:
        UsageError, EnvironmentProblem: the launcher's variables cannot be used, or MPI does not see its job.
    """
    identity = identify()
    runtime.prepare(identity)  # before MPI starts
    return identity, _channel(identity)


def _channel(identity: Identity) -> Channel:
    if identity.launcher == "mpi":
        return open_mpi(identity)
    if identity.size == 1 or (identity.tf_config is not None and identity.tf_config.servers):
        return _alone  # with parameter servers, processes come and go: nobody waits for all of them
    return open_tcp(identity)


def open_session(backend: str | None, options: Options) -> Session:
    """Open a backend on every process. The same backend a second time gives the same session.

    A process that only serves others, as a parameter server does, does so here, and ends when the job is over.

    Raises:
        UsageError: the settings do not go together, or with the launcher.
        EnvironmentProblem: something that the backend needs is missing.
    """
    identity, channel = process()
    if any(session.asynchronous for session in _sessions.values()):
        channel = _alone  # the other processes serve

    def work() -> Session | Callable[[], None]:
        runtime.import_tensorflow()
        import tensorflow as tf

        name, local = resolve(backend, options.replicas, identity, len(tf.config.list_physical_devices("GPU")))
        check_options(name, options)
        threads = runtime.intra_op_threads(
            identity, local, options.intra_op_threads or (1 if options.reproducible else None)
        )
        _set_threads(threads, local)
        if options.reproducible and (threads > 1 or tf.config.list_physical_devices("GPU")):
            tf.config.experimental.enable_op_determinism()  # one thread of a processor adds in one order anyway
        if (name, local) in _sessions:
            _require_same_options(_sessions[name, local], options)
            return _sessions[name, local]
        opened = open_strategy(name, Place(identity, channel, local, threads, options))
        if callable(opened):
            return opened
        _require_all(opened, name, identity, local)
        adasum = opened.extended.adasum if BACKENDS[name].adasum else None
        # The workers of an asynchronous backend wait for orders, not for messages.
        own = _alone if BACKENDS[name].asynchronous else channel
        session = Session(name, opened, identity, own, threads, options, adasum)
        _sessions[name, local] = session
        return session

    session = together(channel, "opening the backend", work)
    if not isinstance(session, Session):
        session()
        raise SystemExit(0)
    return session


def strategy(
    backend: str | None = None,
    *,
    replicas: int | None = None,
    intra_op_threads: int | None = None,
    parameter_servers: int | None = None,
    collectives: Literal["auto", "ring", "nccl"] = "auto",
    gpu_memory: Literal["grow", "all"] = "grow",
) -> tf.distribute.Strategy:
    """A backend's strategy for a program of your own, opened as the trainer opens it.

    Call it on every process, before any other TensorFlow operation. With parameter_server it returns on the chief
    alone; workers and servers serve, and end with the job.

    Args:
        backend: horovod, multi_worker_mirrored, parameter_server, mirrored, central_storage or one_device; None
            chooses as `Settings.backend` does.
        replicas: devices of a process, where the backend has several.
        intra_op_threads: threads of one TensorFlow operation; None: by the rule of all backends.
        parameter_servers: how many of the processes hold variables; None: 1.
        collectives: of multi_worker_mirrored.
        gpu_memory: whether TensorFlow takes a GPU's memory as it needs it (`grow`), or `all` of it at once.

    Raises:
        UsageError: there is no such backend, or the settings do not go together.
        EnvironmentProblem: something that the backend needs is missing.
    """
    check_backend(backend)
    options = Options(replicas, intra_op_threads, parameter_servers, collectives, gpu_memory)
    return open_session(backend, options).strategy


def _require_all(strategy: tf.distribute.Strategy, name: str, identity: Identity, local: int) -> None:
    """Raises EnvironmentProblem where the backend sees another number of replicas than the launcher has started."""
    expected = local if BACKENDS[name].asynchronous else identity.size * local
    if strategy.num_replicas_in_sync != expected:
        raise EnvironmentProblem(
            f"the launcher started {identity.size} process(es) with {local} replica(s) each, but backend={name!r} sees "
            f"{strategy.num_replicas_in_sync} replica(s). Every process must see as many devices."
        )


def _require_same_options(session: Session, options: Options) -> None:
    """Devices, servers and collectives of a process are settled once."""
    for name in ("parameter_servers", "collectives", "gpu_memory"):
        before, now = getattr(session.options, name), getattr(options, name)
        if before != now:
            raise EnvironmentProblem(
                f"{name}={now!r}, but backend={session.backend!r} is open in this process with {name}={before!r}. Use "
                "the same, or another process."
            )


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
