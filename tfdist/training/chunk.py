"""What a chunk of steps tells: one row of numbers for each step, from the compiled loop to the trainer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.training.step import StepResult
from tfdist.training.weighting import FAULTS

__all__ = ["Chunk", "columns", "row", "width"]


class Chunk(NamedTuple):
    """What a chunk of steps tells; arrays have one entry (or row) for each step that was done."""

    losses: np.ndarray
    """One column for each part of the task."""
    penalties: np.ndarray
    rates: np.ndarray
    """Learning rates, one column for each part of the task."""
    rows: np.ndarray
    skipped: np.ndarray
    seconds: np.ndarray
    halted: bool
    """Whether the last step was one after which training cannot go on; it changed nothing."""
    suspects: tuple[int, int]
    """Of the last step: how many replicas had a loss that was not finite, and the sum of their ids."""
    faults: np.ndarray
    """Of the last step: counts of `weighting.FAULTS`."""
    leave: float
    """The largest sum of requests to leave (see `leaving.why`)."""


def row(result: StepResult) -> tf.Tensor:
    """A step's numbers, a float32 vector of `width(parts)` (traced)."""
    alone = (result.penalty, result.rows, result.skipped, result.halt)
    numbers = tf.stack([tf.cast(value, tf.float32) for value in alone])
    return tf.concat([result.losses, result.rates, numbers, result.suspects, [result.leave], result.faults], 0)


def width(parts: int) -> int:
    """The length of a row."""
    return 2 * parts + 4 + 3 + len(FAULTS)


def columns(rows: np.ndarray, seconds: np.ndarray, parts: int) -> Chunk:
    """The chunk of some rows, one after the other.

    Args:
        rows: shape `[steps, width(parts)]`.
        seconds: that each step took.
    """
    if not len(rows):
        nothing = columns(np.zeros((1, width(parts)), np.float32), np.zeros(1), parts)
        return nothing._replace(**{name: getattr(nothing, name)[:0] for name in Chunk._fields[:6]})
    losses, rates, alone, suspects, leave, faults = np.split(rows, np.cumsum([parts, parts, 4, 2, 1]), axis=1)
    return Chunk(
        losses=losses,
        rates=rates,
        penalties=alone[:, 0],
        rows=alone[:, 1].astype(np.int64),
        skipped=alone[:, 2] > 0,
        seconds=seconds,
        halted=bool(alone[-1, 3] > 0),
        suspects=(int(suspects[-1, 0]), int(suspects[-1, 1])),
        faults=faults[-1],
        leave=float(leave.max()),
    )
