"""The private Keras name that strategies of several processes need. `tests/unit/test_private_keras.py` watches it."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

__all__ = ["build_without_reducing"]


@functools.cache
def build_without_reducing() -> None:
    """`fit` and `evaluate` build a model from the first batch, and only its shapes and dtypes count.

    Keras adds up the replicas' parts of that batch, which fails where they have different numbers of rows.
    """
    build = keras.Model._maybe_symbolic_build

    @functools.wraps(build)
    def build_from_own_rows(self: Any, *args: Any, **options: Any) -> None:
        strategy = self.distribute_strategy
        if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            return build(self, *args, **options)
        strategy.reduce = lambda _, value, axis=None: tf.nest.map_structure(
            lambda leaf: _with_a_row(strategy.experimental_local_results(leaf)[0]), value
        )
        try:
            build(self, *args, **options)
        finally:
            del strategy.reduce  # the instance's; the class has its own

    keras.Model._maybe_symbolic_build = build_from_own_rows


def _with_a_row(rows: Any) -> Any:
    """A layer may not be built from no rows."""
    return tf.zeros([1, *rows.shape[1:]], rows.dtype) if isinstance(rows, tf.Tensor) and rows.shape[:1] == [0] else rows
