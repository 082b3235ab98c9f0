"""Chunks of steps inside one compiled function: the loops that run between two moments of attention.

A chunk runs up to n steps without coming back to Python. Only at its end does the trainer log, evaluate or save.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.training.data import row_count, with_a_row
from tfdist.training.metrics import MetricTotals
from tfdist.training.reduction import sum_over_replicas
from tfdist.training.step import TrainingStep
from tfdist.training.task import Task, unpack

__all__ = ["Chunk", "EvaluationLoop", "TrainingLoop"]


class Chunk(NamedTuple):
    """What a chunk of steps tells; arrays have one entry for each step that was done."""

    losses: np.ndarray
    rows: np.ndarray
    seconds: np.ndarray
    finite: bool
    """Whether the last step was; a step that is not ends the chunk and changes nothing."""
    suspects: tuple[int, int]
    """Of the last step: how many replicas had a loss that was not finite, and the sum of their ids."""


class TrainingLoop:
    """Runs a training step n times. Every process calls it alike.

    It is traced when it is created, so that errors of the task show before the first step.
    """

    def __init__(self, strategy: tf.distribute.Strategy, step: TrainingStep, iterator: Any) -> None:
        self._step = step
        self.traces = 0
        """How often the loop was traced."""
        # Which step a failing chunk had reached can only be read from outside through a variable; not in the scope,
        # so that it is this process's own.
        with tf.device("CPU:0"):
            self._done = tf.Variable(0, dtype=tf.int64, trainable=False)
        # One concrete function: an argument that would need another trace is an error, not a slow step.
        with strategy.scope():
            self._compiled = tf.function(self._run).get_concrete_function(iterator, tf.constant(1))

    def run(self, iterator: Any, steps: int) -> Chunk:
        """Do `steps` steps, or fewer where one is not finite. `iterator` is like the one that it was built with."""
        start = float(tf.timestamp())
        done, losses, rows, times, finite, suspects = self._compiled(iterator, tf.constant(steps))
        n = int(done)
        return Chunk(
            losses=losses.numpy()[:n],
            rows=rows.numpy()[:n].astype(np.int64),
            seconds=np.diff(times.numpy()[:n], prepend=start),
            finite=bool(finite),
            suspects=(int(suspects[0]), int(suspects[1])),
        )

    def steps_done(self) -> int:
        """Steps that the present chunk has completed, also when it has failed."""
        return int(self._done)

    def forget(self) -> None:
        """The chunk's steps are accounted for."""
        self._done.assign(0)

    def _run(self, iterator: Any, steps: tf.Tensor) -> tuple[tf.Tensor, ...]:
        self.traces += 1

        def body(i: tf.Tensor, finite: tf.Tensor, suspects: tf.Tensor, *series: tf.TensorArray) -> tuple[Any, ...]:
            losses, rows, times = series
            result = self._step(next(iterator))
            with tf.control_dependencies([result.loss]):
                now = tf.timestamp()
                self._done.assign_add(1)
            return (
                i + 1,
                result.finite,
                result.suspects,
                losses.write(i, result.loss),
                rows.write(i, result.rows),
                times.write(i, now),
            )

        series = [tf.TensorArray(dtype, size=steps) for dtype in (tf.float32, tf.float32, tf.float64)]
        i, finite, suspects, *series = tf.while_loop(
            lambda i, finite, *_: (i < steps) & finite,
            body,
            (tf.constant(0), tf.constant(True), tf.zeros([2]), *series),
        )
        return (i, *(array.stack() for array in series), finite, suspects)


class EvaluationLoop:
    """Runs the model over one split and reduces the state of its metrics. Every process calls it alike.

    It is traced when it is created.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        task: Task,
        model: keras.Model,
        metrics: MetricTotals,
        iterator: Any,
    ) -> None:
        self._strategy = strategy
        self._task = task
        self._model = model
        self._metrics = metrics
        self.metrics = metrics.describe()
        """What is measured: each metric's name and the shapes of its state."""
        self.traces = 0
        """How often the loop was traced."""
        with strategy.scope():
            self._compiled = tf.function(self._run).get_concrete_function(iterator, tf.constant(1))

    def run(self, iterator: Any, steps: int) -> dict[str, float]:
        """Evaluate `steps` global batches.

        Returns:
            `loss` (weighted mean over all examples) and each metric by its name.
        """
        return self._metrics.results([total.numpy() for total in self._compiled(iterator, tf.constant(steps))])

    def _run(self, iterator: Any, steps: tf.Tensor) -> list[tf.Tensor]:
        self.traces += 1

        def body(i: tf.Tensor, *totals: tf.Tensor) -> tuple[tf.Tensor, ...]:
            added = self._strategy.run(self._add, args=(next(iterator),))
            local = [self._strategy.experimental_local_results(value)[0] for value in added]
            return (i + 1, *(total + tf.cast(value, total.dtype) for total, value in zip(totals, local, strict=True)))

        _, *totals = tf.while_loop(lambda i, *_: i < steps, body, (tf.constant(0), *self._metrics.zeros()))
        return totals

    def _add(self, batch: Any) -> list[tf.Tensor]:
        """Runs inside the replica step (traced): what this global batch adds to the totals."""
        present = row_count(batch) > 0
        if self._strategy.num_replicas_in_sync > 1:
            batch = with_a_row(batch)
        inputs, labels, weights = unpack(batch)
        with keras.StatelessScope():
            predictions = self._model(inputs, training=False)
            losses = self._task.losses(labels, predictions)
        added = self._metrics.added(labels, predictions, losses, weights)
        return sum_over_replicas([tf.where(present, value, tf.zeros_like(value)) for value in added])
