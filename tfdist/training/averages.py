"""An exponential moving average of the weights, which evaluation uses in their place.

After update t = 1, 2, …:  e ← w at t = 1, and then  e ← m·e + (1 − m)·w, as Keras's optimizers have it (`use_ema`).
"""

from __future__ import annotations

import keras
import tensorflow as tf

__all__ = ["Averages"]


class Averages:
    """One average for each trainable variable of the model. Make it inside the strategy's scope."""

    def __init__(self, model: keras.Model, momentum: float) -> None:
        self._momentum = momentum
        self._weights = list(model.trainable_variables)
        self.variables = [
            keras.Variable(v.numpy(), dtype=v.dtype, trainable=False, name="average") for v in self._weights
        ]
        """The averages, in the order of `model.trainable_variables`."""

    @property
    def mapping(self) -> list[tuple[keras.Variable, keras.Variable]]:
        """Each weight with its average, for a Keras stateless scope."""
        return list(zip(self._weights, self.variables, strict=True))

    def update(self, updates: tf.Tensor) -> None:
        """Account for the last of `updates` updates. Inside the replica step (traced)."""
        momentum = tf.where(tf.cast(updates, tf.int64) > 1, self._momentum, 0.0)
        for weight, average in self.mapping:
            m = tf.cast(momentum, weight.dtype)
            average.assign(m * average + (1 - m) * weight)
