"""The reduction with one replica. That it sums over several is for the contract suite, with real collectives."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.unit.one_device import STRATEGY
from tfdist.training.reduction import sum_over_replicas


def reduced(*values: Any) -> list[tf.Tensor]:
    @tf.function
    def step() -> Any:
        return STRATEGY.run(lambda: sum_over_replicas([tf.constant(v) for v in values]))

    return list(step())


def test_the_sum_over_one_replica_is_the_value_itself() -> None:
    values = [
        np.float32(1.5),
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array([1, 2], np.int64),
        np.zeros([0, 3], np.float32),
        np.array([1.0], np.float64),
        np.array([0.1], np.float16),
        np.array([np.nan, np.inf], np.float32),
    ]
    got = reduced(*values)
    assert len(got) == len(values)
    for mine, theirs in zip(got, values, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert mine.numpy().tobytes() == theirs.tobytes()


def test_nothing_may_be_reduced() -> None:
    assert reduced() == []


def test_the_callers_list_is_left_alone() -> None:
    def step() -> None:
        tensors = [tf.constant(1.0), tf.constant(2)]
        result = sum_over_replicas(tensors)
        assert result is not tensors
        assert [a is b for a, b in zip(result, tensors, strict=True)] == [True, True]

    STRATEGY.run(step)
