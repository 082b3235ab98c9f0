"""What layers write in a step (BatchNorm's moving statistics, counters, seeds), from all replicas to one value."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.training.randomness import is_seed, moved_on

__all__ = ["combined", "contributions"]


def contributions(
    variables: Sequence[keras.Variable], values: Sequence[tf.Tensor], present: tf.Tensor
) -> list[tf.Tensor]:
    """What this replica brings to the sums: a float's value, and by how much it counted an integer up.

    Args:
        values: what the replica's layers have made of the variables.
        present: whether it had rows; zeros otherwise. A vector, and then values with a first axis, for its shards.
    """
    brought = [_contribution(v, value) for v, value in zip(variables, values, strict=True) if _differs(v)]
    return [tf.where(_for(value, present), value, tf.zeros_like(value)) for value in brought]


def combined(
    variables: Sequence[keras.Variable], values: Sequence[tf.Tensor], sums: Sequence[tf.Tensor], replicas: tf.Tensor
) -> list[tf.Tensor]:
    """The new value of each variable, from the sums over all replicas.

    Args:
        replicas: how many of them had rows.
    """
    remaining = iter(sums)
    return [
        _combined(v, next(remaining), replicas) if _differs(v) else moved_on(v, value) if is_seed(v) else value
        for v, value in zip(variables, values, strict=True)
    ]


def _for(value: tf.Tensor, present: tf.Tensor) -> tf.Tensor:
    return tf.reshape(present, [*present.shape, *[1] * (value.shape.rank - present.shape.rank)])


def _is_float(variable: keras.Variable) -> bool:
    return keras.backend.is_float_dtype(variable.dtype)


def _differs(variable: keras.Variable) -> bool:
    """Whether replicas can come to different values. The seeds of random layers move on alike everywhere."""
    return _is_float(variable) or (keras.backend.is_int_dtype(variable.dtype) and not is_seed(variable))


def _contribution(variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
    return value if _is_float(variable) else tf.cast(value, tf.int64) - tf.cast(variable.value, tf.int64)


def _combined(variable: keras.Variable, total: tf.Tensor, replicas: tf.Tensor) -> tf.Tensor:
    """The mean of a float over the replicas that have rows; an integer has counted what all replicas saw."""
    if _is_float(variable):
        return tf.cast(total / tf.cast(replicas, total.dtype), variable.dtype)
    return tf.cast(tf.cast(variable.value, tf.int64) + total, variable.dtype)
