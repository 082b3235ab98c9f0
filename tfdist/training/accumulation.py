"""Gradients that add up on each replica over several global batches, before they are reduced."""

from __future__ import annotations

import tensorflow as tf

from tfdist.training.local import LocalStep, Sums

__all__ = ["Accumulators"]


class Accumulators:
    """Variables of which each replica has its own values."""

    def __init__(self, strategy: tf.distribute.Strategy, local: LocalStep) -> None:
        """Make them. `local` must have been traced."""

        def own(shape: tf.TensorShape, dtype: tf.DType, name: str) -> tf.Variable:
            return tf.Variable(
                tf.zeros(shape, dtype),
                trainable=False,
                name=name,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )

        with strategy.scope():
            self._gradients = [own(v.shape, tf.as_dtype(v.dtype), "gradient_sum") for v in local.trained]
            self._state = [own(v.shape, tf.as_dtype(v.dtype), "state_so_far") for v in local.updated]
            self._tally = own(tf.TensorShape([local.layout.length]), tf.float32, "tally")

    def reset(self, state: list[tf.Tensor]) -> None:
        """Begin a step. Inside the replica step, as all that follows."""
        for variable in (*self._gradients, self._tally):
            variable.assign(tf.zeros_like(variable))
        for variable, value in zip(self._state, state, strict=True):
            variable.assign(value)

    def add(self, sums: Sums) -> None:
        """Add a batch's sums; its state replaces the one so far."""
        for variable, value in zip((*self._gradients, self._tally), (*sums.gradients, sums.tally), strict=True):
            variable.assign_add(tf.cast(value, variable.dtype))
        for variable, value in zip(self._state, sums.state, strict=True):
            variable.assign(value)

    def state(self) -> list[tf.Tensor]:
        """What layers have made of their variables so far."""
        return [tf.convert_to_tensor(variable) for variable in self._state]

    def sums(self) -> Sums:
        """All batches since the reset."""
        return Sums(
            [tf.convert_to_tensor(variable) for variable in self._gradients],
            self.state(),
            tf.convert_to_tensor(self._tally),
        )
