"""Local steps, then averaging: each replica trains by itself and, every k steps, all take their weighted mean.

    w ← Σ n·w / Σ n    over the replicas; for the weights, the optimizers' slots, what layers have written, and averages

n is what the replica's losses were divided by since the last time (the weight of its examples, or their number), so
that each example counts alike; for what layers write it is the number of examples. With SGD and k = 1 it is synchronous
training, to rounding. After Stich, Local SGD Converges Fast and Communicates Little (2019).
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.training import clock
from tfdist.training.chunk import width
from tfdist.training.loops import CLOCKS, TrainingLoop
from tfdist.training.reduction import sum_over_replicas
from tfdist.training.step import ADDED

__all__ = ["LocalSgdLoop"]

_TO_COLLECTIVE = 3
"""Marks from the end of a local step, through its first phases, to the collective of a merge."""


class LocalSgdLoop(TrainingLoop):
    """A loop over rounds of local steps. A round ends after `sync_every` steps, and with the chunk."""

    def _run(self, iterator: Any, steps: tf.Tensor, first: tf.Tensor) -> tuple[tf.Tensor, ...]:
        self.traces += 1
        every = self._step.settings.sync_every

        def body(
            i: tf.Tensor, done: tf.Tensor, go_on: tf.Tensor, series: tf.TensorArray, times: tf.TensorArray
        ) -> tuple[Any, ...]:
            n = tf.minimum(every, steps - i)
            own, seen, clocks = self._alone(iterator, n)
            self.phases.mark([own, seen], _TO_COLLECTIVE)
            rows = self._strategy.run(self._merge, args=(own, seen))
            rows = self._strategy.experimental_local_results(rows)[0]
            self.phases.mark(rows)
            with tf.control_dependencies([rows]):
                now = clock.now()
                last = tf.concat([clocks[n - 1 :, : CLOCKS - 2], [[now, now]]], 1)  # with the time of the merge
                clocks = tf.concat([clocks[: n - 1], last], 0)
            halted = rows[:, 2 * self._step.parts + 3] > 0
            stops = tf.reduce_any(halted)
            done += tf.where(stops, tf.argmax(halted, output_type=tf.int32) + 1, n)
            go_on = ~stops & (tf.reduce_max(rows[:, 2 * self._step.parts + 6]) <= 0)  # a whole round, then
            places = tf.range(i, i + n)
            return i + n, done, go_on, series.scatter(places, rows), times.scatter(places, clocks)

        series = tf.TensorArray(tf.float32, size=steps, element_shape=[width(self._step.parts)])
        times = tf.TensorArray(tf.float64, size=steps, element_shape=[CLOCKS])
        start = (tf.constant(0), tf.constant(0), tf.constant(True), series, times)
        _, done, _, series, times = tf.while_loop(lambda i, done, go_on, *_: (i < steps) & go_on, body, start)
        return done, series.stack(), times.stack()

    def _alone(self, iterator: Any, n: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Up to n steps of this replica: a row for each, what it has seen since the last averaging, and the times."""
        parts = self._step.parts

        def body(
            j: tf.Tensor, go_on: tf.Tensor, seen: tf.Tensor, own: tf.TensorArray, clocks: tf.TensorArray
        ) -> tuple[Any, ...]:
            result = self._step(lambda: next(iterator))
            flags = [tf.cast(value, tf.float32) for value in (result.penalty, result.skipped, result.halt)]
            entry = tf.concat([result.tally, result.rates, tf.stack(flags)], 0)
            applied = tf.cast(~result.halt & ~result.skipped, tf.float32)
            divisors = self._step.divisors(result.tally)
            stored = tf.cast(tf.reduce_any(divisors > 0), tf.float32)
            weights = tf.concat([divisors, [stored * result.rows]], 0)
            with tf.control_dependencies([entry]):
                now = clock.now()
                self._done.assign_add(1)
            times = tf.concat([result.times, [now]], 0)
            return j + 1, ~result.halt, seen + applied * weights, own.write(j, entry), clocks.write(j, times)

        length = self._step.local.layout.length + ADDED + parts + 3
        own = tf.TensorArray(tf.float32, size=n, element_shape=[length])
        clocks = tf.TensorArray(tf.float64, size=n, element_shape=[CLOCKS])
        start = (tf.constant(0), tf.constant(True), tf.zeros([parts + 1]), own, clocks)
        _, _, seen, own, clocks = tf.while_loop(lambda j, go_on, *_: (j < n) & go_on, body, start)
        return own.stack(), seen, clocks.stack()

    def _merge(self, own: tf.Tensor, seen: tf.Tensor) -> tf.Tensor:
        """Inside the replica step (traced): average what replicas hold; the chunk's rows of these steps."""
        context = tf.distribute.get_replica_context()
        kept = self._kept()
        floats = [(v, part) for v, part in kept if keras.backend.is_float_dtype(v.dtype)]
        counters = [v for v, _ in kept if keras.backend.is_int_dtype(v.dtype)]
        # In float64, so that values which are the same on all replicas come out as they are.
        mine = [tf.cast(v.value, tf.float64) * tf.cast(seen[part], tf.float64) for v, part in floats]
        *sums, own, total = sum_over_replicas([*mine, own, seen])
        for (v, part), weighted in zip(floats, sums, strict=True):
            mean = tf.cast(tf.math.divide_no_nan(weighted, tf.cast(total[part], tf.float64)), v.dtype)
            v.assign(tf.where(total[part] > 0, mean, tf.convert_to_tensor(v.value)))
        # A replica without rows has not counted; nobody counts less than that one.
        if counters:
            flat = tf.concat([tf.reshape(tf.cast(v.value, tf.int64), [-1]) for v in counters], 0)
            most = tf.reduce_max(context.all_gather(flat[None], axis=0), 0)
            sizes = [tf.size(v.value) for v in counters]
            for v, values in zip(counters, tf.split(most, sizes), strict=True):
                v.assign(tf.cast(tf.reshape(values, v.shape), v.dtype))
        return self._rows(own, context.num_replicas_in_sync)

    def _kept(self) -> list[tuple[keras.Variable, int]]:
        """What is averaged, with the part whose examples count for it; the last number stands for all examples."""
        step, parts = self._step, self._step.parts
        trained = list(zip(step.local.trained, step.local.part_of, strict=True))
        part_of = {id(v): part for v, part in trained}
        kept = trained + [(v, parts) for v in step.local.updated]
        kept += [(v, part) for part, o in enumerate(step.optimizers.values()) for v in o.variables]
        if step.averages is not None:
            kept += [(average, part_of[id(v)]) for v, average in step.averages.mapping if id(v) in part_of]
        return kept

    def _rows(self, own: tf.Tensor, replicas: int) -> tf.Tensor:
        """The rows of `chunk.row`, from the sums of all replicas' rows."""
        parts = self._step.parts
        tally, rates, flags = tf.split(own, [self._step.local.layout.length + ADDED, parts, 3], axis=1)
        told = self._step.told(tally)
        alone = tf.stack([flags[:, 0] / replicas, told.rows, flags[:, 1], flags[:, 2]], 1)
        return tf.concat([told.losses, rates / replicas, alone, told.suspects, told.leave[:, None], told.faults], 1)
