"""`HorovodStrategy`: any program written for `tf.distribute`, over Horovod and MPI.

    mpirun -np 4 python program.py        # each process holds one replica, on its own GPU or on the CPU

It is TensorFlow's multi-worker strategy with its collectives replaced: variables, input pipelines, contexts
and checkpoints are TensorFlow's own, and libraries (Keras above all) treat it as they treat that one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

from hvd_backend.start import start
from tfdist.as_one.opening import act_as_one, opened_as_one
from tfdist.cluster.devices import take_devices

__all__ = ["HorovodStrategy"]

_SUM = tf.distribute.ReduceOp.SUM


class HorovodStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Synchronous training on all ranks of an MPI job, one replica per rank, reduced by Horovod.

    Create it at the start of the program: it starts MPI and Horovod, gives this process one GPU and sets
    TensorFlow's threads. Every rank must run the same program: a collective is a call on all of them.

    Args:
        gpu_memory: whether TensorFlow takes the GPU's memory as it needs it (`grow`), or `all` of it at once.

    Raises:
        EnvironmentProblem: Horovod is missing or does not fit, or there are more ranks than GPUs.
        UsageError: the processes were started by TF_CONFIG, not by MPI.
    """

    def __init__(self, *, gpu_memory: Literal["grow", "all"] = "grow") -> None:
        started = start()
        (device,) = take_devices(started.identity, started.channel, grow=gpu_memory == "grow")
        # Imported here, since it loads Horovod: start() has told by now if that is missing or does not fit.
        from hvd_backend.extended import HorovodExtended

        self._several = started.identity.size > 1
        # Past MultiWorkerMirroredStrategy's own constructor, which starts TensorFlow's grpc servers.
        tf.distribute.Strategy.__init__(self, HorovodExtended(self, started, device))
        if self._several:
            opened_as_one(self, started.channel)

    def scope(self) -> contextlib.AbstractContextManager[tf.distribute.Strategy]:
        """As TensorFlow's own."""
        if self._several:
            act_as_one()
        return super().scope()

    @tf.autograph.experimental.do_not_convert
    def reduce(
        self, reduce_op: tf.distribute.ReduceOp | str, value: Any, axis: int | Sequence[int] | None = None
    ) -> Any:
        """The sum or mean of `value` over all replicas, on every rank.

        Args:
            reduce_op: `tf.distribute.ReduceOp.SUM` or `MEAN`, or its name.
            value: a tensor, a per-replica value, or a nested structure of them; all are reduced together.
            axis: axes to sum over on each replica first. A mean is over all elements of all replicas, which may
                have different sizes along them. A scalar has no axis, and is reduced as with `axis=None`.

        Returns:
            The structure of `value`, with the same tensors on every rank.

        Raises:
            ValueError: an axis is out of range.
            TypeError: TensorFlow has no sum for a dtype.
        """
        if isinstance(reduce_op, str):
            reduce_op = tf.distribute.ReduceOp(reduce_op.upper())
        if axis is None:
            return super().reduce(reduce_op, value, axis=None)
        sums, counts = self.run(_sums_and_counts, args=(value, axis))
        if reduce_op == _SUM:
            return super().reduce(_SUM, sums, axis=None)
        sums, counts = super().reduce(_SUM, (sums, counts), axis=None)
        return tf.nest.map_structure(lambda total, count: total / tf.cast(count, total.dtype), sums, counts)


def _sums_and_counts(value: Any, axis: int | Sequence[int]) -> tuple[Any, Any]:
    """Runs on each replica. The sums of the tensors of `value` over `axis`, and over how many elements each."""

    def one(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        tensor = tf.convert_to_tensor(tensor)
        rank = tensor.shape.rank
        if rank == 0:
            return tensor, tf.ones([], tf.int64)
        if rank is not None and not all(-rank <= a < rank for a in tf.nest.flatten(axis)):
            raise ValueError(f"axis={axis} is out of range for a tensor of shape {tensor.shape}")
        lengths = tf.gather(tf.shape(tensor, tf.int64), tf.math.floormod(axis, tf.rank(tensor)))
        return tf.reduce_sum(tensor, axis), tf.reduce_prod(lengths)

    leaves = [one(leaf) for leaf in tf.nest.flatten(value)]
    sums, counts = [leaf[0] for leaf in leaves], [leaf[1] for leaf in leaves]
    return tf.nest.pack_sequence_as(value, sums), tf.nest.pack_sequence_as(value, counts)
