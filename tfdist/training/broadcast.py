"""Values that rank 0 alone has, to every process: through the strategy's own collectives, so that no file is shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["from_chief"]

_NUMBERS = 1 << 20
"""Of 8 bytes, in one collective."""


def from_chief(
    strategy: tf.distribute.Strategy, values: Sequence[np.ndarray] | None, like: Sequence[tuple[Any, Any]]
) -> list[np.ndarray]:
    """The values of the process that holds replica 0, bit for bit. Every process of a job calls it alike, outside.

    Args:
        values: on that process; None on others.
        like: shape and NumPy dtype of each value.
    """
    sizes = [int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for shape, dtype in like]
    everything = np.zeros(-(-sum(sizes) // 8) * 8, np.uint8)
    if values is not None:
        given = [np.ascontiguousarray(value).reshape(-1).view(np.uint8) for value in values]
        everything[: sum(sizes)] = np.concatenate([*given, np.zeros(0, np.uint8)])
    # Whole numbers, of which all but one are 0: their sum is exact, whatever the bytes mean.
    numbers = everything.view(np.int64)

    @tf.function(autograph=False)
    def of_replica_0(part: tf.Tensor) -> tf.Tensor:
        def add(part: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            own = tf.where(tf.equal(context.replica_id_in_sync_group, 0), part, tf.zeros_like(part))
            return context.all_reduce(tf.distribute.ReduceOp.SUM, own)

        return strategy.experimental_local_results(strategy.run(add, args=(part,)))[0]

    for start in range(0, numbers.size, _NUMBERS):
        part = np.zeros(min(_NUMBERS, numbers.size), np.int64)  # of one size, which is traced once
        piece = numbers[start : start + _NUMBERS]
        part[: piece.size] = piece
        numbers[start : start + _NUMBERS] = of_replica_0(tf.constant(part)).numpy()[: piece.size]
    places = np.cumsum([0, *sizes])
    return [
        everything[a:b].view(dtype).reshape(shape)
        for a, b, (shape, dtype) in zip(places[:-1], places[1:], like, strict=True)
    ]
