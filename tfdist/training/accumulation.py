"""Gradients that add up on each replica over several global batches, before they are reduced."""

from __future__ import annotations

from typing import Any, TypeAlias

import tensorflow as tf

from tfdist.training.local import LocalStep, Sums

__all__ = ["Accumulators"]


_Own: TypeAlias = tf.Variable | list[tf.Variable]


class Accumulators:
    """Variables of which each replica has its own values."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        local: LocalStep,
        *,
        one_copy: bool = False,
        shards: int | None = None,
    ) -> None:
        """Make them. `local` must have been traced.

        Args:
            one_copy: whether the strategy's variables have one value for all replicas.
            shards: of each replica, which then are a first axis of all sums.
        """
        axis = [] if shards is None else [shards]

        def on(device: str, shape: tf.TensorShape, dtype: tf.DType, name: str) -> tf.Variable:
            with tf.init_scope(), tf.device(device):
                return tf.Variable(tf.zeros(shape, dtype), trainable=False, name=name)

        def own(of_one: Any, dtype: tf.DType, name: str) -> _Own:
            shape = tf.TensorShape([*axis, *of_one])
            if one_copy:
                return [on(device, shape, dtype, name) for device in strategy.extended.worker_devices]
            return tf.Variable(
                tf.zeros(shape, dtype),
                trainable=False,
                name=name,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )

        with tf.init_scope() if one_copy else strategy.scope():
            self._gradients = [own(v.shape, tf.as_dtype(v.dtype), "gradient_sum") for v in local.trained]
            self._state = [own(v.shape, tf.as_dtype(v.dtype), "state_so_far") for v in local.updated]
            self._tally = own([local.layout.length], tf.float32, "tally")

    def reset(self, state: list[tf.Tensor]) -> None:
        """Begin a step. Inside the replica step, as all that follows."""
        for own in (*self._gradients, self._tally):
            _here(own).assign(tf.zeros_like(_here(own)))
        for own, value in zip(self._state, state, strict=True):
            _here(own).assign(value)

    def add(self, sums: Sums) -> None:
        """Add a batch's sums; its state replaces the one so far."""
        for own, value in zip((*self._gradients, self._tally), (*sums.gradients, sums.tally), strict=True):
            _here(own).assign_add(tf.cast(value, _here(own).dtype))
        for own, value in zip(self._state, sums.state, strict=True):
            _here(own).assign(value)

    def state(self) -> list[tf.Tensor]:
        """What layers have made of their variables so far."""
        return [tf.convert_to_tensor(_here(own)) for own in self._state]

    def sums(self) -> Sums:
        """All batches since the reset."""
        return Sums(
            [tf.convert_to_tensor(_here(own)) for own in self._gradients],
            self.state(),
            tf.convert_to_tensor(_here(self._tally)),
        )


def _here(own: _Own) -> tf.Variable:
    """This replica's variable. Inside the replica step (traced), which one process traces once for each replica."""
    if not isinstance(own, list):
        return own
    return own[int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))]
