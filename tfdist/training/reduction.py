"""What goes between replicas in a step: tensors summed over all of them, in one collective for each dtype."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

__all__ = ["gather_over_replicas", "sum_over_replicas"]

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
    tensors = [tf.cast(t, tf.float32) if t.dtype in _HALF else t for t in tensors]
    if context.num_replicas_in_sync == 1:
        return [_through(t, wire) for t in tensors]
    results: list[tf.Tensor] = list(tensors)
    for dtype in sorted({t.dtype for t in tensors}, key=lambda d: d.name):
        places = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        shapes = [tf.shape(tensors[i]) for i in places]
        flat = tf.concat([tf.reshape(tensors[i], [-1]) for i in places], axis=0)
        if wire is not None and dtype.is_floating:
            flat = tf.cast(flat, wire)
        total = tf.cast(context.all_reduce(tf.distribute.ReduceOp.SUM, flat), dtype)
        parts = tf.split(total, [tf.size(tensors[i]) for i in places])
        for i, part, shape in zip(places, parts, shapes, strict=True):
            results[i] = tf.ensure_shape(tf.reshape(part, shape), tensors[i].shape)
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
