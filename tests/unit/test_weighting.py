"""Losses and weights of a batch: what they must be, and how what is wrong is counted."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.toy import ToyLine
from tests.unit.one_device import trainer
from tfdist.errors import UsageError
from tfdist.training.weighting import FAULTS, combined_weights, fault_of, per_value


def result(losses: Any, weights: Any = None, mask: Any = None, rows: int | None = None) -> tuple[Any, Any, list[float]]:
    """Losses, weights and faults, as numbers."""
    rows = len(losses) if rows is None else rows
    values, by, faults = per_value(losses, weights, mask, tf.constant(rows))
    return values.numpy().tolist(), by.numpy().tolist(), faults.numpy().tolist()


class TestWeights:
    def test_each_loss_counts_once_by_itself(self) -> None:
        assert result([3.0, 5.0]) == ([3.0, 5.0], [1.0, 1.0], [0, 0, 0])

    @pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, np.int64, np.bool_])
    def test_weights_of_any_type(self, kind: type) -> None:
        assert result([3.0, 5.0], np.array([0, 1], kind)) == ([3.0, 5.0], [0.0, 1.0], [0, 0, 0])

    @pytest.mark.parametrize(
        ("losses", "weights"),
        [(tf.float16, tf.float32), (tf.bfloat16, tf.float32), (tf.float32, tf.float32), (tf.float64, tf.float64)],
    )
    def test_weights_have_the_type_of_the_losses_but_never_a_half(self, losses: tf.DType, weights: tf.DType) -> None:
        values, by, _ = per_value(tf.ones([2], losses), tf.ones([2], tf.float16), None, tf.constant(2))
        assert (values.dtype, by.dtype) == (losses, weights)

    def test_one_weight_for_each_row_of_many_losses(self) -> None:
        losses = np.ones((2, 3), np.float32)
        mask = np.array([[1, 1, 0], [1, 0, 0]], np.bool_)
        assert result(losses, [2.0, 3.0], mask)[1] == [[2, 2, 0], [3, 0, 0]]

    def test_one_weight_for_each_of_many_losses(self) -> None:
        losses, weights = np.ones((2, 2), np.float32), [[1.0, 0.0], [0.5, 2.0]]
        assert result(losses, weights)[1] == weights
        assert result(losses, weights, np.array([[0, 1], [1, 1]], np.bool_))[1] == [[0.0, 0.0], [0.5, 2.0]]

    def test_a_mask_of_tokens_is_left_aside_where_losses_are_of_rows(self) -> None:
        assert result([1.0, 1.0], [2.0, 3.0], np.zeros((2, 3), np.bool_))[1] == [2.0, 3.0]
        assert result([1.0, 1.0], None, np.array([True, False]))[1] == [1.0, 0.0]

    def test_combined_weights_broadcast_over_the_last_axes(self) -> None:
        by = combined_weights(tf.ones([2, 1, 2]), tf.constant([1.0, 2.0]), None)
        assert by.numpy().tolist() == [[[1, 1]], [[2, 2]]]

    def test_no_rows(self) -> None:
        assert result([], []) == ([], [], [0, 0, 0])


class TestRefusals:
    @pytest.mark.parametrize("shape", [(), (4, 3), (4, 1), (4, 3, 2)])
    @pytest.mark.parametrize("other", ["nothing", "weights of rows", "mask of rows", "one weight"])
    def test_losses_that_are_not_one_for_each_row(self, shape: tuple[int, ...], other: str) -> None:
        weights = np.ones(4, np.float32) if other == "weights of rows" else None
        weights = np.float32(1) if other == "one weight" else weights
        mask = np.ones(4, np.bool_) if other == "mask of rows" else None
        with pytest.raises(UsageError) as caught:
            per_value(tf.ones(shape), weights, mask, tf.constant(4))
        message = str(caught.value)
        assert f"the loss has shape {shape}, but must have one value per example, shape [rows]" in message
        assert "reduction=None" in message
        assert "weights or a mask of the same shape" in message

    @pytest.mark.parametrize(("losses", "weights"), [((4,), ()), ((4,), (4, 1)), ((4, 3), (4, 3, 1))])
    def test_weights_of_another_rank(self, losses: tuple[int, ...], weights: tuple[int, ...]) -> None:
        mask = tf.ones(losses, tf.bool)
        with pytest.raises(UsageError) as caught:
            per_value(tf.ones(losses), tf.ones(weights), mask, tf.constant(4))
        assert str(caught.value) == (
            f"the weight has shape {weights}, but must have one value per example, shape [rows], or one per loss, "
            f"shape {losses}."
        )

    def test_weights_that_do_not_fit_the_losses(self) -> None:
        for what, weights, mask in (
            ("the weight", tf.ones([4, 3]), None),
            ("the mask", None, tf.ones([4, 3], tf.bool)),
        ):
            with pytest.raises(UsageError) as caught:
                per_value(tf.ones([4, 5]), weights, mask, tf.constant(4))
            assert str(caught.value) == (
                f"{what} has shape (4, 3), which does not fit the loss of shape (4, 5). Give one value per example, "
                "or one per loss."
            )

    @pytest.mark.parametrize("losses", [{"a": np.ones(4, np.float32)}, None], ids=["dict", "None"])
    def test_losses_that_are_no_tensor(self, losses: Any) -> None:
        with pytest.raises(UsageError) as caught:
            per_value(losses, None, None, tf.constant(4))
        assert f"the loss is a {type(losses).__name__}, but must be a tensor" in str(caught.value)


class TestFaults:
    def test_another_number_of_losses_is_counted_and_they_become_zeros(self) -> None:
        assert result([1.0, 2.0], rows=3) == ([0, 0, 0], [1, 1, 1], [1, 0, 0])

    def test_another_number_of_weights_is_counted_and_they_become_zeros(self) -> None:
        assert result([1.0, 2.0, 3.0], [1.0, 1.0]) == ([1, 2, 3], [0, 0, 0], [0, 1, 0])
        losses = np.ones((3, 2), np.float32)
        assert result(losses, np.ones((2, 2), np.float32))[2] == [0, 1, 0]

    @pytest.mark.parametrize("bad", [-0.5, math.nan, math.inf, -math.inf])
    def test_a_bad_weight_is_counted(self, bad: float) -> None:
        assert result([1.0, 2.0], [1.0, bad])[2] == [0, 0, 1]
        assert result(np.ones((1, 2), np.float32), [[1.0, bad]])[2] == [0, 0, 1]

    def test_what_counts_tell(self) -> None:
        assert fault_of([0, 0, 0]) is None
        assert [fault_of(counts) for counts in np.eye(3)] == list(FAULTS)
        assert fault_of([0, 2, 3]) == FAULTS[1], "the first"
        with pytest.raises(ValueError, match="zip"):
            fault_of([0, 0])


class Short(ToyLine):
    """A loss too few."""

    def losses(self, labels: Any, predictions: Any) -> Any:
        return super().losses(labels, predictions)[:-1]


class Tokens(ToyLine):
    """Five losses in each row, and three weights."""

    def dataset(self, split: str) -> Any:
        return np.ones((4, 5), np.float32), np.zeros((4, 5), np.float32), np.ones((4, 3), np.float32)

    def build_model(self) -> keras.Model:
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(5)])

    def losses(self, labels: Any, predictions: Any) -> Any:
        return tf.square(predictions - labels)


@dataclasses.dataclass(kw_only=True)
class NoTensor(ToyLine):
    """Losses by name, or none."""

    by_name: bool

    def losses(self, labels: Any, predictions: Any) -> Any:
        return {"a": super().losses(labels, predictions)} if self.by_name else None


class Judged(ToyLine):
    """`ToyLine` with weights in evaluation alone."""

    def dataset(self, split: str) -> Any:
        rows = super().dataset(split)
        return rows if split == "test" else rows[:2]


class TestThroughTheTrainer:
    def test_a_bad_weight_stops_at_its_step(self) -> None:
        made = trainer(ToyLine(weights=[1, 1, 1, -1], global_batch_size=2), shuffle_buffer=0)
        with pytest.raises(
            UsageError, match=r"^step 2: a weight is negative or not a number\. .*not applied"
        ) as caught:
            made.fit()
        assert caught.value.shared
        # Step 1 saw targets 0 and 1: w = 1 + 0.2·(0.5 − 1).
        assert made.model.get_weights()[0][0][0] == pytest.approx(0.9)

    def test_losses_of_another_number_stop_at_the_first_step(self) -> None:
        made = trainer(Short())
        with pytest.raises(UsageError, match=r"^step 1: the loss must have one value per example"):
            made.fit()
        assert made.model.get_weights() == [[[1.0]]]

    @pytest.mark.parametrize(("by_name", "kind"), [(True, "dict"), (False, "NoneType")])
    def test_losses_that_are_no_tensor_are_found_before_training(self, by_name: bool, kind: str) -> None:
        for call in (lambda made: made.fit(), lambda made: made.evaluate("train")):
            with pytest.raises(UsageError, match=f"the loss is a {kind}, but must be a tensor"):
                call(trainer(NoTensor(by_name=by_name)))

    def test_weights_that_do_not_fit_are_found_before_training(self) -> None:
        for call in (lambda made: made.fit(), lambda made: made.evaluate("train")):
            with pytest.raises(UsageError, match=r"the weight has shape \(.*3\), which does not fit the loss"):
                call(trainer(Tokens()))

    def test_evaluation_has_the_same_checks(self) -> None:
        with pytest.raises(UsageError, match=r"^in evaluation: a weight is negative or not a number") as caught:
            trainer(Judged(weights=[1, 1, 1, math.nan])).evaluate("test")
        assert caught.value.shared
        with pytest.raises(UsageError, match=r"^in evaluation: the loss must have one value per example"):
            trainer(Short()).evaluate("test")

    def test_a_row_without_weight_may_have_a_loss_that_is_not_a_number_in_evaluation(self) -> None:
        # (1 − 0)², (1 − 2)² and (1 − 3)² with weights 1, 2, 1: 7/4.
        task = Judged(targets=[0, math.nan, 2, 3], weights=[1, 0, 2, 1], global_batch_size=3)
        assert trainer(task).evaluate("test") == {"loss": 1.75}
