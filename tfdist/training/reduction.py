"""The one reduction of a step: a list of tensors summed over all replicas in one collective for each dtype."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

__all__ = ["sum_over_replicas"]


def sum_over_replicas(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sum each tensor over all replicas. Runs inside the replica step (traced).

    The tensors travel in one flat buffer, so that their number does not matter: many small collectives cost
    far more than the two copies.

    Args:
        tensors: dense tensors of any shapes, the same shapes and dtypes on all replicas.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return list(tensors)
    results: list[tf.Tensor] = list(tensors)
    for dtype in sorted({t.dtype for t in tensors}, key=lambda d: d.name):
        places = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        shapes = [tf.shape(tensors[i]) for i in places]
        flat = tf.concat([tf.reshape(tensors[i], [-1]) for i in places], axis=0)
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, flat)
        parts = tf.split(total, [tf.size(tensors[i]) for i in places])
        for i, part, shape in zip(places, parts, shapes, strict=True):
            results[i] = tf.ensure_shape(tf.reshape(part, shape), tensors[i].shape)
    return results
