"""The moments at which a program's own code may act, with values that are the same on every process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import tensorflow as tf

__all__ = ["Action", "Moment", "act"]


@dataclasses.dataclass
class Moment:
    """What an action gets. All values are global: the same on every process."""

    kind: Literal["chunk", "evaluation", "epoch"]
    """What has ended."""
    step: int
    epoch: int | None
    """The epoch under way, or that has ended, from 1; None where epochs cannot be counted."""
    loss: float
    """Of the last step."""
    learning_rate: float
    """Of the last step."""
    examples_per_second: float
    """Over all replicas, in the last chunk."""
    metrics: dict[str, dict[str, float]]
    """By split; of the last evaluation."""
    is_chief: bool
    """Whether this process prints and writes files for the job."""
    stop: bool = False
    """Set it to end training after this moment; one process suffices."""


Action = Callable[[Moment], object]


def act(actions: Sequence[Action], moment: Moment, strategy: tf.distribute.Strategy | None) -> bool:
    """Call the actions in their order; True where any process asks to stop. Every process calls it alike.

    Args:
        strategy: over which the processes vote; None where this one leads alone.
    """
    if not actions:
        return False
    for action in actions:
        action(moment)
    if strategy is None:
        return bool(moment.stop)
    votes = strategy.run(lambda: tf.constant(float(bool(moment.stop))))
    return float(strategy.reduce(tf.distribute.ReduceOp.SUM, votes, axis=None)) > 0
