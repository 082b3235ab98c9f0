"""Which ranks are told to be slow."""

from __future__ import annotations

from typing import Any

import pytest

from tfdist.training.slowness import slow_ranks


def ranks(*milliseconds: tuple[float, float]) -> list[dict[str, Any]]:
    """Of a hundred steps: (input, compute) per step."""
    return [
        {"rank": r, "host": f"lab{r}", "input_seconds": i / 10, "compute_seconds": c / 10, "collective_seconds": 9.0}
        for r, (i, c) in enumerate(milliseconds)
    ]


def test_slow_computing_and_slow_input_are_told_apart() -> None:
    assert slow_ranks(ranks((1, 12), (1, 41), (1, 11), (30, 13)), 100) == [
        "rank 1 (host lab1) was slow: 41.0 ms per step in computing, where the others need 12.0 ms",
        "rank 3 (host lab3) was slow: 30.0 ms per step waiting for its input, where the others need 1.0 ms",
    ]


@pytest.mark.parametrize("second", [(1, 17), (2.9, 12), (1, 11)])
def test_small_differences_are_not(second: tuple[float, float]) -> None:
    assert slow_ranks(ranks((1, 12), second), 100) == []


def test_in_a_short_run_they_are_not() -> None:
    slow = ranks((1, 12), (1, 42))
    assert slow_ranks(slow, 1) != []
    assert slow_ranks([{**rank, "compute_seconds": rank["compute_seconds"] / 10} for rank in slow], 10) == []


def test_one_process_or_no_step_is_not_slow() -> None:
    assert slow_ranks(ranks((1, 1000)), 100) == []
    assert slow_ranks(ranks((1, 1), (1, 1000)), 0) == []
