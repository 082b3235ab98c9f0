"""What layers write, from the replicas' values to one. The sums over replicas are made here by hand."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tests.unit.one_device import STRATEGY
from tfdist.training.state import combined, contributions


def variables() -> list[keras.Variable]:
    """A moving average of 1, a counter of 10, a seed (5, 2) and a flag."""
    with STRATEGY.scope():
        seed = keras.random.SeedGenerator(5).state
        seed.assign([5, 2])
        return [keras.Variable(1.0), keras.Variable(10, dtype="int32"), seed, keras.Variable(False, dtype="bool")]


def values(average: float, counter: int, seed: list[int], flag: bool = True) -> list[tf.Tensor]:
    return [tf.constant(average), tf.constant(counter), tf.constant(seed, tf.int64), tf.constant(flag)]


def together(*replicas: tuple[list[tf.Tensor], bool]) -> list[list[Any]]:
    """What each replica stores, given what its layers have made and whether it had rows."""
    own = variables()
    brought = [contributions(own, made, tf.constant(present)) for made, present in replicas]
    sums = [tf.add_n(parts) for parts in zip(*brought, strict=True)]
    count = tf.constant(float(sum(present for _, present in replicas)))
    return [[v.numpy().tolist() for v in combined(own, made, sums, count)] for made, _ in replicas]


def test_averages_are_averaged_and_counters_count_all_rows() -> None:
    # (2 + 4)/2; 10 + 3 + 1. A seed keeps its first part, which the replicas have changed for themselves.
    mine, other = together((values(2.0, 13, [5, 3]), True), (values(4.0, 11, [99, 3]), True))
    assert mine == other == [3.0, 14, [5, 3], True]


def test_a_replica_without_rows_does_not_count() -> None:
    mine, other = together((values(2.0, 13, [5, 3]), True), (values(1e9, 10**6, [99, 3]), False))
    assert mine == other == [2.0, 13, [5, 3], True]


def test_numbers_that_are_not_finite_without_rows_do_not_count() -> None:
    mine, other = together((values(2.0, 13, [5, 3]), True), (values(float("nan"), 10, [99, 3]), False))
    assert mine == other == [2.0, 13, [5, 3], True]


def test_types_stay() -> None:
    own = variables()
    made = values(2.0, 13, [5, 3])
    sums = contributions(own, made, tf.constant(True))
    assert [v.dtype for v in combined(own, made, sums, tf.constant(1.0))] == [tf.float32, tf.int32, tf.int64, tf.bool]
