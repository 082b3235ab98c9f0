"""A replica's own part of a training step: sums over its rows, before anything goes to other replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.config import Settings
from tfdist.errors import UsageError
from tfdist.private_tf import with_autograph
from tfdist.training.data import row_count, with_a_row
from tfdist.training.gradients import Gradient, on_values
from tfdist.training.private_keras import count_rows, has_synchronized_layer, normalizations, rows_count
from tfdist.training.randomness import is_seed, seed_of_replica
from tfdist.training.replica import Replica
from tfdist.training.task import Task
from tfdist.training.weighting import FAULTS

__all__ = ["LocalStep", "Sums", "TallyLayout"]


@dataclasses.dataclass(frozen=True)
class TallyLayout:
    """Where the numbers of a step stand in the one vector that carries them: four for each part, then the common.

    Vectors of several steps may be stacked; axes before the last are kept.
    """

    parts: int

    @property
    def length(self) -> int:
        """Entries of the vector."""
        return 4 * self.parts + 3 + len(FAULTS)

    def of_parts(self, tally: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        """Σ weight·loss, Σ weight, number of losses and weighted penalty; one entry for each part."""
        numbers = tally[..., : 4 * self.parts]
        shape = tf.concat([tf.shape(numbers)[:-1], [self.parts, 4]], 0)
        return tuple(tf.unstack(tf.reshape(numbers, shape), num=4, axis=-1))

    def common(self, tally: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Rows, batches that had rows, and batches whose loss was not finite."""
        return tuple(tf.unstack(tally[..., 4 * self.parts : 4 * self.parts + 3], axis=-1))

    def faults(self, tally: tf.Tensor) -> tf.Tensor:
        """Counts of `FAULTS`."""
        return tally[..., 4 * self.parts + 3 :]


class Sums(NamedTuple):
    """What one batch, or several, amount to on a replica."""

    gradients: list[Gradient]
    """Of Σ weight·loss times the factor; for each variable of `LocalStep.trained`."""
    state: list[tf.Tensor]
    """What layers have made of each variable of `LocalStep.updated`."""
    tally: tf.Tensor
    """A vector as `TallyLayout` has it, float32."""


