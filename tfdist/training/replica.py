"""What a training step sees of its replica: the model, a loss that may be differentiated, a place for gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UsageError

__all__ = ["Replica"]


class Replica:
    """One replica while its step is traced. `Task.train_step` gets it; nothing of it outlives the step."""

    def __init__(
        self, model: keras.Model, rows: tf.Tensor, penalties: list[tf.Tensor], length: tf.Tensor | None = None
    ) -> None:
        self.model = model
        """The model. Call it with `training=True`."""
        self.rows = rows
        """Number of examples of the global batch that this replica holds. Where it is 0, the step gets one row of
        zeros, which counts for nothing (with synchronized BatchNorm: no row)."""
        self._length = rows if length is None else length
        self._penalties = penalties  # what layers add with add_loss; filled while the model is called
        self.weighted_loss: tf.Tensor | None = None
        self.weight: tf.Tensor | None = None
        self.gradients: dict[int, Any] = {}

    @property
    def id(self) -> tf.Tensor:
        """Rank of this replica among all replicas, a scalar int32 tensor."""
        return tf.convert_to_tensor(tf.distribute.get_replica_context().replica_id_in_sync_group)

    def loss(self, losses: tf.Tensor, weights: Any = None) -> tf.Tensor:
        """The scalar to differentiate: Σ weight·loss over this replica's rows.

        The trainer divides loss and gradients by Σ weight over all replicas, so do not divide here, and do not add
        penalties to it (regularizers of the model's layers enter by themselves, once).

        Args:
            losses: loss of each example, shape `[rows]`.
            weights: weight of each example, shape `[rows]`; 1 where None.

        Raises:
            UsageError: `losses` or `weights` does not have one value per example, or it is called twice in a step.
        """
        if self.weighted_loss is not None:
            raise UsageError("replica.loss was called twice in one train_step. Add the per-example losses first.")
        losses = _per_example("the loss", losses, self._length)
        weights = tf.ones_like(losses) if weights is None else _per_example("the weight", weights, self._length)
        if losses.dtype.size < 4:  # a sum of many halves would lose its small addends, or overflow
            losses = tf.cast(losses, tf.float32)
        weights = tf.cast(weights, losses.dtype)
        self.weighted_loss = tf.reduce_sum(losses * weights)
        self.weight = tf.reduce_sum(weights)
        if not self._penalties:
            return self.weighted_loss
        # A layer's add_loss is a mean over its rows. Weighted like this, the division gives the mean over all rows.
        return self.weighted_loss + self.weight * tf.cast(tf.add_n(self._penalties), losses.dtype)

    def apply_gradients(self, gradients_and_variables: Iterable[tuple[Any, Any]]) -> None:
        """Hand over the gradients of `replica.loss`. They are reduced and applied after the step.

        Args:
            gradients_and_variables: pairs as `tape.gradient` gives them; a gradient may be None.

        Raises:
            UsageError: a variable is not a trainable one of the model, or comes twice.
        """
        known = {id(v): v for v in self.model.trainable_variables}
        for gradient, variable in gradients_and_variables:
            if id(variable) not in known:
                name = getattr(variable, "path", getattr(variable, "name", variable))
                raise UsageError(
                    f"train_step gave a gradient for {name!r}, which is not in model.trainable_variables. "
                    "Make it part of the model."
                )
            if id(variable) in self.gradients:
                raise UsageError(f"train_step gave two gradients for {variable.path!r}. Add them first.")
            self.gradients[id(variable)] = gradient


def _per_example(what: str, value: Any, rows: tf.Tensor) -> tf.Tensor:
    value = tf.convert_to_tensor(value)
    if value.shape.rank not in (1, None):
        raise UsageError(
            f"{what} has shape {value.shape}, but must have one value per example, shape [rows]. "
            "Average over the other axes, and never over the examples (Keras losses: reduction=None)."
        )
    value = tf.ensure_shape(value, [None])
    same = tf.debugging.assert_equal(
        tf.shape(value)[0], rows, f"{what} must have one value per example, but its length is not that of the rows"
    )
    with tf.control_dependencies([same] if same is not None else []):
        return tf.identity(value)
