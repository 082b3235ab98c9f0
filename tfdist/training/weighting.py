"""Losses and their weights: one weight for each loss, checked without stopping one replica alone.

A fault in the numbers shows on one replica only, while the others would wait for it in the next collective. So faults
are counted, added up with everything else, and told by all ranks at the same step.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.errors import UsageError

__all__ = ["FAULTS", "combined_weights", "fault_of", "per_value"]

FAULTS = (
    "the loss must have one value per example, but its length is not that of the rows",
    "the weight must have one value per example, but its length is not that of the rows",
    "a weight is negative or not a number. Give weights of 0 or more",
)


def fault_of(counts: Any) -> str | None:
    """What the summed counts of faults tell, or None."""
    return next((text for text, count in zip(FAULTS, counts, strict=True) if count > 0), None)


def per_value(losses: Any, weights: Any, mask: Any, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Losses, a weight for each of them, and the counts of `FAULTS`.

    Raises:
        UsageError: losses or weights have a shape that no batch can make right.
    """
    try:
        losses = tf.convert_to_tensor(losses)
    except (TypeError, ValueError):
        raise UsageError(
            f"the loss is a {type(losses).__name__}, but must be a tensor with one value per example, shape [rows]. "
            "Add up what several outputs lose."
        ) from None
    weights = None if weights is None else tf.convert_to_tensor(weights)
    rank = losses.shape.rank
    if rank == 0 or (rank not in (1, None) and not _same_rank(losses, weights) and not _same_rank(losses, mask)):
        raise UsageError(
            f"the loss has shape {losses.shape}, but must have one value per example, shape [rows]. "
            "Average over the other axes, and never over the examples (Keras losses: reduction=None); or give weights "
            "or a mask of the same shape, so that each value counts for itself."
        )
    if losses.shape.rank is None:
        losses = tf.ensure_shape(losses, [None])
    if weights is not None and weights.shape.rank not in (1, None, losses.shape.rank):
        raise UsageError(
            f"the weight has shape {weights.shape}, but must have one value per example, shape [rows], or one per "
            f"loss, shape {losses.shape}."
        )
    for what, other in (("the weight", weights), ("the mask", mask)):
        if other is not None and _same_rank(losses, other) and not losses.shape[1:].is_compatible_with(other.shape[1:]):
            raise UsageError(
                f"{what} has shape {other.shape}, which does not fit the loss of shape {losses.shape}. Give one value "
                "per example, or one per loss."
            )
    losses, bad_losses = _of_length(losses, rows)
    weights, bad_weights = (None, tf.zeros([])) if weights is None else _of_length(weights, rows)
    weights = combined_weights(losses, weights, mask)
    bad = tf.math.logical_not(tf.reduce_all((weights >= 0) & (weights < float("inf"))))
    return losses, weights, tf.stack([bad_losses, bad_weights, tf.cast(bad, tf.float32)])


def combined_weights(losses: tf.Tensor, weights: Any, mask: Any) -> tf.Tensor:
    """Weights (None: 1) times mask, of the shape of the losses, in a float type."""
    kind = losses.dtype if losses.dtype.size >= 4 else tf.float32
    result = tf.ones_like(losses, kind)
    for factor in (weights, mask if _same_rank(losses, mask) else None):
        if factor is not None:
            factor = tf.cast(factor, kind)
            missing = len(losses.shape) - len(factor.shape)
            result *= tf.reshape(factor, tf.concat([tf.shape(factor), tf.ones([missing], tf.int32)], 0))
    return result


def _same_rank(losses: tf.Tensor, other: Any) -> bool:
    return other is not None and losses.shape.rank is not None and losses.shape.rank == len(other.shape)


def _of_length(value: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The value with `rows` rows, and 1 where it had another number, in which case it is zeros."""
    if value.shape.rank is None:
        value = tf.ensure_shape(value, [None])
    shape = tf.shape(value)
    same = tf.equal(shape[0], rows)
    fitting = tf.cond(same, lambda: value, lambda: tf.zeros(tf.concat([[rows], shape[1:]], 0), value.dtype))
    fitting.set_shape([None, *value.shape[1:]])
    return fitting, 1.0 - tf.cast(same, tf.float32)
