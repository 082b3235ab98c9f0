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

    def __init__(self, metrics: dict[str, keras.metrics.Metric], *, by_weight: bool = True) -> None:
        """Take a task's metrics.

        Args:
            by_weight: whether the loss is Σ weight·loss / Σ weight, or divided by the number of losses.

        Raises:
            UsageError: these are not metrics, or one takes the name of the loss.
        """
        self._by_weight = by_weight
        if not isinstance(metrics, dict) or not all(isinstance(m, keras.metrics.Metric) for m in metrics.values()):
            raise UsageError(f"Task.metrics returned {metrics!r}. Return a dict of keras.metrics.Metric by name.")
        if "loss" in metrics:
            raise UsageError("Task.metrics has an entry 'loss', which the trainer reports itself. Rename it.")
        self._metrics: dict[str, keras.metrics.Metric] = {"loss": keras.metrics.Mean(), **metrics}
        self._collect()

    def see(self, examples: Sequence[tuple[Any, Any]]) -> None:
        """Show batches of (labels, predictions) to the metrics; they are not counted.

        Metrics that make their state when they first see data do so now, and each is tried for what the trainer
        relies on.

        Raises:
            UsageError: the state of a metric is not a sum over examples, or two results have one name.
        """
        for name, metric in self._metrics.items():
            if name == "loss":
                continue
            made = [(variable, variable.numpy()) for variable in metric.variables]
            metric.update_state(*examples[0])
            metric.reset_state()
            self._try(name, metric, examples)
            for variable, value in made:
                variable.assign(value)
        self._collect()
        self.results(self.no_totals())

    def _try(self, name: str, metric: keras.metrics.Metric, examples: Sequence[tuple[Any, Any]]) -> None:
        """Whether what two batches add to the state, one after the other or as one, is what they add each by itself."""
        if len(examples) == 1:
            examples = [*examples, *examples]
        orders = [list(examples)]
        if _dense(examples):
            orders.append([tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *examples)])
        start = [v.numpy().astype(np.float64) for v in metric.variables]
        together: list[np.ndarray] = []
        for i, batch in enumerate(examples):
            metric.reset_state()
            metric.update_state(*batch)
            added = [v.numpy() - s for v, s in zip(metric.variables, start, strict=True)]
            together = added if i == 0 else [t + a for t, a in zip(together, added, strict=True)]
        for batches in orders:
            metric.reset_state()
            for batch in batches:
                metric.update_state(*batch)
            for variable, before, sum_of_parts in zip(metric.variables, start, together, strict=True):
                adds = np.allclose(variable.numpy() - before, sum_of_parts, rtol=1e-4, atol=1e-5, equal_nan=True)
                if not adds or not np.isfinite(before).all():
                    raise UsageError(
                        f"the metric {name!r} ({type(metric).__name__}) keeps {variable.name!r}, which is not a sum "
                        "over examples: it cannot be added up over replicas. Keep sums and counts, and divide in "
                        "result()."
                    )
        metric.reset_state()

    def _collect(self) -> None:
        self._variables = [v for metric in self._metrics.values() for v in metric.variables]
        self._initial = {name: [v.numpy() for v in metric.variables] for name, metric in self._metrics.items()}

    def describe(self) -> dict[str, list[list[int]]]:
        """The shapes of the state of each metric, by its name."""
        return {name: [list(v.shape) for v in metric.variables] for name, metric in self._metrics.items()}

    def no_totals(self) -> list[np.ndarray]:
        """The totals of nothing, as `results` takes them."""
        return [np.zeros(v.shape) for v in self._variables]

    def zeros(self) -> list[tf.Tensor]:
        """The totals of nothing."""
        return [tf.zeros(v.shape, _wide(v)) for v in self._variables]

    def added(
        self, labels: Any, predictions: Any, losses: tf.Tensor, weights: tf.Tensor, sample_weight: Any
    ) -> list[tf.Tensor]:
        """What these rows add to each total. Runs inside the replica step (traced).

        Args:
            weights: a weight for each loss.
            sample_weight: what the metrics get; None where there are no weights.
        """
        losses = tf.where(weights > 0, tf.cast(losses, weights.dtype), tf.zeros_like(weights))
        added: list[tf.Tensor] = []
        for name, metric in self._metrics.items():
            start = [tf.convert_to_tensor(initial) for initial in self._initial[name]]
            if name == "loss":
                values, by = (losses, weights) if self._by_weight else (losses * weights, None)
                end = metric.stateless_update_state(start, values, sample_weight=by)
            else:
                end = metric.stateless_update_state(start, labels, predictions, sample_weight=sample_weight)
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
            with keras.StatelessScope(list(zip(metric.variables, state, strict=True))):
                # In the scope: a metric may return its variable as it is, whose value is another one outside.
                result = tf.nest.map_structure(keras.ops.convert_to_numpy, metric.result())
            parts = {f"{name}/{key}": value for key, value in result.items()} if isinstance(result, dict) else None
            for key, value in (parts or {name: result}).items():
                if key in results:
                    raise UsageError(f"Task.metrics gives two results the name {key!r}. Rename one of the metrics.")
                array = np.asarray(value)
                results[key] = array.item() if array.ndim == 0 else array.tolist()
        return results


def _dense(examples: Sequence[tuple[Any, Any]]) -> bool:
    return not any(isinstance(leaf, tf.SparseTensor | tf.RaggedTensor) for leaf in tf.nest.flatten(examples))


def _wide(variable: keras.Variable) -> tf.DType:
    return tf.float64 if keras.backend.is_float_dtype(variable.dtype) else tf.int64
