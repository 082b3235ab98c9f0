"""The reduction with one replica. That it sums over several is for the contract suite, with real collectives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.unit.one_device import STRATEGY
from tfdist.training.reduction import gather_over_replicas, sum_over_replicas


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
        np.array([np.nan, np.inf], np.float32),
    ]
    got = reduced(*values)
    assert len(got) == len(values)
    for mine, theirs in zip(got, values, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert mine.numpy().tobytes() == theirs.tobytes()


@pytest.mark.parametrize("half", [tf.float16, tf.bfloat16])
def test_halves_come_back_in_float32(half: tf.DType) -> None:
    (got,) = STRATEGY.run(lambda: sum_over_replicas([tf.constant([0.1, 40000], half)]))
    assert got.dtype == tf.float32
    assert got.numpy().tolist() == tf.constant([0.1, 40000], half).numpy().astype(np.float32).tolist()


def test_one_replica_shows_what_the_type_on_the_way_does() -> None:
    # 2049 has 12 bits: float16 keeps 11 and bfloat16 8 of them.
    values = [tf.constant([2049.0]), tf.constant([2049.0], tf.float64), tf.constant([2049])]
    for wire, right in ((None, 2049), (tf.float16, 2048), (tf.bfloat16, 2048)):
        got = STRATEGY.run(lambda wire=wire: sum_over_replicas(values, wire))
        assert [g.dtype for g in got] == [tf.float32, tf.float64, tf.int32]
        assert [int(g[0]) for g in got] == [right, right, 2049], "whole numbers travel as they are"


def test_rows_of_a_sparse_gradient_come_once() -> None:
    slices = tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0]]), tf.constant([3, 0, 3]), tf.constant([5, 1]))
    for sums_first in (True, False):
        (got,) = STRATEGY.run(lambda sums_first=sums_first: gather_over_replicas([slices], sums_first=sums_first))
        assert got.indices.numpy().tolist() == [3, 0]
        assert got.values.numpy().tolist() == [[5.0], [2.0]]


@pytest.mark.parametrize("wire", [tf.float16, tf.bfloat16])
def test_rows_of_a_sparse_gradient_travel_in_the_type_on_the_way(wire: tf.DType) -> None:
    slices = tf.IndexedSlices(tf.constant([[2049.0], [-0.5]]), tf.constant([3, 0]), tf.constant([5, 1]))
    (got,) = STRATEGY.run(lambda: gather_over_replicas([slices], wire))
    assert got.dtype == tf.float32
    assert got.values.numpy().tolist() == [[2048.0], [-0.5]]
    assert got.dense_shape.numpy().tolist() == [5, 1]


def test_a_sparse_gradient_may_have_no_rows() -> None:
    slices = tf.IndexedSlices(tf.zeros([0, 2]), tf.zeros([0], tf.int64), tf.constant([5, 2], tf.int64))
    (got,) = STRATEGY.run(lambda: gather_over_replicas([slices]))
    assert tf.convert_to_tensor(got).numpy().tolist() == [[0.0, 0.0]] * 5


def test_nothing_may_be_reduced() -> None:
    assert reduced() == []


def test_the_callers_list_is_left_alone() -> None:
    def step() -> None:
        tensors = [tf.constant(1.0), tf.constant(2)]
        result = sum_over_replicas(tensors)
        assert result is not tensors
        assert [a is b for a, b in zip(result, tensors, strict=True)] == [True, True]

    STRATEGY.run(step)
