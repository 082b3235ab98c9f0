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


class Seen(keras.metrics.Metric):
    """Counts rows, and returns its variable as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.add_variable((), "zeros", dtype="int64", name="rows")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.rows.assign(self.rows + tf.shape(y_true, tf.int64)[0])

    def result(self) -> Any:
        return self.rows


class Largest(keras.metrics.Metric):
    """Keeps the largest prediction, from `start`."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.start = start
        self.most = self.add_variable((), keras.initializers.Constant(start), name="most")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_pred)))

    def reset_state(self) -> None:
        self.most.assign(self.start)

    def result(self) -> Any:
        return self.most


class Parts(keras.metrics.Mean):
    """A mean, and twice that, as two results."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(y_pred, sample_weight)

    def result(self) -> dict[str, Any]:
        return {"once": super().result(), "twice": 2 * super().result()}


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
    pytest.param(lambda: keras.metrics.TopKCategoricalAccuracy(2), one_hot, id="TopK"),
    pytest.param(lambda: keras.metrics.MeanIoU(3), class_ids, id="MeanIoU"),
    pytest.param(keras.metrics.RootMeanSquaredError, values, id="RootMeanSquaredError"),
    pytest.param(keras.metrics.CosineSimilarity, values, id="CosineSimilarity"),
    pytest.param(keras.metrics.R2Score, values, id="R2Score"),
    pytest.param(Count, classes, id="Count"),
    pytest.param(Seen, classes, id="result is a variable"),
]


def totals(
    metrics: dict[str, Any], data: list[Batch], weighted: bool, by_weight: bool = True
) -> tuple[dict[str, Any], list[tf.Tensor]]:
    """As the evaluation loop does it: traced once, added up over the batches."""
    with STRATEGY.scope():
        reduced = MetricTotals(metrics, by_weight=by_weight)
        reduced.see([batch[:2] for batch in data[:2]])
        spec = [tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in data[0]]

        @tf.function(input_signature=spec)
        def added(labels: tf.Tensor, predictions: tf.Tensor, weights: tf.Tensor) -> Any:
            losses = tf.cast(tf.range(tf.shape(weights)[0]), tf.float32)
            by = weights if weighted else tf.ones_like(weights)
            values = reduced.added(labels, predictions, losses, by, weights if weighted else None)
            present = tf.shape(weights)[0] > 0
            return [tf.where(present, value, tf.zeros_like(value)) for value in values]

        state = reduced.zeros()
        for batch in data:
            state = [total + tf.cast(new, total.dtype) for total, new in zip(state, added(*batch), strict=True)]
    return reduced.results([total.numpy() for total in state]), state


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")  # Keras, of a variable
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


def test_the_loss_may_be_divided_by_the_number_of_rows() -> None:
    data = classes()
    weighted_sum = sum(float((np.arange(len(batch[2])) * batch[2]).sum()) for batch in data)
    assert totals({}, data, True, by_weight=False)[0] == {"loss": pytest.approx(weighted_sum / sum(SIZES))}


@pytest.mark.parametrize("by_weight", [True, False])
def test_a_row_without_weight_counts_for_nothing_whatever_its_loss(by_weight: bool) -> None:
    # Losses 1, NaN, 4 with weights 1, 0, 2: 9, over the weights' sum 3 or the number 3.
    with STRATEGY.scope():
        reduced = MetricTotals({}, by_weight=by_weight)
    weights = tf.constant([1.0, 0.0, 2.0])
    added = reduced.added(None, None, tf.constant([1.0, np.nan, 4.0]), weights, weights)
    assert reduced.results([value.numpy() for value in added]) == {"loss": 3.0}


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


def test_a_metric_may_have_several_results() -> None:
    with STRATEGY.scope():
        reduced = MetricTotals({"mean": Parts(), "count": Count()})
    assert list(reduced.results(reduced.no_totals())) == ["loss", "mean/once", "mean/twice", "count"]
    data = values()
    got, _ = totals({"mean": Parts()}, data, False)
    mean = np.concatenate([np.ravel(batch[1]) for batch in data]).mean()
    assert got["mean/once"] == pytest.approx(mean)
    assert got["mean/twice"] == pytest.approx(2 * mean)


def test_results_of_nothing_have_the_kinds_of_all_others() -> None:
    data = classes()
    with STRATEGY.scope():
        reduced = MetricTotals({"f1": keras.metrics.F1Score(average=None), "mean": keras.metrics.F1Score("macro")})
    labels = [tf.one_hot(np.ravel(batch[0]), 3) for batch in data[:2]]
    reduced.see([(label, label) for label in labels])
    assert reduced.results(reduced.no_totals()) == {"loss": 0, "f1": [0, 0, 0], "mean": 0}


def test_two_results_with_one_name_are_refused() -> None:
    with STRATEGY.scope():
        reduced = MetricTotals({"mean": Parts(), "mean/once": keras.metrics.MeanSquaredError()})
    with pytest.raises(UsageError, match=r"two results the name 'mean/once'\. Rename"):
        reduced.see([batch[:2] for batch in values()[:2]])


@pytest.mark.parametrize("start", [0.0, -np.inf], ids=["from 0", "from -inf"])
@pytest.mark.parametrize("batches_seen", [1, 2])
def test_a_metric_that_keeps_a_maximum_is_refused(start: float, batches_seen: int) -> None:
    with STRATEGY.scope():
        reduced = MetricTotals({"accuracy": keras.metrics.BinaryAccuracy(), "most": Largest(start)})
    with pytest.raises(UsageError) as caught:
        reduced.see([batch[:2] for batch in values()[:batches_seen]])
    assert str(caught.value).startswith("the metric 'most' (Largest) keeps 'most', which is not a sum over examples")
    assert "Keep sums and counts" in str(caught.value)


class MeanOfBatches(keras.metrics.Metric):
    """Adds each batch's mean, and 1: right for batches of one size alone."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.add_variable((), "zeros", name="total")
        self.batches = self.add_variable((), "zeros", name="batches")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign(self.total + keras.ops.mean(y_pred))
        self.batches.assign(self.batches + 1)

    def result(self) -> Any:
        return self.total / self.batches


def test_a_metric_that_averages_over_batches_is_refused() -> None:
    with STRATEGY.scope():
        reduced = MetricTotals({"mean": MeanOfBatches()})
    with pytest.raises(UsageError, match=r"'mean' .MeanOfBatches. keeps 'total', which is not a sum over examples"):
        reduced.see([batch[:2] for batch in values()[:2]])


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


@pytest.mark.parametrize("value", [[keras.metrics.Mean()], {"mean": "mean"}, None], ids=["list", "name", "None"])
def test_what_is_no_dict_of_metrics_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"Task\.metrics returned .*Return a dict of keras\.metrics\.Metric by name"):
        MetricTotals(value)
