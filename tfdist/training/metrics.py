"""Metrics are reduced as state (sums and counts) over replicas and batches, and computed once, at the end.

Averaging results over batches or replicas would be wrong for uneven pieces, and for every ratio such as AUC.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UsageError

__all__ = ["MetricTotals"]


class MetricTotals:
    """What a batch adds to the state of some Keras metrics, and the results of the added-up state.

    The state of a metric must be sums over examples, as that of every metric in Keras is. Totals are kept in float64
    or int64, so that long sums stay exact.
    """

    def __init__(self, metrics: dict[str, keras.metrics.Metric]) -> None:
        if not isinstance(metrics, dict) or not all(isinstance(m, keras.metrics.Metric) for m in metrics.values()):
            raise UsageError(f"Task.metrics returned {metrics!r}. Return a dict of keras.metrics.Metric by name.")
        if "loss" in metrics:
            raise UsageError("Task.metrics has an entry 'loss', which the trainer reports itself. Rename it.")
        self._metrics: dict[str, keras.metrics.Metric] = {"loss": keras.metrics.Mean(), **metrics}
        self._collect()

    def see(self, labels: Any, predictions: Any) -> None:
        """Show a few rows to metrics that make their state when they first see data; the rows are not counted."""
        for name, metric in self._metrics.items():
            if name == "loss":
                continue
            made = [(variable, variable.numpy()) for variable in metric.variables]
            metric.update_state(labels, predictions)
            metric.reset_state()
            for variable, value in made:
                variable.assign(value)
        self._collect()

    def _collect(self) -> None:
        self._variables = [v for metric in self._metrics.values() for v in metric.variables]
        self._initial = {name: [v.numpy() for v in metric.variables] for name, metric in self._metrics.items()}

    def describe(self) -> dict[str, list[list[int]]]:
        """The shapes of the state of each metric, by its name."""
        return {name: [list(v.shape) for v in metric.variables] for name, metric in self._metrics.items()}

    def zeros(self) -> list[tf.Tensor]:
        """The totals of nothing."""
        return [tf.zeros(v.shape, _wide(v)) for v in self._variables]

    def added(self, labels: Any, predictions: Any, losses: tf.Tensor, weights: Any) -> list[tf.Tensor]:
        """What these rows add to each total. Runs inside the replica step (traced)."""
        added: list[tf.Tensor] = []
        for name, metric in self._metrics.items():
            start = [tf.convert_to_tensor(initial) for initial in self._initial[name]]
            if name == "loss":
                end = metric.stateless_update_state(start, losses, sample_weight=weights)
            else:
                end = metric.stateless_update_state(start, labels, predictions, sample_weight=weights)
            added += [tf.convert_to_tensor(after) - before for before, after in zip(start, end, strict=True)]
        return added

    def results(self, totals: Sequence[np.ndarray]) -> dict[str, float]:
        """The metrics of added-up totals."""
        remaining = iter(totals)
        results = {}
        for name, metric in self._metrics.items():
            state = [
                tf.cast(initial + next(remaining), variable.dtype)
                for variable, initial in zip(metric.variables, self._initial[name], strict=True)
            ]
            result = metric.stateless_result(state)
            parts = {f"{name}/{key}": value for key, value in result.items()} if isinstance(result, dict) else None
            for key, value in (parts or {name: result}).items():
                array = np.asarray(keras.ops.convert_to_numpy(value))
                results[key] = array.item() if array.ndim == 0 else array.tolist()
        return results


def _wide(variable: keras.Variable) -> tf.DType:
    return tf.float64 if keras.backend.is_float_dtype(variable.dtype) else tf.int64
