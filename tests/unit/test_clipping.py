"""Clipping against values worked out by hand, and against TensorFlow's own functions."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.toy import ToyLine
from tests.unit.one_device import trainer
from tfdist import Settings
from tfdist.errors import NonFiniteError
from tfdist.training.clipping import clipped
from tfdist.training.gradients import Gradient, is_sparse, on_values

KINDS = ("clip_value", "clip_norm", "clip_global_norm")


def gradients() -> list[Gradient]:
    """(3, −4), of norm 5, and row 1 of a table of three rows, (12, 0), of norm 12; together of norm 13."""
    row = tf.IndexedSlices(tf.constant([[12.0, 0.0]]), tf.constant([1]), tf.constant([3, 2]))
    return [tf.constant([3.0, -4.0]), row]


def numbers(values: list[Gradient]) -> list[Any]:
    return [tf.convert_to_tensor(value).numpy().tolist() for value in values]


def near(*values: Any) -> list[Any]:
    return [pytest.approx(np.array(value), rel=1e-6) for value in values]


@pytest.mark.parametrize(
    ("settings", "right"),
    [
        ({}, [[3, -4], [[0, 0], [12, 0], [0, 0]]]),
        ({"clip_value": 3.5}, [[3, -3.5], [[0, 0], [3.5, 0], [0, 0]]]),
        ({"clip_value": 20.0}, [[3, -4], [[0, 0], [12, 0], [0, 0]]]),
        ({"clip_norm": 6.0}, [[3, -4], [[0, 0], [6, 0], [0, 0]]]),
        ({"clip_norm": 2.5}, [[1.5, -2], [[0, 0], [2.5, 0], [0, 0]]]),
        ({"clip_global_norm": 6.5}, [[1.5, -2], [[0, 0], [6, 0], [0, 0]]]),
        ({"clip_global_norm": 13.5}, [[3, -4], [[0, 0], [12, 0], [0, 0]]]),
    ],
    ids=str,
)
def test_values_worked_out_by_hand(settings: dict[str, float], right: list[Any]) -> None:
    result = clipped(gradients(), Settings.of(**settings))
    assert numbers(result) == near(*right)
    assert [is_sparse(g) for g in result] == [False, True], "a table's rows stay rows"


@pytest.mark.parametrize("limit", [0.1, 1.0, 5.0, 100.0])
@pytest.mark.parametrize("kind", KINDS)
def test_tensorflows_own_functions_agree(kind: str, limit: float) -> None:
    random = np.random.RandomState(0)
    dense = [tf.constant(random.randn(*shape), tf.float32) for shape in ((3, 4), (5,), ())]
    rows = tf.IndexedSlices(tf.constant(random.randn(2, 3), tf.float32), tf.constant([4, 0]), tf.constant([6, 3]))
    right = {
        "clip_value": lambda all_: [tf.clip_by_value(g, -limit, limit) for g in all_],
        "clip_norm": lambda all_: [tf.clip_by_norm(g, limit) for g in all_],
        "clip_global_norm": lambda all_: tf.clip_by_global_norm(all_, limit)[0],
    }[kind]([*dense, tf.convert_to_tensor(rows)])
    got = clipped([*dense, rows], Settings.of(**{kind: limit}))
    assert numbers(got) == near(*(value.numpy() for value in right))


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_stays_none(kind: str) -> None:
    zeros = [tf.zeros([2]), tf.IndexedSlices(tf.zeros([0, 2]), tf.zeros([0], tf.int64), tf.constant([3, 2]))]
    assert numbers(clipped(zeros, Settings.of(**{kind: 1.0}))) == [[0, 0], [[0, 0]] * 3]
    assert clipped([], Settings.of(**{kind: 1.0})) == []


def test_a_norm_that_is_not_finite_shows() -> None:
    for kind in ("clip_norm", "clip_global_norm"):
        (got,) = clipped([tf.constant([1.0, math.nan])], Settings.of(**{kind: 1.0}))
        assert np.isnan(got.numpy()).any()


@pytest.mark.parametrize("kind", ["clip_norm", "clip_global_norm"])
def test_a_norm_that_is_too_large_for_its_type_shows(kind: str) -> None:
    # (1e30)² is no float32, while each element is.
    row = tf.IndexedSlices(tf.constant([[1e30, 1.0]]), tf.constant([1]), tf.constant([3, 2]))
    for large in (tf.fill([3], 1e30), row):
        (got,) = clipped([large], Settings.of(**{kind: 1.0}))
        values = (got.values if is_sparse(got) else got).numpy()
        assert not np.isfinite(values).all()
        assert is_sparse(got) == is_sparse(large)


def test_a_norm_that_is_too_large_is_of_its_own_gradient_alone() -> None:
    large, small = clipped([tf.fill([3], 1e30), tf.constant([3.0, -4.0])], Settings.of(clip_norm=2.5))
    assert np.isnan(large.numpy()).all()
    assert numbers([small]) == near([1.5, -2])


class Steep(ToyLine):
    """A loss whose gradient is 1e30 for each of two weights, and rows that have none."""

    def build_model(self) -> keras.Model:
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])

    def dataset(self, split: str) -> Any:
        return np.array([[1e15, 1e15], [1.0, 0.0]], np.float32), np.array([1e15, 1.0], np.float32)

    def losses(self, labels: Any, predictions: Any) -> tf.Tensor:
        return labels * predictions[:, 0]


@pytest.mark.parametrize("kind", ["clip_norm", "clip_global_norm"])
class TestThroughTheTrainer:
    def test_such_a_step_is_refused(self, kind: str) -> None:
        made = trainer(Steep(global_batch_size=1), shuffle_buffer=0, **{kind: 1.0})
        with pytest.raises(NonFiniteError, match=r"^step 1: "):
            made.fit()
        assert made.model.get_weights()[0].tolist() == [[1.0], [1.0]]

    def test_or_skipped(self, kind: str) -> None:
        # Step 2 has the gradient (1, 0).
        made = trainer(Steep(global_batch_size=1), shuffle_buffer=0, nan_policy="skip", **{kind: 1.0})
        assert made.fit().skipped_steps == 1
        assert made.model.get_weights()[0].tolist() == [[pytest.approx(0.9)], [1.0]]


def test_a_change_of_values_leaves_the_rows() -> None:
    dense, row = (on_values(g, lambda values: values * 2) for g in gradients())
    assert numbers([dense, row]) == [[6, -8], [[0, 0], [24, 0], [0, 0]]]
    assert row.indices.numpy().tolist() == [1]
