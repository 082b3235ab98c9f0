"""Medians, ratios and their intervals: known answers, and how often simulated truth lies inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tfdist.evidence.statistics import Interval, interval, ratio


def measured(
    random: np.random.Generator, rounds: int, steps: int = 30, center: float = 1.0, drift: Any = 0.0
) -> list[np.ndarray]:
    """Steps around `center`, each like the one before it (ρ = 0.6), in rounds that are as different as `drift`."""
    noise = random.standard_normal((rounds, steps))
    for i in range(1, steps):
        noise[:, i] = 0.6 * noise[:, i - 1] + 0.8 * noise[:, i]
    return list(center * np.exp(0.05 * noise + np.reshape(drift, (-1, 1))))


class TestKnownAnswers:
    def test_equal_steps_leave_nothing_open(self) -> None:
        assert interval([[2.0, 2.0], [2.0, 2.0, 2.0]]) == Interval(2.0, 2.0, 2.0)

    def test_one_step_is_its_own_interval(self) -> None:
        assert interval([[3.0]]) == Interval(3.0, 3.0, 3.0)
        assert ratio([[3.0]], [[2.0]]) == Interval(1.5, 1.5, 1.5)

    def test_the_median_is_that_of_the_rounds(self) -> None:
        assert interval([[1.0, 2.0, 90.0], [4.0], [6.0, 8.0]]).median == 4.0  # of 2, 4 and 7

    def test_constant_rounds_give_the_least_and_the_greatest(self) -> None:
        # Of three rounds, 7 of 27 draws have the least one at least twice.
        assert interval([[1.0], [2.0], [4.0]]) == Interval(2.0, 1.0, 4.0)

    def test_a_disturbed_round_does_not_move_the_median(self) -> None:
        assert interval([[1.0] * 9, [1.0] * 9, [50.0] * 9]).median == 1.0

    def test_what_slows_a_whole_round_leaves_its_ratio_alone(self) -> None:
        assert ratio([[3.0], [30.0], [6.0]], [[2.0], [20.0], [4.0]]) == Interval(1.5, 1.5, 1.5)

    def test_rounds_of_a_ratio_may_have_other_numbers_of_steps(self) -> None:
        assert ratio([[2.0] * 5, [2.0]], [[4.0], [4.0] * 3]) == Interval(0.5, 0.5, 0.5)

    def test_one_round_shows_the_spread_of_its_steps(self) -> None:
        found = interval([np.linspace(1.0, 2.0, 101)])
        assert found.median == 1.5
        assert 1.0 < found.low < 1.5 < found.high < 2.0


def test_the_seed_decides() -> None:
    rounds = measured(np.random.default_rng(0), 4)
    for of in (interval, lambda groups, seed: ratio(groups, groups[::-1], seed)):
        assert of(rounds, seed=1) == of(rounds, seed=1)
        assert of(rounds, seed=1) != of(rounds, seed=2)


def test_long_rounds_are_taken_in_pieces() -> None:
    found = interval([np.random.default_rng(0).uniform(1.0, 3.0, 3000)])
    assert found.low == pytest.approx(2.0, abs=0.2)
    assert found.high == pytest.approx(2.0, abs=0.2)


# 95 % of 120 are 114. Few rounds cover less where they differ much, and more where they do not.
@pytest.mark.parametrize(("rounds", "spread", "least"), [(7, 0.0, 108), (7, 0.05, 104), (3, 0.05, 85)])
def test_the_true_median_lies_inside(rounds: int, spread: float, least: int) -> None:
    random = np.random.default_rng(7)
    inside = 0
    for _ in range(120):
        found = interval(measured(random, rounds, drift=spread * random.standard_normal(rounds)))
        inside += found.low <= 1.0 <= found.high
    assert inside >= least


def test_the_true_ratio_lies_inside_though_rounds_differ_much() -> None:
    random = np.random.default_rng(8)
    found = []
    for _ in range(120):
        drift = 0.5 * random.standard_normal(7)
        found.append(ratio(measured(random, 7, center=1.1, drift=drift), measured(random, 7, drift=drift)))
    assert sum(one.low <= 1.1 <= one.high for one in found) >= 108
    assert np.median([one.high - one.low for one in found]) < 0.15, "of rounds that differ by half"


@pytest.mark.parametrize(
    "of", [interval, lambda groups: ratio(groups, [g[::-1] for g in groups])], ids=["interval", "ratio"]
)
def test_more_data_gives_a_smaller_interval(of: Callable[[list[np.ndarray]], Interval]) -> None:
    def width(rounds: int, steps: int) -> float:
        found = [of(measured(np.random.default_rng(seed), rounds, steps)) for seed in range(5)]
        return float(np.median([one.high - one.low for one in found]))

    assert width(21, 30) < 0.7 * width(5, 30)
    assert width(5, 300) < 0.6 * width(5, 30)


def test_neighbours_that_are_alike_give_a_wider_interval() -> None:
    steps = np.sort(np.random.default_rng(0).uniform(1.0, 2.0, 100))
    mixed = np.random.default_rng(1).permutation(steps)
    alike, other = interval([steps]), interval([mixed])
    assert alike.high - alike.low > 1.5 * (other.high - other.low)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ([], "no round"),
        ([[1.0], []], "round 1 has no steps"),
        ([[1.0, 0.0]], "round 0 has a time that is not finite and above 0"),
        ([[1.0], [float("nan")]], "round 1 has a time"),
    ],
)
def test_what_cannot_be_measured_is_refused(groups: list[list[float]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        interval(groups)
    with pytest.raises(ValueError, match=says):
        ratio(groups, groups)


def test_rounds_that_cannot_be_paired_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rounds of one and 1 of the other"):
        ratio([[1.0], [1.0]], [[1.0]])
