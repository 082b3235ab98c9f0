"""Gradients are dense tensors, or rows of a table that was looked up (`tf.IndexedSlices`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import tensorflow as tf

__all__ = ["Gradient", "is_sparse", "on_values"]

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


def is_sparse(gradient: Gradient) -> bool:
    """Whether a gradient is rows of a table."""
    return isinstance(gradient, tf.IndexedSlices)


def on_values(gradient: Gradient, change: Callable[[tf.Tensor], tf.Tensor]) -> Gradient:
    """A dense gradient changed, or the values of a sparse one."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
    return change(gradient)
