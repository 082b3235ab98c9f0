"""What a model says of each example: on all replicas, in the order of the examples, each once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.training.data import row_count, with_a_row
from tfdist.training.task import in_float32

__all__ = ["PredictionLoop"]


class PredictionLoop:
    """Runs the model over global batches of inputs and gathers its outputs. Every process calls it alike."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        model: keras.Model,
        *,
        values: Sequence[tuple[keras.Variable, Any]] = (),
    ) -> None:
        """Nothing is traced yet.

        Args:
            values: variables of the model, each with what stands in for it.
        """
        self._strategy = strategy
        self._model = model
        self._values = list(values)
        self._compiled = tf.function(self._of_a_batch, reduce_retracing=True, autograph=False)

    def run(self, iterator: Any, steps: int) -> Any:
        """The outputs over `steps` global batches: a structure of arrays, whose first axis counts the examples."""
        with self._strategy.scope():
            batches = [tf.nest.map_structure(lambda t: t.numpy(), self._compiled(next(iterator))) for _ in range(steps)]
        return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *batches)

    def _of_a_batch(self, inputs: Any) -> Any:
        outputs = self._strategy.run(self._of_a_replica, args=(inputs,))
        return tf.nest.map_structure(lambda value: self._strategy.gather(value, axis=0), outputs)

    def _of_a_replica(self, inputs: Any) -> Any:
        """Runs inside the replica (traced)."""
        rows = row_count(inputs)
        if self._strategy.num_replicas_in_sync > 1:
            inputs = with_a_row(inputs)
        with keras.StatelessScope(self._values):
            outputs = in_float32(self._model(inputs, training=False))
        return tf.nest.map_structure(lambda value: value[:rows], outputs)
