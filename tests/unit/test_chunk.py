"""A step's numbers as one row, and the rows of a chunk as its columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist.training.chunk import columns, row, width
from tfdist.training.step import StepResult


def step(parts: int, place: int, **changes: Any) -> StepResult:
    """A step of which all numbers differ; those of another place are others."""
    fields: dict[str, Any] = {
        "losses": [10.0 * place + part for part in range(parts)],
        "penalty": place + 0.5,
        "rates": [0.25 * place + part for part in range(parts)],
        "rows": 7.0 + place,
        "finite": True,
        "skipped": False,
        "halt": False,
        "suspects": [2.0, 5.0],
        "faults": [3.0, 0.0, 1.0 + place],
        "leave": 0.5 * place,
        "tally": [],
        "seen": [],
        "times": [],
    }
    return StepResult(**{name: tf.constant(value) for name, value in (fields | changes).items()})


@pytest.mark.parametrize("parts", [1, 3])
def test_what_goes_in_comes_out(parts: int) -> None:
    steps = [step(parts, 0), step(parts, 1, skipped=True), step(parts, 2)]
    rows = np.array([row(result).numpy() for result in steps])
    assert rows.shape == (3, width(parts))
    assert rows.dtype == np.float32
    seconds = np.array([0.1, 0.2, 0.3])
    chunk = columns(rows, seconds, parts)
    assert chunk.losses.tolist() == [[10.0 * place + part for part in range(parts)] for place in range(3)]
    assert chunk.rates.tolist() == [[0.25 * place + part for part in range(parts)] for place in range(3)]
    assert chunk.penalties.tolist() == [0.5, 1.5, 2.5]
    assert chunk.rows.tolist() == [7, 8, 9]
    assert chunk.rows.dtype == np.int64
    assert chunk.skipped.tolist() == [False, True, False]
    assert chunk.seconds is seconds
    assert (chunk.halted, chunk.suspects) == (False, (2, 5))
    assert chunk.faults.tolist() == [3, 0, 3]
    assert chunk.leave == 1.0, "the largest"


def test_what_is_told_of_the_last_step_only() -> None:
    last = step(1, 1, halt=True, suspects=[1.0, 4.0], faults=[0.0, 1.0, 0.0])
    for results, halted in (([step(1, 0), last], True), ([last, step(1, 0)], False), ([last], True)):
        chunk = columns(np.array([row(result).numpy() for result in results]), np.ones(len(results)), 1)
        assert chunk.halted is halted
        assert chunk.suspects == ((1, 4) if halted else (2, 5))
        assert chunk.faults.tolist() == ([0, 1, 0] if halted else [3, 0, 1])


def test_numbers_that_are_not_finite_travel_too() -> None:
    chunk = columns(np.array([row(step(2, 0, losses=[np.nan, -np.inf])).numpy()]), np.ones(1), 2)
    assert str(chunk.losses.tolist()) == "[[nan, -inf]]"
    assert chunk.penalties.tolist() == [0.5]


@pytest.mark.parametrize("parts", [1, 2])
def test_a_run_without_steps_has_empty_columns(parts: int) -> None:
    chunk = columns(np.zeros((0, width(parts)), np.float32), np.zeros(0), parts)
    assert (chunk.losses.shape, chunk.rates.shape, len(chunk.rows), len(chunk.seconds)) == (
        (0, parts),
        (0, parts),
        0,
        0,
    )
    assert (chunk.halted, chunk.leave) == (False, 0.0)
