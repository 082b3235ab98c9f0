"""Intervals for what was measured in several rounds: medians, and ratios of two that were measured in turns.

Speed on a shared machine varies in two ways: from step to step, where neighbours are alike (another process runs for
a while), and from round to round. Both are resampled (a bootstrap in two stages): rounds as a whole, and inside each
round blocks of neighbouring steps (H. Künsch: The Jackknife and the Bootstrap for General Stationary Observations,
Annals of Statistics 17(3), 1989; here in a circle, √n steps of n in a block).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Interval", "interval", "ratio"]

_RESAMPLES = 1000
_AT_ONCE = 1 << 20
"""Numbers that are held at once."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """A value, and between what bounds it is with 95 % confidence."""

    median: float
    low: float
    high: float


def interval(groups: Sequence[Any], seed: int = 0) -> Interval:
    """The median over the rounds of each round's median step: one disturbed round of three or more does no harm.

    How far the bounds can be trusted depends on the rounds. In simulations where rounds vary up to as much as steps do,
    the true value was inside in 90 to 100 % of cases with five rounds or more, in 82 to 99 % with three, and in 60 to
    99 % with two (the least where rounds vary most). With one round the bounds know nothing of what another round would
    give, and with one step in one round they are that step's time.

    Args:
        groups: for each round an array of the seconds of its steps; rounds may differ in length.
        seed: the same one gives the same bounds.

    Raises:
        ValueError: there is no round, or a round without steps, or a time that is not finite and above 0.
    """
    rounds = _checked(groups)
    random = np.random.default_rng(seed)
    return _over_rounds([float(np.median(r)) for r in rounds], [_medians(r, random) for r in rounds], random)


def ratio(a_groups: Sequence[Any], b_groups: Sequence[Any], seed: int = 0) -> Interval:
    """The median over the rounds of median step of a / median step of b; above 1 where a takes longer.

    Both are measured in each round, so what slows a whole round down leaves its ratio alone. The speed of an arm over
    that of a reference is `ratio(reference, arm)`. The bounds are to be trusted as those of `interval`.

    Args:
        a_groups: for each round an array of the seconds of a's steps.
        b_groups: for the same rounds those of b's; the number of steps may be another one.
        seed: the same one gives the same bounds.

    Raises:
        ValueError: as `interval`, or the numbers of rounds differ.
    """
    a_rounds, b_rounds = _checked(a_groups), _checked(b_groups)
    if len(a_rounds) != len(b_rounds):
        raise ValueError(f"{len(a_rounds)} rounds of one and {len(b_rounds)} of the other cannot be paired")
    random = np.random.default_rng(seed)
    pairs = list(zip(a_rounds, b_rounds, strict=True))
    ratios = [float(np.median(a) / np.median(b)) for a, b in pairs]
    return _over_rounds(ratios, [_medians(a, random) / _medians(b, random) for a, b in pairs], random)


def _checked(groups: Sequence[Any]) -> list[np.ndarray]:
    rounds = [np.asarray(group, np.float64).reshape(-1) for group in groups]
    if not rounds:
        raise ValueError("there is no round")
    for number, steps in enumerate(rounds):
        if not steps.size:
            raise ValueError(f"round {number} has no steps")
        if not (np.isfinite(steps) & (steps > 0)).all():
            raise ValueError(f"round {number} has a time that is not finite and above 0")
    return rounds


def _over_rounds(values: Sequence[float], resampled: Sequence[np.ndarray], random: np.random.Generator) -> Interval:
    """The median of the rounds' values.

    Args:
        values: one for each round.
        resampled: for each round its value with other steps, _RESAMPLES times.
    """
    shape = (_RESAMPLES, len(values))
    # A round that is drawn twice comes with other steps each time.
    chosen = np.stack(resampled)[random.integers(len(values), size=shape), random.integers(_RESAMPLES, size=shape)]
    low, high = np.percentile(np.median(chosen, axis=1), [2.5, 97.5])
    median = float(np.median(values))
    return Interval(median, min(float(low), median), max(float(high), median))


def _medians(steps: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Medians of steps drawn in blocks of neighbours, _RESAMPLES times."""
    block = math.isqrt(steps.size - 1) + 1
    blocks = -(-steps.size // block)
    starts = random.integers(steps.size, size=(_RESAMPLES, blocks))
    at_once = max(1, _AT_ONCE // steps.size)
    parts = []
    for some in np.split(starts, range(at_once, _RESAMPLES, at_once)):
        places = (some[:, :, None] + np.arange(block)).reshape(len(some), -1)[:, : steps.size] % steps.size
        parts.append(np.median(steps[places], axis=1))
    return np.concatenate(parts)
