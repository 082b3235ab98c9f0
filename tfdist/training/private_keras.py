"""The private Keras names that tfdist needs, each with its reason. `tests/unit/test_private_keras.py` watches them."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

__all__ = [
    "count_atomically",
    "count_rows",
    "has_synchronized_layer",
    "mask_of",
    "normalizations",
    "own_schedule",
    "positions",
    "rows_count",
    "without_second_reduction",
]


@contextlib.contextmanager
def without_second_reduction(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """While tracing inside, `optimizer.apply` takes gradients that are already summed over all replicas.

    By itself `apply` sums them over the replicas again (`_all_reduce_sum_gradients`), after it has clipped them. No
    public way leaves that out: outside of a replica, where it would not reduce, `apply` fails under MirroredStrategy.
    Enter it around `strategy.run`, not inside: MirroredStrategy interleaves the traces of its replicas.
    """
    name = "_all_reduce_sum_gradients"
    getattr(optimizer, name)  # a Keras that has renamed it must fail here and not reduce twice
    setattr(optimizer, name, lambda gradients_and_variables: gradients_and_variables)
    try:
        yield
    finally:
        delattr(optimizer, name)


def count_atomically(optimizer: keras.optimizers.Optimizer) -> None:
    """Let steps that run side by side count the optimizer's updates without losing any.

    A Keras variable's `assign_add` reads, adds and writes; TensorFlow's own is one operation. (What `apply` does to
    weights and slots goes through TensorFlow's already.)
    """
    counter = optimizer._iterations
    counter.assign_add = lambda value: counter.value.assign_add(tf.cast(value, counter.dtype))


def has_synchronized_layer(model: keras.Model) -> bool:
    """Whether a layer of the model, at any depth, counts its rows over all replicas, as synchronized BatchNorm does.

    `model.layers` does not show the layers inside of a layer that a user has written (`_flatten_layers` does).
    """
    return any(getattr(layer, "synchronized", False) for layer in model._flatten_layers())


_here = threading.local()  # each replica of MirroredStrategy is traced in a thread of its own


@contextlib.contextmanager
def rows_count(present: tf.Tensor) -> Iterator[None]:
    """While a replica is traced inside, layers of `count_rows` count its rows only where `present`."""
    _here.present = present
    try:
        yield
    finally:
        _here.present = None


def count_rows(model: keras.Model) -> None:
    """Let the synchronized BatchNormalization layers of a model leave out replicas whose rows do not count.

    The statistics are Keras's (sums, squares and counts over all replicas), in one collective instead of three. Keras
    has no way to leave rows out, and does not synchronize at all where there is a mask.
    """
    for layer in normalizations(model):
        if layer.synchronized:
            layer._moments = functools.partial(_moments, layer, layer._moments)


def _moments(layer: keras.layers.BatchNormalization, original: Any, inputs: Any, mask: Any) -> Any:
    present = getattr(_here, "present", None)
    context = tf.distribute.get_replica_context()
    if present is None or context is None or not layer.synchronized:
        return original(inputs, mask)
    dtype = inputs.dtype
    half = dtype in (tf.float16, tf.bfloat16)
    x = tf.cast(inputs, tf.float32) if half else inputs
    axes = layer._reduction_axes
    if mask is None:
        sums, squares = tf.reduce_sum(x, axes), tf.reduce_sum(tf.square(x), axes)
        count = tf.fill([1], tf.cast(tf.size(x), x.dtype) / tf.cast(tf.size(sums), x.dtype))
    else:
        counted = tf.broadcast_to(tf.cast(mask, x.dtype)[..., None], tf.shape(x))
        x = tf.math.multiply_no_nan(x, counted)
        sums, squares = tf.reduce_sum(x, axes), tf.reduce_sum(tf.square(x), axes)
        count = tf.reduce_sum(counted, axes)
    here = tf.concat([sums, squares, count], 0)
    here = tf.where(present, here, tf.zeros_like(here))
    total = context.all_reduce(tf.distribute.ReduceOp.SUM, here)
    sums, squares, count = tf.split(total, [tf.size(sums), tf.size(squares), tf.size(count)])
    mean = tf.math.divide_no_nan(sums, count)
    variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
    mean, variance = (tf.ensure_shape(value, [inputs.shape[layer.axis]]) for value in (mean, variance))
    if half:
        limits = tf.float16.min, tf.float16.max
        mean, variance = (tf.cast(tf.clip_by_value(value, *limits), dtype) for value in (mean, variance))
    return mean, variance


def normalizations(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """The BatchNormalization layers of the model, at any depth."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]


def positions(model: keras.Model) -> int:
    """The most places (pixels, tokens) that a layer has for an example: its addends in the sum of a gradient."""
    shapes = [getattr(getattr(layer, "output", None), "shape", None) for layer in model._flatten_layers()]
    inner = [shape[1:-1] for shape in shapes if isinstance(shape, tuple) and None not in shape[1:]]
    return max((int(np.prod(sizes, dtype=np.int64)) for sizes in inner), default=1)


def own_schedule(optimizer: keras.optimizers.Optimizer) -> Callable[[Any], Any] | None:
    """The schedule or function that an optimizer was made with, as a function of the step; None for a number.

    `optimizer.learning_rate` only gives its present value.
    """
    rate = optimizer._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return rate
    return (lambda step: rate()) if callable(rate) and not isinstance(rate, keras.Variable) else None


def mask_of(tensor: Any) -> Any:
    """The mask that Keras layers hand on with a tensor (`Embedding(mask_zero=True)`, `Masking`), or None."""
    return getattr(tensor, "_keras_mask", None)
