"""TensorFlow's multi-worker strategy, opened without `TF_CONFIG` under mpirun, and fit for Keras 3."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import tensorflow as tf

from tfdist import private_tf
from tfdist.as_one.opening import act_as_one, opened_as_one
from tfdist.cluster.channel import Alone, Channel
from tfdist.cluster.devices import take_devices
from tfdist.cluster.ending import end_on_sigterm, end_together
from tfdist.cluster.identity import TfConfig
from tfdist.cluster.ports import hold_port, meet, past_proxies, require_free, require_reachable
from tfdist.cluster.variables import agree_on_variable, variable_path
from tfdist.errors import EnvironmentProblem, UsageError
from tfdist.strategies.creating import creating
from tfdist.strategies.table import Place

__all__ = ["MultiWorkerMirrored", "open_multi_worker"]

_PATIENCE_SECONDS = 20.0
"""How long TensorFlow itself lets a process be silent. In `Trainer.fit` the heartbeat notices before."""

_Resolver: TypeAlias = tf.distribute.cluster_resolver.ClusterResolver


class MultiWorkerMirrored(tf.distribute.MultiWorkerMirroredStrategy):
    """`tf.distribute.MultiWorkerMirroredStrategy` on which Keras 3's fit, evaluate and predict run.

    Keras 3 hands `reduce` a tuple of tensors, and asks for `axis=0` of scalars; TensorFlow's own `reduce`
    takes neither. With a channel, all processes also compare each new variable before it is made.
    """

    def __init__(
        self,
        cluster_resolver: _Resolver | None = None,
        channel: Channel | None = None,
        *,
        collectives: Literal["auto", "ring", "nccl"] = "auto",
    ) -> None:
        self._channel: Channel = channel or Alone()
        implementation = tf.distribute.experimental.CommunicationImplementation[collectives.upper()]
        options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
        super().__init__(cluster_resolver=cluster_resolver, communication_options=options)
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
        return creating(super().scope(), self._create_same_variable)

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


def open_multi_worker(place: Place) -> MultiWorkerMirrored:
    """Open the strategy on every process: from `TF_CONFIG` where it is set, else on ports that the ranks exchange.

    Raises:
        EnvironmentProblem: TensorFlow has already run in this process, there are more replicas than GPUs, or a process
            cannot be reached.
    """
    identity, channel, options = place.identity, place.channel, place.options
    devices = take_devices(identity, channel, place.replicas, grow=options.gpu_memory == "grow")
    gpus = len(devices) if devices[0].startswith("GPU") else 0
    if options.collectives == "nccl" and not gpus:
        raise UsageError("collectives='nccl' works on GPUs, and TensorFlow sees none here. Use ring or auto.")
    if _has_run():
        raise _too_late()
    with contextlib.ExitStack() as until_open:
        resolver = None
        if identity.size > 1 or identity.tf_config is not None:
            if identity.tf_config is None:
                held = until_open.enter_context(hold_port())
                addresses = meet(channel, "opening multi_worker_mirrored", held.getsockname()[1])
                spec, kind, index = {"worker": addresses}, "worker", channel.rank
            else:
                spec, kind, index = _of_tf_config(identity.tf_config)
                addresses = list(identity.tf_config.workers)
                require_free(channel, addresses[identity.rank])
            past_proxies(addresses)
            require_reachable(channel, addresses)
            resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec(spec),
                task_type=kind,
                task_id=index,
                rpc_layer="grpc",
                num_accelerators={"GPU": gpus} if gpus else {},
            )
        until_open.enter_context(private_tf.local_cpu_devices(len(devices) if not gpus else 1))
        until_open.enter_context(private_tf.patient_coordination(_PATIENCE_SECONDS))
        try:
            strategy = MultiWorkerMirrored(resolver, channel, collectives=options.collectives)
        except RuntimeError as error:
            if "program startup" in str(error):
                raise _too_late() from None
            raise
    end_on_sigterm()
    end_together(channel)
    return strategy


def _of_tf_config(config: TfConfig) -> tuple[dict[str, list[str]], str, int]:
    """The cluster, and this process's role and number in it."""
    chiefs = int(config.has_chief)
    spec = {"chief": list(config.workers[:chiefs]), "worker": list(config.workers[chiefs:])}
    return {role: members for role, members in spec.items() if members}, config.task_type, config.task_index


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
