"""TensorFlow's multi-worker strategy, opened without `TF_CONFIG` under mpirun, and fit for Keras 3."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist.as_one.opening import act_as_one, opened_as_one
from tfdist.cluster.channel import Alone, Channel, MpiChannel
from tfdist.cluster.devices import take_device
from tfdist.cluster.ending import end_together
from tfdist.cluster.ports import hold_port, own_address, past_proxies
from tfdist.cluster.variables import agree_on_variable, variable_path
from tfdist.errors import EnvironmentProblem
from tfdist.strategies.table import Place

__all__ = ["MultiWorkerMirrored", "open_multi_worker"]

_Resolver: TypeAlias = tf.distribute.cluster_resolver.ClusterResolver


class MultiWorkerMirrored(tf.distribute.MultiWorkerMirroredStrategy):
    """`tf.distribute.MultiWorkerMirroredStrategy` on which Keras 3's fit, evaluate and predict run.

    Keras 3 hands `reduce` a tuple of tensors, and asks for `axis=0` of scalars; TensorFlow's own `reduce`
    takes neither. With a channel, all processes also compare each new variable before it is made.
    """

    def __init__(self, cluster_resolver: _Resolver | None = None, channel: Channel | None = None) -> None:
        self._channel: Channel = channel or Alone()
        super().__init__(cluster_resolver=cluster_resolver)
        if self.cluster_resolver.task_id is None:  # one process; programs ask for its number
            self.cluster_resolver.task_id = 0
        if self.num_replicas_in_sync > 1:
            opened_as_one(self, self._channel)

    @tf.autograph.experimental.do_not_convert
    def reduce(
        self, reduce_op: tf.distribute.ReduceOp | str, value: Any, axis: int | Sequence[int] | None = None
    ) -> Any:
        """The sum or mean of `value` over all replicas, on every process.

        Args:
            reduce_op: `tf.distribute.ReduceOp.SUM` or `MEAN`, or its name.
            value: a tensor, a per-replica value, or a nested structure of them.
            axis: axes to reduce on each replica first. A scalar has no axis, and is reduced as with `axis=None`.

        Returns:
            The structure of `value`, with the same tensors on every process.
        """

        def one(leaf: Any) -> Any:
            if hasattr(leaf, "aggregation"):  # a variable, which Keras metrics may return as their result
                leaf = self.run(tf.identity, args=(leaf,))
            local = self.experimental_local_results(leaf)[0]
            scalar = getattr(local, "shape", tf.TensorShape([])).rank == 0
            return super(MultiWorkerMirrored, self).reduce(reduce_op, leaf, axis=None if scalar else axis)

        return tf.nest.map_structure(one, value)

    def scope(self) -> contextlib.AbstractContextManager[tf.distribute.Strategy]:
        """As TensorFlow's own; new variables are compared over the channel."""
        if self.num_replicas_in_sync > 1:
            act_as_one()
        if self._channel.size == 1 or tf.distribute.has_strategy():
            return super().scope()
        return _ComparingScope(super().scope(), self._create_same_variable)

    def _create_same_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        value = kwargs.get("initial_value")
        # A value that is being restored is left as it is: TensorFlow tells it by its class.
        if value is None or hasattr(value, "checkpoint_position"):
            return next_creator(**kwargs)

        path = variable_path(tf.get_current_name_scope(), kwargs.get("name"))

        def same() -> tf.Tensor:
            tensor = tf.convert_to_tensor(value() if callable(value) else value, dtype=kwargs.get("dtype"))
            agree_on_variable(self._channel, path, str(tensor.shape), tensor.dtype.name)
            return tensor

        kwargs["initial_value"] = same
        return next_creator(**kwargs)


class _ComparingScope(contextlib.AbstractContextManager[tf.distribute.Strategy]):
    """A strategy's scope with a variable creator inside. Like TensorFlow's scopes, it can be entered again."""

    def __init__(self, scope: Any, creator: Callable[..., Any]) -> None:
        self._scope = scope
        self._creator = creator
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> tf.distribute.Strategy:
        with contextlib.ExitStack() as stack:
            inside = tf.distribute.has_strategy()
            strategy = stack.enter_context(self._scope)
            if not inside:
                stack.enter_context(tf.variable_creator_scope(self._creator))
            self._entered.append(stack.pop_all())
        return strategy

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def open_multi_worker(place: Place) -> MultiWorkerMirrored:
    """Open the strategy on every process: from `TF_CONFIG` where it is set, else on ports that MPI ranks exchange.

    Raises:
        EnvironmentProblem: TensorFlow has already run in this process, or there are more ranks than GPUs.
    """
    identity, channel = place.identity, place.channel
    device = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    if identity.launcher == "mpi" or identity.local_size > 1:
        device = take_device(identity, channel).partition(":")[0]
    if _has_run():
        raise _too_late()
    with contextlib.ExitStack() as until_open:
        resolver = None
        if identity.tf_config is None and identity.size > 1:
            held = until_open.enter_context(hold_port())
            resolver = _resolver(channel, held.getsockname()[1], device)
        addresses = identity.tf_config.workers if identity.tf_config else _addresses(resolver)
        past_proxies(addresses)
        try:
            strategy = MultiWorkerMirrored(resolver, channel)
        except RuntimeError as error:
            if "program startup" in str(error):
                raise _too_late() from None
            raise
    if isinstance(channel, MpiChannel):
        end_together(channel)
    return strategy


def _has_run() -> bool:
    """Whether TensorFlow has run an operation in this process, so that its devices and servers are settled."""
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    try:
        tf.config.threading.set_inter_op_parallelism_threads(threads + 1)
    except RuntimeError:
        return True
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    return False


def _too_late() -> EnvironmentProblem:
    return EnvironmentProblem(
        "backend='multi_worker_mirrored' must be opened before any other TensorFlow operation of this process. Create "
        "the Trainer (or the strategy) first, and build tensors and datasets afterwards."
    )


def _resolver(channel: Channel, port: int, device: str) -> _Resolver:
    ranks = channel.exchange("opening multi_worker_mirrored", [socket.gethostname(), own_address(), port])
    one_host = len({host for host, _, _ in ranks}) == 1
    workers = [f"{'127.0.0.1' if one_host else address}:{port}" for _, address, port in ranks]
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": workers}),
        task_type="worker",
        task_id=channel.rank,
        rpc_layer="grpc",
        num_accelerators={"GPU": 1} if device == "GPU" else {},
    )


def _addresses(resolver: _Resolver | None) -> Sequence[str]:
    return resolver.cluster_spec().job_tasks("worker") if resolver else ()
