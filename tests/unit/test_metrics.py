"""Totals over many batches against plain Keras metrics that saw the same batches one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.one_device import STRATEGY
from tfdist.errors import UsageError
from tfdist.training.metrics import MetricTotals

RANDOM = np.random.RandomState(0)
SIZES = (7, 5, 1, 0, 8)  # the fourth batch is empty

Batch = tuple[np.ndarray, np.ndarray, np.ndarray]


def batches(labels: Callable[[int], Any], predictions: Callable[[int], Any]) -> list[Batch]:
    """Labels, predictions, weights."""
    return [(labels(n), predictions(n), RANDOM.rand(n).astype(np.float32)) for n in SIZES]


def binary() -> list[Batch]:
    return batches(lambda n: RANDOM.randint(0, 2, n).astype(np.float32), lambda n: RANDOM.rand(n).astype(np.float32))


def classes() -> list[Batch]:
    return batches(lambda n: RANDOM.randint(0, 3, n), lambda n: RANDOM.rand(n, 3).astype(np.float32))


def one_hot() -> list[Batch]:
    return batches(
        lambda n: np.eye(3, dtype=np.float32)[RANDOM.randint(0, 3, n)], lambda n: RANDOM.rand(n, 3).astype(np.float32)
    )


def class_ids() -> list[Batch]:
    return batches(lambda n: RANDOM.randint(0, 3, n), lambda n: RANDOM.randint(0, 3, n))


def values() -> list[Batch]:
    return batches(lambda n: RANDOM.rand(n, 2).astype(np.float32), lambda n: RANDOM.rand(n, 2).astype(np.float32))


class Count(keras.metrics.Metric):
    """Counts right answers and rows in whole numbers, from a start that is not 0."""

    def __init__(self, name: str = "count") -> None:
        super().__init__(name=name, dtype="int32")
        self.right = self.add_variable((), keras.initializers.Zeros(), dtype="int32", name="right")
        self.rows = self.add_variable((), lambda shape, dtype: keras.ops.full(shape, 100, dtype), dtype="int32")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        same = keras.ops.cast(keras.ops.equal(y_true, keras.ops.argmax(y_pred, -1)), "int32")
        self.right.assign_add(keras.ops.sum(same))
        self.rows.assign_add(keras.ops.shape(y_pred)[0])

    def result(self) -> Any:
        return 1000 * self.right + self.rows


METRICS: list[Any] = [
    pytest.param(keras.metrics.BinaryAccuracy, binary, id="BinaryAccuracy"),
    pytest.param(keras.metrics.AUC, binary, id="AUC"),
    pytest.param(lambda: keras.metrics.AUC(curve="PR"), binary, id="AUC-PR"),
    pytest.param(keras.metrics.Precision, binary, id="Precision"),
    pytest.param(keras.metrics.Recall, binary, id="Recall"),
    pytest.param(lambda: keras.metrics.SensitivityAtSpecificity(0.5), binary, id="SensitivityAtSpecificity"),
    pytest.param(lambda: keras.metrics.F1Score(threshold=0.5), one_hot, id="F1Score"),
    pytest.param(lambda: keras.metrics.AUC(multi_label=True), one_hot, id="AUC-multi_label"),
    pytest.param(keras.metrics.SparseCategoricalAccuracy, classes, id="SparseCategoricalAccuracy"),
    pytest.param(lambda: keras.metrics.SparseTopKCategoricalAccuracy(2), classes, id="SparseTopK"),
    pytest.param(lambda: keras.metrics.MeanIoU(3), class_ids, id="MeanIoU"),
    pytest.param(keras.metrics.RootMeanSquaredError, values, id="RootMeanSquaredError"),
    pytest.param(keras.metrics.CosineSimilarity, values, id="CosineSimilarity"),
    pytest.param(keras.metrics.R2Score, values, id="R2Score"),
    pytest.param(Count, classes, id="Count"),
]


def totals(metrics: dict[str, Any], data: list[Batch], weighted: bool) -> tuple[dict[str, Any], list[tf.Tensor]]:
    """As the evaluation loop does it: traced once, added up over the batches."""
    with STRATEGY.scope():
        reduced = MetricTotals(metrics)
        reduced.see(*data[0][:2])
        spec = [tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in data[0]]

        @tf.function(input_signature=spec)
        def added(labels: tf.Tensor, predictions: tf.Tensor, weights: tf.Tensor) -> Any:
            losses = tf.cast(tf.range(tf.shape(weights)[0]), tf.float32)
            values = reduced.added(labels, predictions, losses, weights if weighted else None)
            present = tf.shape(weights)[0] > 0
            return [tf.where(present, value, tf.zeros_like(value)) for value in values]

        state = reduced.zeros()
        for batch in data:
            state = [total + tf.cast(new, total.dtype) for total, new in zip(state, added(*batch), strict=True)]
    return reduced.results([total.numpy() for total in state]), state


@pytest.mark.filterwarnings("ignore:You are passing weight as `float`")  # MeanIoU adds up whole numbers
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize(("make", "data"), METRICS)
def test_totals_equal_a_plain_metric(make: Callable[[], Any], data: Callable[[], list[Batch]], weighted: bool) -> None:
    seen = data()
    plain = make()
    for labels, predictions, weights in seen:
        if len(weights):
            plain.update_state(labels, predictions, sample_weight=weights if weighted else None)
    want = np.asarray(plain.result())
    got = totals({"metric": make()}, seen, weighted)[0]["metric"]
    assert np.allclose(got, want, rtol=1e-5, atol=0), (got, want)
    assert type(got) is (list if want.ndim else type(want.item()))


@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_is_the_weighted_mean_over_all_rows(weighted: bool) -> None:
    data = classes()
    rows = np.concatenate([np.arange(n) for n in SIZES])
    weights = np.concatenate([batch[2] for batch in data]) if weighted else np.ones(len(rows))
    assert totals({}, data, weighted)[0] == {"loss": pytest.approx((rows * weights).sum() / weights.sum())}


def test_several_metrics_keep_their_order_and_apart() -> None:
    data = binary()
    makes: dict[str, Callable[[], Any]] = {
        "precision": keras.metrics.Precision,
        "auc": keras.metrics.AUC,
        "recall": keras.metrics.Recall,
    }
    together, _ = totals({name: make() for name, make in makes.items()}, data, True)
    assert list(together) == ["loss", "precision", "auc", "recall"]
    for name, make in makes.items():
        assert together[name] == totals({name: make()}, data, True)[0][name]


def test_totals_are_wide() -> None:
    _, state = totals({"count": Count(), "accuracy": keras.metrics.SparseCategoricalAccuracy()}, classes(), False)
    assert [total.dtype for total in state] == [tf.float64, tf.float64, tf.int64, tf.int64, tf.float64, tf.float64]


def test_the_metrics_themselves_stay_as_they_are() -> None:
    metric = Count()
    totals({"count": metric}, classes(), False)
    assert [int(v.numpy()) for v in metric.variables] == [0, 100]


def test_a_long_sum_stays_exact() -> None:
    # 2²⁴ + 1 rows: float32 would stop counting.
    with STRATEGY.scope():
        reduced = MetricTotals({})
    total, count = (t.numpy() for t in reduced.zeros())
    for rows in (2**24, 1, 1, 1, 1):
        total, count = total + np.float32(rows), count + np.float32(rows)
    assert count == 2**24 + 4
    assert reduced.results([total, count])["loss"] == 1.0


def test_the_name_loss_is_taken() -> None:
    with pytest.raises(UsageError, match=r"'loss'.* Rename it"):
        MetricTotals({"loss": keras.metrics.Mean()})
