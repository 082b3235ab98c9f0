"""One training step: local gradients, one reduction over the replicas, one update.

    batch piece ─> local sums of gradients, loss, weight ─> sum over replicas ─> divide, add penalty ─> apply or skip
                   (Task.train_step)                       (one collective)     (the same on every replica)

The model is called in a Keras stateless scope: what layers write (BatchNorm's moving statistics, say) comes out as
values instead of being assigned, travels with the gradients, and is averaged over the replicas before it is stored. So
every replica holds the same state after every step, and a checkpoint does not depend on who wrote it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.training.data import row_count, with_a_row
from tfdist.training.private_keras import has_synchronized_layer, without_second_reduction
from tfdist.training.reduction import sum_over_replicas
from tfdist.training.replica import Replica
from tfdist.training.task import Task

__all__ = ["StepResult", "TrainingStep"]


class StepResult(NamedTuple):
    """What one step tells; scalars that are equal on every replica."""

    loss: tf.Tensor
    """Σ weight·loss / Σ weight over all replicas, without penalties."""
    rows: tf.Tensor
    """Examples of the global batch."""
    finite: tf.Tensor
    """Whether loss and gradients are finite; otherwise nothing was applied."""
    suspects: tf.Tensor
    """How many replicas had a loss that was not finite, and the sum of their ids."""


class _Reduced(NamedTuple):
    gradients: list[tf.Tensor]
    state: list[tf.Tensor]
    result: StepResult
    has_weight: tf.Tensor


class TrainingStep:
    """Calls a task's step on every replica and applies what comes out."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        task: Task,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
    ) -> None:
        self._strategy = strategy
        self._task = task
        self._model = model
        self._optimizer = optimizer
        self._updated: list[keras.Variable] = []  # non-trainable variables that the step writes, known once traced
        self._trained: list[keras.Variable] = []  # trainable variables that get a gradient, likewise

    def __call__(self, batch: Any) -> StepResult:
        """Runs on every process, outside of a replica (traced). `batch` holds each local replica's piece."""
        reduced = self._strategy.run(self._reduce, args=(batch,))
        result = StepResult(*(self._strategy.experimental_local_results(v)[0] for v in reduced.result))
        apply = self._strategy.experimental_local_results(reduced.has_weight)[0] & result.finite

        def update() -> tf.Tensor:
            with without_second_reduction(self._optimizer):
                self._strategy.run(self._apply, args=(reduced.gradients, reduced.state))
            return tf.constant(True)

        tf.cond(apply, update, lambda: tf.constant(False))
        return result

    def _reduce(self, batch: Any) -> _Reduced:
        """Runs inside the replica step (traced)."""
        rows = row_count(batch)
        if self._strategy.num_replicas_in_sync > 1 and not has_synchronized_layer(self._model):
            batch = with_a_row(batch)
        with keras.StatelessScope(collect_losses=True) as scope:
            replica = Replica(self._model, rows, penalties=scope.losses, length=row_count(batch))
            self._task.train_step(replica, batch)
        if replica.weighted_loss is None or replica.weight is None:
            raise UsageError("train_step did not call replica.loss(losses). It makes the loss that is reduced.")
        self._trained = [v for v in self._model.trainable_variables if replica.gradients.get(id(v)) is not None]
        if not self._trained:
            raise UsageError(
                "train_step gave no gradient. Compute the loss under the tape from the model's output, and call "
                "replica.apply_gradients."
            )
        self._updated = [v for v in self._model.variables if scope.get_current_value(v) is not None]
        if len(self._updated) < len(scope.state_mapping):
            raise UsageError(
                "train_step wrote to a Keras variable that is not in model.variables (a metric, or the global seed of "
                "keras.random). Give random layers their own keras.random.SeedGenerator, and use Task.metrics."
            )

        # An empty piece contributes zeros: it has NaN where a layer averages over no rows, or stands in for a row.
        present = rows > 0
        weighted_loss, weight = (
            tf.where(present, value, tf.zeros_like(value)) for value in (replica.weighted_loss, replica.weight)
        )
        local = [tf.convert_to_tensor(replica.gradients[id(v)]) for v in self._trained]  # sparse ones become dense
        local += [_contribution(v, scope.get_current_value(v)) for v in self._updated if _is_reduced(v)]
        local = [tf.where(present, value, tf.zeros_like(value)) for value in local]
        bad = tf.cast(~tf.math.is_finite(weighted_loss), tf.float32)
        tally = [
            tf.cast(weighted_loss, tf.float32),
            tf.cast(weight, tf.float32),
            tf.cast(rows, tf.float32),
            tf.cast(present, tf.float32),
            bad,
            bad * tf.cast(replica.id, tf.float32),
        ]
        total = sum_over_replicas([*local, tf.stack(tally)])

        loss_sum, weight, all_rows, replicas_present, suspects, suspect_ids = tf.unstack(total[-1])
        gradients = [tf.math.divide_no_nan(g, tf.cast(weight, g.dtype)) for g in total[: len(self._trained)]]
        gradients = self._add_penalty(gradients)
        sums = iter(total[len(self._trained) : -1])
        state = [
            _combined(v, next(sums), replicas_present) if _is_reduced(v) else scope.get_current_value(v)
            for v in self._updated
        ]
        finite = tf.math.is_finite(loss_sum) & tf.reduce_all(
            tf.stack([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])
        )
        loss = tf.math.divide_no_nan(loss_sum, weight)
        return _Reduced(
            gradients, state, StepResult(loss, all_rows, finite, tf.stack([suspects, suspect_ids])), weight > 0
        )

    def _add_penalty(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """Add the gradient of the layers' regularizers, the same on every replica. Inside the replica step."""
        regularized = [v for v in self._trained if v.regularizer is not None]
        if not regularized:
            return gradients
        with tf.GradientTape() as tape:
            penalty = tf.add_n([v.regularizer(v) for v in regularized])
        extra = dict(zip(map(id, regularized), tape.gradient(penalty, regularized), strict=True))
        return [g + extra[id(v)] if id(v) in extra else g for v, g in zip(self._trained, gradients, strict=True)]

    def _apply(self, gradients: list[tf.Tensor], state: list[tf.Tensor]) -> None:
        """Runs inside the replica step (traced)."""
        for variable, value in zip(self._updated, state, strict=True):
            variable.assign(value)
        self._optimizer.apply(gradients, self._trained)


def _is_float(variable: keras.Variable) -> bool:
    return keras.backend.is_float_dtype(variable.dtype)


def _is_reduced(variable: keras.Variable) -> bool:
    """Whether replicas can come to different values. The seeds of random layers move on alike everywhere."""
    counts = keras.backend.is_int_dtype(variable.dtype) and not variable.path.endswith("seed_generator_state")
    return _is_float(variable) or counts


def _contribution(variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
    """What this replica brings to the sum: a float's value, and by how much it counted an integer up."""
    return value if _is_float(variable) else tf.cast(value, tf.int64) - tf.cast(variable.value, tf.int64)


def _combined(variable: keras.Variable, total: tf.Tensor, replicas: tf.Tensor) -> tf.Tensor:
    """The mean of a float over the replicas that have rows; an integer has counted what all replicas saw."""
    if _is_float(variable):
        return total / tf.cast(replicas, variable.dtype)
    return tf.cast(tf.cast(variable.value, tf.int64) + total, variable.dtype)
