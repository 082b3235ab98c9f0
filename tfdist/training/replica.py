"""What a training step sees of its replica: the model, a loss that may be differentiated, a place for gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.training.weighting import FAULTS, per_value

__all__ = ["ONLY", "Part", "Replica"]

ONLY = "optimizer"
"""The name of the part of a task that has one optimizer."""


@dataclasses.dataclass
class Part:
    """What a replica gives for one optimizer."""

    loss: tf.Tensor
    """Σ weight·loss over this replica's rows."""
    weight: tf.Tensor
    """Σ weight."""
    count: tf.Tensor
    """Number of losses."""
    penalty: tf.Tensor
    """What layers have added with add_loss, a mean over the rows, times the divisor of the loss."""
    gradients: dict[int, Any] = dataclasses.field(default_factory=dict)


class Replica:
    """One replica while its step is traced. `Task.train_step` gets it; nothing of it outlives the step."""

    def __init__(
        self,
        model: keras.Model,
        rows: tf.Tensor,
        *,
        length: tf.Tensor,
        replica_id: tf.Tensor,
        seed: tuple[int, tf.Tensor],
        factor: tf.Tensor | None = None,
        penalties: list[tf.Tensor] | None = None,
        parts: Sequence[str] = (ONLY,),
        by_weight: bool = True,
    ) -> None:
        """Made by the trainer.

        Args:
            length: rows of the batch that the step gets; at least 1, where that is so.
            seed: the run's seed, and a number that no other replica and no other batch has.
            factor: what the loss is multiplied by before it is differentiated.
            penalties: what layers add with add_loss; filled while the model is called.
            parts: names of the optimizers.
            by_weight: whether the sum of losses is divided by the sum of weights, or by the number of losses.
        """
        self.model = model
        """The model. Call it with `training=True`."""
        self.rows = rows
        """Number of examples of the global batch that this replica holds. Where it is 0, the step gets one row of
        zeros, which counts for nothing."""
        self.id = replica_id
        """Rank of this replica among all replicas, a scalar int32 tensor."""
        self.parts: dict[str, Part] = {}
        self.faults = tf.zeros([len(FAULTS)])
        self._length = length
        self._seed = seed
        self._seeds = 0
        self._factor = factor
        self._penalties = penalties if penalties is not None else []
        self._used = 0
        self._names = tuple(parts)
        self._by_weight = by_weight

    @tf.autograph.experimental.do_not_convert
    def seed(self) -> tf.Tensor:
        """A seed for one of TensorFlow's stateless random operations, shape `[2]`.

        Another one for each call, replica, batch and run's seed; the same on every backend.
        """
        self._seeds += 1
        run, place = self._seed
        return tf.stack([tf.constant(run + (self._seeds << 32), tf.int64), tf.cast(place, tf.int64)])

    @tf.autograph.experimental.do_not_convert
    def loss(self, losses: tf.Tensor, weights: Any = None, *, mask: Any = None, name: str | None = None) -> tf.Tensor:
        """The scalar to differentiate: Σ weight·loss over this replica's rows.

        The trainer divides loss and gradients by Σ weight over all replicas, so do not divide here, and do not add
        penalties to it (regularizers of the model's layers enter by themselves, once).

        Args:
            losses: loss of each example, shape `[rows]`; or of each token and the like, shape `[rows, …]`, if there
                are weights or a mask of that shape.
            weights: weight of each example, shape `[rows]`, or of each loss; not negative; 1 where None.
            mask: which losses count, of the shape of `losses`; one of another rank (a model's mask of tokens where
                the losses are per example) is left aside.
            name: of the optimizer that this loss is for, in a task with several.

        Raises:
            UsageError: `losses` or `weights` has a wrong shape, or the name is unknown or comes twice.
        """
        name = self._named(name)
        if name in self.parts:
            raise UsageError(
                "replica.loss was called twice in one train_step"
                + (f" with name={name!r}" if len(self._names) > 1 else "")
                + ". Add the per-example losses first."
            )
        losses, weights, faults = per_value(losses, weights, mask, self._length)
        self.faults += faults
        if losses.dtype.size < 4:  # a sum of many halves would lose its small addends, or overflow
            losses = tf.cast(losses, tf.float32)
        # A row that stands in for none must not reach other replicas through what layers share.
        weights = tf.cast(weights, losses.dtype) * tf.cast(self.rows > 0, losses.dtype)
        weighted = tf.reduce_sum(tf.math.multiply_no_nan(losses, weights))
        weight = tf.reduce_sum(weights)
        count = tf.cast(tf.where(self.rows > 0, tf.size(losses), 0), losses.dtype)
        total, penalty = weighted, tf.zeros_like(weighted)
        if self._penalties:
            # A layer's add_loss is a mean over its rows. Weighted so, the division gives the mean over all rows. Each
            # optimizer's loss has all of them, since each has its own variables; they are reported once.
            added = [tf.cast(tf.reduce_sum(p), losses.dtype) for p in self._penalties]
            divisor = weight if self._by_weight else count
            total = weighted + divisor * tf.add_n(added)
            if added[self._used :]:
                penalty = divisor * tf.add_n(added[self._used :])
            self._used = len(added)
        self.parts[name] = Part(weighted, weight, count, penalty)
        return total if self._factor is None else total * tf.cast(self._factor, total.dtype)

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, gradients_and_variables: Iterable[tuple[Any, Any]], *, name: str | None = None) -> None:
        """Hand over the gradients of `replica.loss`. They are reduced and applied after the step.

        Args:
            gradients_and_variables: pairs as `tape.gradient` gives them; a gradient may be None.
            name: of the optimizer that applies them, and of their loss, in a task with several.

        Raises:
            UsageError: a variable is not a trainable one of the model, or comes twice, or there is no such loss.
        """
        name = self._named(name)
        if name not in self.parts:
            raise UsageError(
                "replica.apply_gradients was called before replica.loss"
                + (f" with name={name!r}" if len(self._names) > 1 else "")
                + ". Call replica.loss(losses) first: it makes the loss that is reduced."
            )
        known = {id(v) for v in self.model.trainable_variables}
        taken = {key for part in self.parts.values() for key in part.gradients}
        for gradient, variable in gradients_and_variables:
            if id(variable) not in known:
                path = getattr(variable, "path", getattr(variable, "name", variable))
                raise UsageError(
                    f"train_step gave a gradient for {path!r}, which is not in model.trainable_variables. "
                    "Make it part of the model."
                )
            if id(variable) in taken:
                raise UsageError(f"train_step gave two gradients for {variable.path!r}. Add them first.")
            taken.add(id(variable))
            self.parts[name].gradients[id(variable)] = gradient

    def _named(self, name: str | None) -> str:
        if name is None and len(self._names) == 1:
            return self._names[0]
        if name not in self._names:
            raise UsageError(
                f"name={name!r} is not one of the task's optimizers ({', '.join(self._names)}). With several, give "
                "replica.loss and replica.apply_gradients the name of one."
            )
        return name
