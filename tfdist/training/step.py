"""One training step: local sums over one or several global batches, one reduction over the replicas, one update.

    batch piece ─> local sums of gradients, loss, weight ─> sum over replicas ─> divide, penalty, clip ─> apply or skip
                   (local.py, Task.train_step)             (reduction.py)       (the same on every replica)

The model is called in a Keras stateless scope: what layers write (BatchNorm's moving statistics, say) comes out as
values instead of being assigned, travels with the gradients, and is averaged over the replicas before it is stored. So
every replica holds the same state after every step, and a checkpoint does not depend on who wrote it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.config import Settings
from tfdist.training.accumulation import Accumulators
from tfdist.training.averages import Averages
from tfdist.training.clipping import clipped
from tfdist.training.exchange import Combine, Exchange
from tfdist.training.gradients import Gradient, is_sparse, on_values
from tfdist.training.local import LocalStep, Sums
from tfdist.training.loss_scale import LossScale
from tfdist.training.phases import Phases
from tfdist.training.private_keras import without_second_reduction
from tfdist.training.replica import ONLY
from tfdist.training.shards import for_each_shard
from tfdist.training.state import combined, contributions
from tfdist.training.task import Task
from tfdist.training.trace import row, see, see_batch

__all__ = ["ADDED", "StepResult", "TrainingStep"]

ADDED = 4
"""Numbers that a tally has behind those of its layout, in the sum over replicas: how many had rows, how many had a loss
that was not finite, the sum of the latter's ids, and the sum of requests to leave."""


_TO_NEXT_INPUT, _TO_COLLECTIVE = 3, 2
"""Marks of a step that adds up several batches: computing ─> waiting for input, and that ─> in the collective."""


class StepResult(NamedTuple):
    """What one step tells; tensors that are equal on every replica."""

    losses: tf.Tensor
    """Σ weight·loss / Σ weight (or number of losses) over all replicas, without penalties; one entry for each part."""
    penalty: tf.Tensor
    """What regularizers and layers added to the loss."""
    rates: tf.Tensor
    """Learning rate of each part."""
    rows: tf.Tensor
    """Examples of the global batch or batches."""
    finite: tf.Tensor
    """Whether loss and gradients are finite."""
    skipped: tf.Tensor
    """Whether the step was left out, since it was not finite."""
    halt: tf.Tensor
    """Whether training cannot go on; nothing was applied."""
    suspects: tf.Tensor
    """How many replicas had a loss that was not finite, and the sum of their ids."""
    faults: tf.Tensor
    """Counts of `weighting.FAULTS` over all replicas."""
    leave: tf.Tensor
    """The sum of what replicas were asked (see `leaving.py`); training stops after this step where it is not 0."""
    tally: tf.Tensor
    """The sums that losses, rows, suspects, faults and leave were told from (see `TrainingStep.told`)."""
    seen: list[tf.Tensor]
    """What it has worked on, as `trace.FIELDS` has it; empty where that is not asked for."""
    times: tf.Tensor
    """When it began, had its input, its gradients and the sums over all replicas; 0 where no marks are passed."""


class Told(NamedTuple):
    """What a tally tells, with the meanings of `StepResult`."""

    losses: tf.Tensor
    rows: tf.Tensor
    suspects: tf.Tensor
    faults: tf.Tensor
    leave: tf.Tensor


class _Reduced(NamedTuple):
    gradients: list[Gradient]
    state: list[tf.Tensor]
    penalty: tf.Tensor
    finite: tf.Tensor
    has_weight: tf.Tensor
    tally: tf.Tensor