class LocalStep:
    """Calls the task's step in a Keras stateless scope, so that nothing is written."""

    def __init__(
        self,
        task: Task,
        model: keras.Model,
        parts: list[str],
        settings: Settings,
        *,
        pieces: int,
        most_rows: int | None = None,
    ) -> None:
        """Look at the model.

        Args:
            pieces: of a global batch, of which a call works on one.
            most_rows: what rows of sparse gradients are padded for, so that their number does not depend on the
                batch's; None: not at all.
        """
        self._pieces, self._most_rows = pieces, most_rows
        self._task = task
        self._model = model
        self._settings = settings
        self._parts = parts
        count_rows(model)
        self._shared = {
            id(v)
            for layer in normalizations(model)
            if layer.synchronized
            for v in (layer.moving_mean, layer.moving_variance)
        }  # what synchronized layers write: the same on all replicas, those without rows among them
        if settings.reproducible and has_synchronized_layer(model):
            raise UsageError(
                "reproducible=True does not go together with synchronized BatchNormalization: each virtual shard is "
                "normalized by itself. Use batch_norm='local'."
            )
        if settings.jit and has_synchronized_layer(model):
            raise UsageError(
                "jit=True does not go together with synchronized BatchNormalization: replicas talk to each other "
                "inside the model, which XLA cannot compile. Use batch_norm='local', or leave jit out."
            )
        self.layout = TallyLayout(len(parts))
        self.trained: list[keras.Variable] = []
        """Trainable variables that get a gradient, part by part; known once traced."""
        self.part_of: list[int] = []
        """The number of the part of each of them."""
        self.updated: list[keras.Variable] = []
        """Variables that layers write, likewise."""

    def start(self, replica: tf.Tensor) -> list[tf.Tensor]:
        """What a replica takes the variables of `updated` to be before a step. Inside the replica step."""
        return [seed_of_replica(v, replica) if is_seed(v) else tf.convert_to_tensor(v.value) for v in self.updated]

    def __call__(
        self, batch: Any, *, replica: tf.Tensor, place: tf.Tensor, factor: tf.Tensor | None, state: list[tf.Tensor]
    ) -> Sums:
        """Inside the replica step (traced).

        Args:
            replica: the number of the piece.
            place: a number to which that is added, so that no other piece and batch has it.
            factor: what the loss is multiplied by before it is differentiated.
            state: values of `updated` to begin with; empty: those of the variables.
        """
        rows = row_count(batch)
        place += tf.cast(replica, tf.int64)
        if self._pieces > 1:
            batch = with_a_row(batch)
        run = tf.function(self._run, jit_compile=True, autograph=False) if self._settings.jit else self._run
        gradients, after, tally = run(batch, rows, replica, place, factor, state)
        # An empty piece contributes zeros: it has NaN where a layer averages over no rows, or stands in for a row.
        present = rows > 0
        before = state or self.start(replica)
        return Sums(
            [_where(present, g) for g in gradients],
            # Seeds move on all the same, as on the other replicas, and what synchronized layers write is theirs.
            [
                new if is_seed(v) or id(v) in self._shared else tf.where(present, new, old)
                for v, new, old in zip(self.updated, after, before, strict=True)
            ],
            _where(present, tally),
        )

    def _run(
        self,
        batch: Any,
        rows: tf.Tensor,
        replica_id: tf.Tensor,
        place: tf.Tensor,
        factor: tf.Tensor | None,
        state: list[tf.Tensor],
    ) -> tuple[list[Gradient], list[tf.Tensor], tf.Tensor]:
        seeds = [v for v in self._model.variables if is_seed(v)]
        given = dict(zip(map(id, self.updated), state, strict=True)) if state else {}
        mapping = [(v, given.get(id(v), seed_of_replica(v, replica_id))) for v in seeds]
        mapping += [(v, given[id(v)]) for v in self.updated if id(v) in given and not is_seed(v)]
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            replica = Replica(
                self._model,
                rows,
                length=row_count(batch),
                replica_id=replica_id,
                seed=(self._settings.seed, place),
                factor=factor,
                penalties=scope.losses,
                parts=self._parts,
                by_weight=self._settings.loss_reduction == "weighted_mean",
            )
            with rows_count(rows > 0):
                _step_of(self._task)(replica, batch)
        self._note(replica, scope)
        gradients = [
            replica.parts[self._parts[part]].gradients[id(v)]
            for v, part in zip(self.trained, self.part_of, strict=True)
        ]
        gradients = [tf.zeros_like(v) if g is None else g for v, g in zip(self.trained, gradients, strict=True)]
        if self._settings.sparse == "dense":
            gradients = [tf.convert_to_tensor(g) for g in gradients]
        elif self._most_rows is not None:
            gradients = [_padded(g, row_count(batch), self._most_rows) for g in gradients]
        after = [scope.get_current_value(v) for v in self.updated]
        return gradients, after, self._tally(replica)

    def _note(self, replica: Replica, scope: keras.StatelessScope) -> None:
        """Note what the step works on, and refuse a step that leaves something out."""
        missing = [name for name in self._parts if name not in replica.parts]
        if missing:
            which = f" with name={missing[0]!r}" if len(self._parts) > 1 else ""
            raise UsageError(f"train_step did not call replica.loss(losses){which}. It makes the loss that is reduced.")
        order = {id(v): v for v in self._model.trainable_variables}
        pairs = [
            (variable, i)
            for i, name in enumerate(self._parts)
            for key, variable in order.items()
            if replica.parts[name].gradients.get(key) is not None
            or (key in replica.parts[name].gradients and variable.regularizer is not None)
        ]
        without = set(range(len(self._parts))) - {i for _, i in pairs}
        if without:
            which = f" for {self._parts[min(without)]!r}" if len(self._parts) > 1 else ""
            raise UsageError(
                f"train_step gave no gradient{which}. Compute the loss under the tape from the model's output, and "
                "call replica.apply_gradients."
            )
        self.trained, self.part_of = [v for v, _ in pairs], [i for _, i in pairs]
        self.updated = [v for v in self._model.variables if scope.get_current_value(v) is not None]
        if len(self.updated) < len(scope.state_mapping):
            raise UsageError(
                "train_step wrote to a Keras variable that is not in model.variables (a metric, the global seed of "
                "keras.random, or the state of a stateful layer). Give random layers their own "
                "keras.random.SeedGenerator, draw with replica.seed(), use Task.metrics, and no stateful=True."
            )

    def _tally(self, replica: Replica) -> tf.Tensor:
        parts = [replica.parts[name] for name in self._parts]
        bad = tf.reduce_any(tf.stack([~tf.math.is_finite(part.loss) for part in parts]))
        numbers = [value for part in parts for value in (part.loss, part.weight, part.count, part.penalty)]
        numbers += [replica.rows, tf.constant(1.0), bad]
        return tf.concat([tf.stack([tf.cast(value, tf.float32) for value in numbers]), replica.faults], 0)


def _step_of(task: Task) -> Callable[[Replica, Any], None]:
    own = type(task).train_step is not Task.train_step
    return with_autograph(task.train_step) if own else task.train_step


def _where(present: tf.Tensor, gradient: Gradient) -> Gradient:
    return on_values(gradient, lambda values: tf.where(present, values, tf.zeros_like(values)))


def _padded(gradient: Gradient, rows: tf.Tensor, most_rows: int) -> Gradient:
    """A sparse gradient with as many slices as `most_rows` examples have; the added ones are zeros."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    slices = tf.shape(gradient.indices)[0]
    missing = slices // rows * most_rows - slices
    shape = tf.concat([[missing], tf.shape(gradient.values)[1:]], 0)
    values = tf.concat([gradient.values, tf.zeros(shape, gradient.values.dtype)], 0)
    indices = tf.concat([gradient.indices, tf.zeros([missing], gradient.indices.dtype)], 0)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)
