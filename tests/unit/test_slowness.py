"""Which ranks are told to be slow."""

from __future__ import annotations

from typing import Any

import pytest

from tfdist.training.slowness import slow_ranks


def ranks(*milliseconds: tuple[float, float]) -> list[dict[str, Any]]:
    """Of ten steps: (input, compute) per step."""
    return [
        {"rank": r, "host": f"lab{r}", "input_seconds": i / 100, "compute_seconds": c / 100, "collective_seconds": 9.0}
        for r, (i, c) in enumerate(milliseconds)
    ]


def test_slow_computing_and_slow_input_are_told_apart() -> None:
    assert slow_ranks(ranks((1, 12), (1, 41), (1, 11), (30, 13)), 10) == [
        "rank 1 (host lab1) was slow: 41.0 ms per step in computing, where the others need 12.0 ms",
        "rank 3 (host lab3) was slow: 30.0 ms per step waiting for its input, where the others need 1.0 ms",
    ]


@pytest.mark.parametrize("second", [(1, 17), (2.9, 12), (1, 11)])
def test_small_differences_are_not(second: tuple[float, float]) -> None:
    assert slow_ranks(ranks((1, 12), second), 10) == []


def test_one_process_or_no_step_is_not_slow() -> None:
    assert slow_ranks(ranks((1, 1000)), 10) == []
    assert slow_ranks(ranks((1, 1), (1, 1000)), 0) == []