class TrainingStep:
    """Calls a task's step on every replica and applies what comes out."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        task: Task,
        model: keras.Model,
        optimizers: dict[str, keras.optimizers.Optimizer] | keras.optimizers.Optimizer,
        settings: Settings | None = None,
        *,
        global_batch_size: int = 1,
        averages: Averages | None = None,
        adasum: Combine | None = None,
        fixed_shapes: bool = False,
        one_copy: bool = False,
        leave: tf.Variable | None = None,
        phases: Phases | None = None,
        traced: Callable[[], list[Any]] | None = None,
    ) -> None:
        """Make the step's own variables; nothing is traced yet.

        Args:
            optimizers: one, or one for each part of the task by name.
            averages: of the weights, to be updated with them.
            adasum: combines gradients of all replicas, where the settings ask for it.
            fixed_shapes: whether a collective must have the same shapes in every step.
            one_copy: whether the strategy's variables have one value for all replicas.
            leave: this process's request to leave; None where no step can read it.
            phases: whose marks it passes; None: none.
            traced: the variables of which each step's `StepResult.seen` tells; None: it tells nothing.
        """
        self._traced = traced
        self.phases = phases or Phases(compiled=False)
        self._one_copy = one_copy
        self._leave = leave
        self._strategy = strategy
        self._model = model
        self.optimizers = optimizers if isinstance(optimizers, dict) else {ONLY: optimizers}
        self.settings = settings or Settings()
        self.averages = averages
        replicas, shards = strategy.num_replicas_in_sync, self.settings.shards
        self._pieces = shards or replicas
        self._shards = None if shards is None else shards // replicas
        most_rows = -(-global_batch_size // replicas) if fixed_shapes else None
        self.local = LocalStep(
            task, model, list(self.optimizers), self.settings, pieces=self._pieces, most_rows=most_rows
        )
        self._exchange = Exchange(self.settings, self.local.layout, adasum, fixed_shapes=fixed_shapes)
        self._accumulators: Accumulators | None = None
        self.scale = LossScale(self.settings)
        # A sum over rows is as many times larger than a mean; a power of two changes no digit of a number.
        batch = global_batch_size * self.settings.accumulate
        self._spread = 2.0 ** -math.ceil(math.log2(batch)) if self.scale.dynamic else 1.0
        with tf.init_scope(), tf.device("CPU:0"):
            self._batches = tf.Variable(0, dtype=tf.int64, trainable=False, name="batches")

    @property
    def parts(self) -> int:
        """How many optimizers there are."""
        return len(self.optimizers)

    @property
    def own_variables(self) -> list[tf.Variable]:
        """What a run must keep to go on, beside the variables of model and optimizers and averages."""
        return [self._batches, *self.scale.variables]

    @property
    def variables(self) -> list[tf.Variable]:
        """Those, and the averages."""
        return [*self.own_variables, *([] if self.averages is None else self.averages.variables)]

    def prepare(self, next_batch: Callable[[], Any]) -> None:
        """Make room for gradients that add up, if there is any accumulation; before the step is traced."""
        if self.settings.accumulate > 1:
            # What a step works on is known once it is traced, so it is traced once to be looked at.
            look = tf.function(lambda: self._strategy.run(self._look, args=(next_batch(),)), autograph=False)
            look.get_concrete_function()
            self._accumulators = Accumulators(self._strategy, self.local, one_copy=self._one_copy, shards=self._shards)

    def __call__(
        self, next_batch: Callable[[], Any], batches: Any = 1, *, place: tf.Tensor | None = None
    ) -> StepResult:
        """Runs on every process, outside of a replica (traced).

        Args:
            next_batch: gives each local replica's piece of the next global batch.
            batches: how many of them make this step; up to `accumulate`.
            place: a number that no other global batch has, int64; None: counted here.
        """
        rates = tf.stack([tf.cast(o.learning_rate, tf.float32) for o in self.optimizers.values()])
        factor = self.scale.value * self._spread if self.scale.dynamic else None
        begun = self.phases.mark([])
        if self._accumulators is None:
            place = self._next_place() if place is None else place * self._pieces
            batch = next_batch()
            came = self.phases.mark(batch)
            sums = self._strategy.run(self._local_sums, args=(batch, place, factor))
            computed = self.phases.mark(sums)
        else:
            sums, came, computed = self._sums_of_several(next_batch, batches, factor, begun)
            batch = None
        reduced = self._strategy.run(self._over_replicas, args=(sums, factor))
        times = tf.stack([begun, came, computed, self.phases.mark(reduced)])
        # The same on all replicas; gradients and state stay where they are.
        gradients = reduced.gradients
        reduced = reduced._replace(**{name: self._first(getattr(reduced, name)) for name in _Reduced._fields[2:]})
        finite, policy = reduced.finite, self.settings.nan_policy
        good_rate = tf.reduce_all(tf.math.is_finite(rates) & (rates >= 0))
        overflow = self.scale.overflowed(finite)
        told = self.told(reduced.tally)
        wrong = ~good_rate | tf.reduce_any(told.faults > 0)
        halt = wrong | (~finite & ~overflow if policy == "stop" else tf.constant(False))
        skipped = ~halt & (overflow | (~finite if policy == "skip" else tf.constant(False)))

        self._update(reduced, ~halt & ~skipped)
        self.scale.update(finite, tf.reduce_any(reduced.has_weight))
        seen = [] if self._traced is None else self._seen(self._traced, batch, sums, gradients)
        return StepResult(
            seen=seen,
            **told._asdict(),
            penalty=reduced.penalty,
            rates=rates,
            finite=finite,
            skipped=skipped,
            halt=halt,
            tally=reduced.tally,
            times=times,
        )

    def _seen(self, traced: Callable[[], list[Any]], batch: Any, sums: Sums, gradients: Any) -> list[tf.Tensor]:
        run = self._strategy.run
        if batch is None:  # several, of which none is kept
            rows = run(lambda: tf.constant(0, tf.int64))
        else:
            rows = run(see_batch, args=(batch if self._shards is None else batch[0],))
        local = run(lambda sums: see(sums.gradients, self._shards), args=(sums,))
        return row(self._strategy, rows, local, run(see, args=(gradients,)), traced)

    def told(self, tally: tf.Tensor) -> Told:
        """What the sums of some replicas' tallies tell; shape `[…, numbers]`, with further axes before it kept."""
        layout = self.local.layout
        losses, _, _, _ = layout.of_parts(tally)
        return Told(
            losses=tf.math.divide_no_nan(losses, self._exchange.divisors(tally)),
            rows=layout.common(tally)[0],
            suspects=tally[..., -3:-1],
            faults=layout.faults(tally[..., :-ADDED]),
            leave=tally[..., -1],
        )

    def divisors(self, tally: tf.Tensor) -> tf.Tensor:
        """What the losses of each part are divided by: the weight of the examples, or their number."""
        return self._exchange.divisors(tally)

    def _update(self, reduced: _Reduced, go: tf.Tensor) -> None:
        """Apply what has weight, in the order of the parts. Outside of a replica."""
        any_weight = tf.reduce_any(reduced.has_weight)

        def run(function: Callable[..., None], *args: Any) -> tf.Tensor:
            with contextlib.ExitStack() as stack:
                for optimizer in self.optimizers.values():
                    stack.enter_context(without_second_reduction(optimizer))
                self._strategy.run(function, args=args)
            return tf.constant(True)

        def nothing() -> tf.Tensor:
            return tf.constant(False)

        if self.parts == 1:  # one branch costs less than three
            tf.cond(go & any_weight, lambda: run(self._apply, reduced.gradients, reduced.state), nothing)
            return
        tf.cond(go & any_weight, lambda: run(self._store, reduced.state), nothing)
        for part in range(self.parts):
            step = functools.partial(self._apply_part, part)
            tf.cond(go & reduced.has_weight[part], functools.partial(run, step, reduced.gradients), nothing)
        if self.averages is not None:
            tf.cond(go & any_weight, lambda: run(self._average), nothing)

    def _first(self, value: Any) -> Any:
        return self._strategy.experimental_local_results(value)[0]

    def _next_place(self) -> tf.Tensor:
        """A number for a global batch that leaves room for all of its pieces."""
        place = self._batches.read_value() * self._pieces
        self._batches.assign_add(1)
        return place

    def _sums(self, batch: Any, place: tf.Tensor, factor: tf.Tensor | None, state: list[tf.Tensor]) -> Sums:
        """Inside the replica step (traced)."""
        replica = _replica_id()
        if self._shards is None:
            return self.local(batch, replica=replica, place=place, factor=factor, state=state)
        first = replica * self._shards

        def one(shard: tf.Tensor, rows: Any) -> tuple[Any, ...]:
            own = [value[shard] for value in state]
            return tuple(self.local(rows, replica=first + shard, place=place, factor=factor, state=own))

        return Sums(*for_each_shard(one, *batch))

    def _start(self) -> list[tf.Tensor]:
        """What the variables that layers write are before a step. Inside the replica step (traced)."""
        replica = _replica_id()
        if self._shards is None:
            return self.local.start(replica)
        starts = [self.local.start(replica * self._shards + shard) for shard in range(self._shards)]
        return [tf.stack(values) for values in zip(*starts, strict=True)]

    def _look(self, batch: Any) -> tf.Tensor:
        factor = tf.constant(1.0) if self.scale.dynamic else None
        return self._sums(batch, tf.constant(0, tf.int64), factor, []).tally

    def _local_sums(self, batch: Any, place: tf.Tensor, factor: tf.Tensor | None) -> Sums:
        """Inside the replica step (traced)."""
        return self._sums(batch, place, factor, [])

    def _sums_of_several(
        self, next_batch: Callable[[], Any], batches: Any, factor: tf.Tensor | None, begun: tf.Tensor
    ) -> tuple[Sums, tf.Tensor, tf.Tensor]:
        """Add up several global batches on each replica.

        Returns:
            Each replica's sums, the time at which the input had come, had it come all at once, and that of the end.
        """
        accumulators = self._accumulators
        assert accumulators is not None

        def add(batch: Any, place: tf.Tensor) -> Sums:
            sums = self._sums(batch, place, factor, accumulators.state())
            accumulators.add(sums)
            return sums

        def body(i: tf.Tensor, came: tf.Tensor, computed: tf.Tensor) -> tuple[tf.Tensor, ...]:
            place = self._next_place()
            batch = next_batch()
            waited = self.phases.mark(batch) - computed
            sums = self._strategy.run(add, args=(batch, place))
            return i + 1, came + waited, self.phases.mark(sums, _TO_NEXT_INPUT)

        self._strategy.run(lambda: accumulators.reset(self._start()))
        _, came, computed = tf.while_loop(lambda i, *_: i < batches, body, (tf.constant(0), begun, begun))
        self.phases.mark([computed], _TO_COLLECTIVE)
        return self._strategy.run(accumulators.sums), came, computed

    def _over_replicas(self, sums: Sums, factor: tf.Tensor | None) -> _Reduced:
        """Inside the replica step (traced): the sums of all replicas, and what follows from them."""
        layout, replica = self.local.layout, tf.cast(_replica_id(), tf.float32)
        _, present, bad = layout.common(sums.tally)
        present, bad = tf.minimum(present, 1.0), tf.minimum(tf.reduce_max(bad), 1.0)
        leave = tf.constant(0.0) if self._leave is None else self._leave.read_value()
        # What is the replica's stands in its first shard.
        alone = [value if self._shards is None else value * tf.one_hot(0, self._shards) for value in (bad, leave)]
        added = tf.stack([present, alone[0], alone[0] * replica, alone[1]], -1)
        own = tf.concat([sums.tally, added], -1)
        gradients, state, tally = self._exchange(
            sums.gradients, contributions(self.local.updated, sums.state, present > 0), own, self.local.part_of
        )

        losses, weights, _, penalties = layout.of_parts(tally)
        divisors = self._exchange.divisors(tally)
        present = tally[-ADDED]
        if factor is not None:
            gradients = [_times(g, 1.0 / factor) for g in gradients]
        penalty, gradients = self._with_penalty(gradients)
        # Also after clipping: a norm may overflow where no element does.
        final = self._clipped(gradients)
        values = [g.values if is_sparse(g) else g for g in (*gradients, *final)]
        finite = tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(value)) for value in (losses, *values)]))
        values_of_one = sums.state if self._shards is None else [value[0] for value in sums.state]
        return _Reduced(
            gradients=final,
            state=combined(self.local.updated, values_of_one, state, present),
            penalty=penalty + tf.reduce_sum(tf.math.divide_no_nan(penalties, divisors)),
            finite=finite,
            # A replica by itself also counts examples of weight 0 where their number is what divides.
            has_weight=(weights if self.settings.sync_every is None else divisors) > 0,
            tally=tally,
        )

    def _with_penalty(self, gradients: list[Gradient]) -> tuple[tf.Tensor, list[Gradient]]:
        """The layers' regularizers, and the gradients with theirs, the same on every replica."""
        regularized = [v for v in self.local.trained if v.regularizer is not None]
        if not regularized:
            return tf.constant(0.0), gradients
        with tf.GradientTape() as tape:
            penalty = tf.add_n([tf.cast(v.regularizer(v), tf.float32) for v in regularized])
        extra = dict(zip(map(id, regularized), tape.gradient(penalty, regularized), strict=True))
        with_extra = [
            tf.convert_to_tensor(g) + tf.cast(extra[id(v)], g.dtype) if id(v) in extra else g
            for v, g in zip(self.local.trained, gradients, strict=True)
        ]
        return penalty, with_extra

    def _clipped(self, gradients: list[Gradient]) -> list[Gradient]:
        """Each part by itself."""
        result: list[Gradient] = []
        for part in range(len(self.optimizers)):
            own = [g for g, of in zip(gradients, self.local.part_of, strict=True) if of == part]
            result += clipped(own, self.settings)
        return result

    def _apply(self, gradients: list[Gradient], state: list[tf.Tensor]) -> None:
        """Inside the replica step (traced), as what it calls."""
        self._store(state)
        for part in range(self.parts):
            self._apply_part(part, gradients)
        self._average()

    def _store(self, state: list[tf.Tensor]) -> None:
        for variable, value in zip(self.local.updated, state, strict=True):
            variable.assign(value)

    def _apply_part(self, part: int, gradients: list[Gradient]) -> None:
        own = [i for i, of in enumerate(self.local.part_of) if of == part]
        optimizer = list(self.optimizers.values())[part]
        optimizer.apply([gradients[i] for i in own], [self.local.trained[i] for i in own])

    def _average(self) -> None:
        if self.averages is not None:
            updates = [tf.cast(optimizer.iterations, tf.int64) for optimizer in self.optimizers.values()]
            self.averages.update(tf.reduce_max(tf.stack(updates)))


def _replica_id() -> tf.Tensor:
    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int32)


def _times(gradient: Gradient, factor: tf.Tensor) -> Gradient:
    return on_values(gradient, lambda values: values * tf.cast(factor, values.dtype))
