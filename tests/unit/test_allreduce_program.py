"""Sums that are wrong, or rounds that are left out, are found. Sums that are right are for tests/contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tests.unit.one_device import SESSION
from tfdist.errors import EnvironmentProblem
from tfdist.evidence.allreduce_program import Reduction
from tfdist.training import reduction


def block(monkeypatch: pytest.MonkeyPatch, fault: Callable[[tf.Tensor, tf.Tensor], list[tf.Tensor]]) -> float:
    """Three rounds with one replica, whose sum is the value itself, with a fault in each.

    Args:
        fault: makes of the counter and of the other numbers what comes out.
    """
    right = reduction.sum_over_replicas

    def wrong(tensors: Any) -> list[tf.Tensor]:
        return fault(*right(tensors))

    monkeypatch.setattr(reduction, "sum_over_replicas", wrong)
    return Reduction(SESSION, 1024).block(3)


def test_right_sums_have_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert block(monkeypatch, lambda count, numbers: [count, numbers]) > 0


def test_a_wrong_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentProblem) as raised:
        block(monkeypatch, lambda count, numbers: [count, tf.tensor_scatter_nd_add(numbers, [[70]], [1.0])])
    text = str(raised.value)
    assert "adds 1024 bytes of 1 replicas wrongly" in text
    assert "1 numbers, the first is 7.0 instead of 6.0 on rank 0" in text


def test_a_round_that_was_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentProblem, match=r"after 3 rounds the counter is \[2.0\]"):
        block(monkeypatch, lambda count, numbers: [tf.minimum(count, 2.0), numbers])
