"""Chunks of steps inside one compiled function: the loops that run between two moments of attention.

A chunk runs up to n steps without coming back to Python. Only at its end does the trainer log, evaluate or save.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.cluster.channel import shared
from tfdist.errors import UsageError
from tfdist.private_tf import with_autograph
from tfdist.training import clock
from tfdist.training.chunk import Chunk, columns, row, width
from tfdist.training.data import row_count, with_a_row
from tfdist.training.metrics import MetricTotals
from tfdist.training.phases import EVALUATING, Phases
from tfdist.training.private_keras import mask_of
from tfdist.training.randomness import OF_A_STEP, refuse_stateful
from tfdist.training.reduction import sum_over_replicas
from tfdist.training.shards import for_each_shard, sum_in_a_tree
from tfdist.training.step import TrainingStep
from tfdist.training.task import Task, in_float32, unpack
from tfdist.training.trace import FIELDS, Trace
from tfdist.training.weighting import FAULTS, fault_of, per_value

__all__ = ["CLOCKS", "EvaluationLoop", "TrainingLoop"]

CLOCKS = 5
"""Times that a loop takes for each step: those of its marks, and of its end."""


class TrainingLoop:
    """Runs a training step n times. Every process calls it alike.

    It is traced when it is created, so that errors of the task show before the first step.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        step: TrainingStep,
        iterator: Any,
        *,
        accumulate: int = 1,
        batches_per_epoch: int | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._strategy, self._trace = strategy, trace
        self._step = step
        self.phases = step.phases
        """Where this process is."""
        self._accumulate = accumulate
        self._batches_per_epoch = batches_per_epoch
        self.traces = 0
        """How often the loop was traced."""
        # Which step a failing chunk had reached can only be read from outside through a variable; not in the scope,
        # so that it is this process's own.
        with tf.device("CPU:0"):
            self._done = tf.Variable(0, dtype=tf.int64, trainable=False)
        # One concrete function: an argument that would need another trace is an error, not a slow step.
        step.prepare(lambda: next(iterator))
        with strategy.scope():
            start = tf.constant(0, tf.int64)
            run = tf.function(self._run, autograph=False)
            self._compiled = run.get_concrete_function(iterator, tf.constant(1), start)
        refuse_stateful(self._compiled.graph, *OF_A_STEP)

    def run(self, iterator: Any, steps: int, first: int = 0, ahead: int = 0) -> Chunk:
        """Do `steps` steps, or fewer where training cannot go on. `iterator` is like the one that it was built with.

        Args:
            first: steps of the run before these.
            ahead: steps that will follow, whatever comes of these; a loop that can may begin with them.
        """
        start = time.time()
        with self.phases.at(None):
            done, series, times, *seen = self._compiled(iterator, tf.constant(steps), tf.constant(first, tf.int64))
            n = int(done)
        if self._trace is not None:
            self._trace.add([part[:n] for part in seen])
        marks, ends = np.split(times.numpy()[:n], [-1], axis=1)
        self.phases.account(marks)
        if self.phases.first_step_ended is None and n:
            self.phases.first_step_ended = float(ends[0, 0])
        return columns(series.numpy()[:n], np.diff(ends[:, 0], prepend=start), self._step.parts)

    variables: tuple[tf.Variable, ...] = ()
    """What a run must keep to go on, beside the step's variables."""

    def steps_done(self) -> int:
        """Steps that the present chunk has completed, also when it has failed."""
        return int(self._done)

    def forget(self) -> None:
        """The chunk's steps are accounted for."""
        self._done.assign(0)

    def _batches(self, step: tf.Tensor) -> tf.Tensor:
        """Global batches of a step: the last one of an epoch has what is left."""
        most = self._accumulate
        if most == 1 or self._batches_per_epoch is None:
            return tf.constant(most)
        steps_per_epoch = -(-self._batches_per_epoch // most)
        left = self._batches_per_epoch - step % steps_per_epoch * most
        return tf.cast(tf.minimum(left, most), tf.int32)

    def _run(self, iterator: Any, steps: tf.Tensor, first: tf.Tensor) -> tuple[tf.Tensor, ...]:
        self.traces += 1

        def body(
            i: tf.Tensor, go_on: tf.Tensor, series: tf.TensorArray, times: tf.TensorArray, *seen: tf.TensorArray
        ) -> tuple[Any, ...]:
            result = self._step(lambda: next(iterator), self._batches(first + tf.cast(i, tf.int64)))
            entry = row(result)
            with tf.control_dependencies([entry]):
                now = clock.now()
                self._done.assign_add(1)
            clocks = tf.concat([result.times, [now]], 0)
            go_on = ~result.halt & (result.leave <= 0)
            told = [array.write(i, part) for array, part in zip(seen, result.seen, strict=True)]
            return i + 1, go_on, series.write(i, entry), times.write(i, clocks), *told

        series = tf.TensorArray(tf.float32, size=steps, element_shape=[width(self._step.parts)])
        times = tf.TensorArray(tf.float64, size=steps, element_shape=[CLOCKS])
        seen = [] if self._trace is None else [tf.TensorArray(dtype, size=steps) for dtype in FIELDS.values()]
        start = (tf.constant(0), tf.constant(True), series, times, *seen)
        i, _, *arrays = tf.while_loop(lambda i, go_on, *_: (i < steps) & go_on, body, start)
        return i, *(array.stack() for array in arrays)


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
        *,
        values: Sequence[tuple[keras.Variable, Any]] = (),
        phases: Phases | None = None,
        shards: int | None = None,
    ) -> None:
        """Trace the loop.

        Args:
            shards: virtual shards of a global batch, with whose ends the iterator's pieces then come.
            phases: whose marks it passes; None: none.
            values: variables of the model, each with what stands in for it.
        """
        self._phases, self._shards = phases or Phases(compiled=False), shards
        self._values = list(values)
        self._strategy = strategy
        self._task = task
        self._model = model
        self._metrics = metrics
        self.metrics = metrics.describe()
        """What is measured: each metric's name and the shapes of its state."""
        self.nothing = metrics.results(metrics.no_totals())
        """The results over no examples: their names and kinds."""
        self.traces = 0
        """How often the loop was traced."""
        with strategy.scope():
            run = tf.function(self._run, autograph=False)
            self._compiled = run.get_concrete_function(iterator, tf.constant(1))

    def run(self, iterator: Any, steps: int) -> dict[str, float]:
        """Evaluate `steps` global batches.

        Returns:
            `loss` (weighted mean over all examples) and each metric by its name.
        """
        with self._phases.at(EVALUATING):
            *totals, faults = (total.numpy() for total in self._compiled(iterator, tf.constant(steps)))
        fault = fault_of(faults)
        if fault:
            raise shared(UsageError(f"in evaluation: {fault}."))
        return self._metrics.results(totals)

    def _run(self, iterator: Any, steps: tf.Tensor) -> list[tf.Tensor]:
        self.traces += 1

        def body(i: tf.Tensor, *totals: tf.Tensor) -> tuple[tf.Tensor, ...]:
            self._phases.mark([])
            batch = next(iterator)
            self._phases.mark(batch)
            own = self._strategy.run(self._add, args=(batch,))
            self._phases.mark(own)
            added = self._strategy.run(sum_over_replicas if self._shards is None else sum_in_a_tree, args=(own,))
            self._phases.mark(added)
            local = [self._strategy.experimental_local_results(value)[0] for value in added]
            return (i + 1, *(total + tf.cast(value, total.dtype) for total, value in zip(totals, local, strict=True)))

        start = (tf.constant(0), *self._metrics.zeros(), tf.zeros([len(FAULTS)]))
        return tf.while_loop(lambda i, *_: i < steps, body, start)[1:]

    def _add(self, batch: Any) -> list[tf.Tensor]:
        """Runs inside the replica step (traced): what this replica's piece adds to the totals."""
        return (
            self._of_piece(batch)
            if self._shards is None
            else for_each_shard(lambda _, rows: self._of_piece(rows), *batch)
        )

    def _of_piece(self, batch: Any) -> list[tf.Tensor]:
        present = row_count(batch) > 0
        if (self._shards or self._strategy.num_replicas_in_sync) > 1:
            batch = with_a_row(batch)
        inputs, labels, weights = unpack(batch)
        with keras.StatelessScope(self._values):
            outputs = self._model(inputs, training=False)
            predictions, mask = in_float32(outputs), mask_of(outputs)
            losses = with_autograph(self._task.losses)(labels, predictions)
        plain = weights is None and (mask is None or len(mask.shape) != len(losses.shape))
        losses, weights, faults = per_value(losses, weights, mask, row_count(batch))
        added = self._metrics.added(labels, predictions, losses, weights, None if plain else weights)
        added.append(faults)
        return [tf.where(present, value, tf.zeros_like(value)) for value in added]
