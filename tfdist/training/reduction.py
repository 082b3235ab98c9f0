"""What goes between replicas in a step: tensors summed over all of them, in one collective for each dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

__all__ = ["gather_over_replicas", "in_float32", "in_one_buffer", "sum_over_replicas"]

_HALF = (tf.float16, tf.bfloat16)


def sum_over_replicas(tensors: Sequence[tf.Tensor], wire: tf.DType | None = None) -> list[tf.Tensor]:
    """Sum each tensor over all replicas. Runs inside the replica step (traced).

    The tensors travel in one flat buffer, so that their number does not matter: many small collectives cost
    far more than the two copies.

    Args:
        tensors: dense tensors of any shapes, the same shapes and dtypes on all replicas. Half-precision ones are
            added, and returned, in float32.
        wire: the type in which floats travel, instead of their own. What does not fit into it becomes infinite.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return [_through(t, wire) for t in in_float32(tensors)]

    def total(flat: tf.Tensor) -> tf.Tensor:
        dtype = flat.dtype
        if wire is not None and dtype.is_floating:
            flat = tf.cast(flat, wire)
        return tf.cast(context.all_reduce(tf.distribute.ReduceOp.SUM, flat), dtype)

    return in_one_buffer(in_float32(tensors), total)


def in_float32(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors, of which half-precision ones are float32: the sum of many halves would lose its small addends."""
    return [tf.cast(t, tf.float32) if t.dtype in _HALF else t for t in tensors]


def in_one_buffer(
    tensors: Sequence[tf.Tensor], combine: Callable[[tf.Tensor], tf.Tensor], *, first_axis: bool = False
) -> list[tf.Tensor]:
    """Combine tensors of one dtype as one flat buffer, for each dtype (traced).

    Args:
        combine: from a buffer to one as long, of shape `[numbers]`.
        first_axis: whether the tensors have a first axis of one length, which stays one of the buffer, and which
            `combine` takes away.
    """
    lead = 1 if first_axis else 0
    results: list[tf.Tensor] = list(tensors)
    for dtype in sorted({t.dtype for t in tensors}, key=lambda d: d.name):
        places = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        shapes = [tf.shape(tensors[i])[lead:] for i in places]
        flat = tf.concat([tf.reshape(tensors[i], [*tensors[i].shape[:lead], -1]) for i in places], axis=lead)
        parts = tf.split(combine(flat), [tf.reduce_prod(shape) for shape in shapes])
        for i, part, shape in zip(places, parts, shapes, strict=True):
            results[i] = tf.ensure_shape(tf.reshape(part, shape), tensors[i].shape[lead:])
    return results


def _through(tensor: tf.Tensor, wire: tf.DType | None) -> tf.Tensor:
    """What one replica alone gets back, so that a run on one device shows what the type does to its numbers."""
    return tensor if wire is None or not tensor.dtype.is_floating else tf.cast(tf.cast(tensor, wire), tensor.dtype)


def gather_over_replicas(
    slices: Sequence[tf.IndexedSlices], wire: tf.DType | None = None, *, sums_first: bool = True
) -> list[tf.IndexedSlices]:
    """The sum over all replicas of sparse gradients, as rows of which none comes twice. Inside the replica step.

    Args:
        wire: the type in which the values travel, instead of their own.
        sums_first: add up equal rows before they are sent, so that fewer are; their number then changes from step to
            step.
    """
    context = tf.distribute.get_replica_context()
    gathered = [_summed(s) for s in slices] if sums_first else list(slices)
    dtypes = [s.values.dtype for s in gathered]
    if wire is not None:
        # Only moved, so the bits may be called something that every backend moves.
        gathered = [_with_values(s, tf.bitcast(tf.cast(s.values, wire), tf.float16)) for s in gathered]
    if context.num_replicas_in_sync > 1 and gathered:
        gathered = context.all_reduce(tf.distribute.ReduceOp.SUM, gathered)
    if wire is not None:
        gathered = [
            _with_values(s, tf.cast(tf.bitcast(s.values, wire), dtype))
            for s, dtype in zip(gathered, dtypes, strict=True)
        ]
    return [_summed(s) for s in gathered]


def _with_values(slices: tf.IndexedSlices, values: tf.Tensor) -> tf.IndexedSlices:
    return tf.IndexedSlices(values, slices.indices, slices.dense_shape)


def _summed(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    indices, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.shape(indices)[0])
    return tf.IndexedSlices(values, indices, slices.dense_shape)
