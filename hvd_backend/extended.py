"""What `HorovodStrategy` does differently from TensorFlow's multi-worker strategy."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_backend import collectives, launching
from hvd_backend.start import Started
from tfdist import private_tf
from tfdist.cluster.channel import Channel
from tfdist.cluster.variables import agree_on_variable, variable_path

__all__ = ["HorovodExtended"]

_MEAN = tf.distribute.ReduceOp.MEAN


class HorovodExtended(private_tf.CollectiveAllReduceExtended):
    """`strategy.extended`: one local replica, whose number in the group is the rank."""

    def __init__(self, strategy: tf.distribute.Strategy, started: Started, device: str) -> None:
        # Past TensorFlow's own constructors, which start servers, collectives and health checks of their own.
        tf.compat.v1.distribute.StrategyExtended.__init__(self, strategy)
        launching.prepare()
        identity = started.identity
        self._channel: Channel = started.channel
        self._num_workers = identity.size
        self._id_in_cluster = identity.rank
        self._is_chief = identity.is_chief
        self._cluster_resolver = _resolver(started.channel)
        self._worker_device = private_tf.canonicalize("/device:CPU:0")
        self._initialize_single_worker((private_tf.canonicalize(f"/device:{device}"),))
        # What TensorFlow's methods read beside these.
        self._communication_options = tf.distribute.experimental.CommunicationOptions()
        self._collective_key_base = 0
        self._num_devices_per_worker = 1
        self._local_device_type = device.partition(":")[0]
        self._use_var_policy = False
        self.experimental_enable_get_next_as_optional = True  # uneven ends of datasets: ranks agree at each step

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `fn` on this process's replica, in this thread: there are no others to wait for."""
        args, kwargs = private_tf.select_replica(0, (args, kwargs))
        strategy = self._container_strategy()
        replica = tf.distribute.ReplicaContext(strategy, replica_id_in_sync_group=self._id_in_cluster)
        with replica, tf.device(self.worker_devices[0]):
            return private_tf.regroup((fn(*args, **kwargs),))

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        variable = super()._create_variable(next_creator, **kwargs)
        first = variable.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
        if first and self._num_workers > 1 and isinstance(variable, private_tf.SyncOnReadVariable):
            return _FirstOnRead(self._container_strategy(), variable.values, variable.aggregation)
        return variable

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: Any, **kwargs: Any
    ) -> Callable[[], tf.Tensor]:
        """Rank 0's initial value, once all ranks are found to make the same variable."""
        path = variable_path(tf.get_current_name_scope(), kwargs.get("name"))

        def initial_value() -> tf.Tensor:
            value = kwargs["initial_value"]
            value = value() if callable(value) else value
            if isinstance(value, private_tf.CheckpointInitialValue):
                value = value.wrapped_value
            with tf.device(device):
                tensor = tf.convert_to_tensor(value, dtype=kwargs.get("dtype"))
            if self._num_workers == 1:
                return tensor
            agreed = agree_on_variable(self._channel, path, str(tensor.shape), tensor.dtype.name)
            with tf.device(device):
                return collectives.broadcast(tensor, name=f"variable.{agreed}")

        return initial_value

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any) -> Any:
        """As TensorFlow's. One pipeline per replica and one per process are the same here."""
        if options and options.experimental_replication_mode == tf.distribute.InputReplicationMode.PER_REPLICA:
            options = options._replace(
                experimental_replication_mode=tf.distribute.InputReplicationMode.PER_WORKER,
                experimental_place_dataset_on_device=False,
            )
        return super()._distribute_datasets_from_function(dataset_fn, options)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        if reduce_op != _MEAN and private_tf.is_mirrored(value):
            raise ValueError(
                "a mirrored value is the same on all replicas and has no sum over them. Multiply it by "
                "strategy.num_replicas_in_sync, or reduce with MEAN."
            )
        leaves = tf.nest.flatten(value)
        reduced = self._batch_reduce_to(reduce_op, [(leaf, destinations) for leaf in leaves], options)
        return tf.nest.pack_sequence_as(value, reduced)

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        """Reduce all values together, in the cross-replica context."""
        pairs = list(value_destination_pairs)
        results = [value for value, _ in pairs]
        known = [reduce_op == _MEAN and (value is None or private_tf.is_mirrored(value)) for value in results]
        different = [i for i, is_known in enumerate(known) if not is_known]
        values = self._all_reduce(reduce_op, [_local(results[i]) for i in different], "reduce")
        for i, value in zip(different, values, strict=True):
            results[i] = _copy_to(value, pairs[i][1])
        return results

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        values = self._all_reduce(reduce_op, tf.nest.flatten(value), "all_reduce")
        return tf.nest.pack_sequence_as(value, values)

    def _all_reduce(self, reduce_op: Any, values: list[Any], kind: str) -> list[Any]:
        if self._num_workers == 1 or not values:
            return values
        return collectives.all_reduce(values, mean=reduce_op == _MEAN, kind=kind)

    @tf.autograph.experimental.do_not_convert
    def adasum(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Horovod's Adasum of each tensor over all replicas. Call it inside a replica, in `strategy.run`.

        Args:
            tensors: gradients in float32 or float64, of equal shape on all replicas.

        Returns:
            The combined tensors, the same on all replicas; with one replica the tensors themselves.

        Raises:
            TypeError: a tensor of another dtype, or IndexedSlices.
            ValueError: the number of replicas is not a power of two.
        """
        return collectives.adasum(tensors)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: Any, options: Any) -> Any:
        return self._batch_gather_to([(value, destinations)], axis, options)[0]

    def _batch_gather_to(self, value_destination_pairs: Any, axis: Any, options: Any = None) -> list[Any]:
        """Gather all values together, in the cross-replica context."""
        pairs = list(value_destination_pairs)
        values = [_local(value) for value, _ in pairs]
        if self._num_workers > 1:
            values = collectives.all_gather(values, axis=axis, kind="gather")
        return [_copy_to(value, destination) for value, (_, destination) in zip(values, pairs, strict=True)]

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Rank 0's value: how a variable with ONLY_FIRST_REPLICA takes what the replicas assign to it."""
        if isinstance(tensor, float | int):
            return tensor
        if self._num_workers > 1 and not private_tf.counts_alike(tensor, destinations):
            tensor = collectives.from_first(tensor)
        return _copy_to(tensor, destinations)


class _FirstOnRead(private_tf.SyncOnReadVariable):
    """Each rank writes its own; outside of replicas all ranks read the first one's. TensorFlow's reads its own."""

    def _get_cross_replica(self) -> tf.Tensor:
        return collectives.from_first(self._get_replica(0).read_value())

    def value(self) -> tf.Tensor:
        return self.read_value()


def _local(value: Any) -> Any:
    """The tensor, variable or IndexedSlices of this process's replica."""
    value = value.values[0] if isinstance(value, tf.distribute.DistributedValues) else value
    if isinstance(value, tf.Variable) and tf.executing_eagerly():
        # Read without being seen: ReplicaContext.all_reduce has a gradient of its own, which may not use variables.
        return tf.raw_ops.ReadVariableOp(resource=value.handle, dtype=value.dtype)
    return value if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value)


def _copy_to(value: Any, destinations: Any) -> Any:
    """The value on the devices of its destination; an unnamed device (inside a nested tf.function) is any."""
    return private_tf.simple_broadcast(value, destinations) if _named(destinations) else value


def _named(destinations: Any) -> bool:
    return bool(destinations if isinstance(destinations, str) else getattr(destinations, "device", True))


def _resolver(channel: Channel) -> tf.distribute.cluster_resolver.ClusterResolver:
    """Who is who, for programs that ask `strategy.cluster_resolver`. Nothing listens at these addresses."""
    hosts = channel.exchange("who is where", socket.gethostname())
    if len(hosts) == 1:
        return tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}), task_id=0)
    workers = [f"{host}:{rank}" for rank, host in enumerate(hosts)]
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": workers}), task_type="worker", task_id=channel.rank
    )
