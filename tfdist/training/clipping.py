"""Clipping of gradients that are already reduced over the replicas, so that every replica clips alike.

Gradients g of the variables of one optimizer, limit c (the formulas of TensorFlow's `tf.clip_by_*`):

    value        each element: min(max(g, −c), c)
    norm         each variable: g · min(1, c / ‖g‖₂)
    global norm  all together:  g · min(1, c / √Σ‖g‖₂²)
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.config import Settings
from tfdist.training.gradients import Gradient, on_values

__all__ = ["clipped"]


def clipped(gradients: list[Gradient], settings: Settings) -> list[Gradient]:
    """The gradients, clipped as the settings say. Indices of IndexedSlices must not repeat."""
    if settings.clip_value is not None:
        limit = settings.clip_value
        return [on_values(g, lambda values: tf.clip_by_value(values, -limit, limit)) for g in gradients]
    if settings.clip_norm is not None:
        limit = settings.clip_norm
        return [on_values(g, lambda values: _to_norm(values, limit)) for g in gradients]
    if settings.clip_global_norm is not None:
        return list(tf.clip_by_global_norm(gradients, settings.clip_global_norm)[0])
    return gradients


def _to_norm(values: tf.Tensor, limit: float) -> tf.Tensor:
    """`tf.clip_by_norm`; not a number where the norm is too large for one, for which that would give zeros."""
    clipped_values = tf.clip_by_norm(values, limit)
    fits = tf.math.is_finite(tf.norm(values))
    return tf.where(fits, clipped_values, tf.fill(tf.shape(values), tf.constant(float("nan"), values.dtype)))
