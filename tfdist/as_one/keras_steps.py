"""What Keras decides in a training step, where the replicas are in several processes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UsageError

__all__ = ["require_shared_metrics", "step_alike"]


def require_shared_metrics(model: Any) -> None:
    """Refuse metrics that were made outside the scope: each process would keep, and act on, numbers of its own."""
    extended = model.distribute_strategy.extended
    for metric in _each(model.metrics):
        for variable in metric.variables:
            if not extended.variable_created_in_scope(getattr(variable, "value", variable)):
                raise UsageError(
                    f"the metric {metric.name!r} was made outside of strategy.scope(), so every process would count "
                    "for itself. Make metrics, and call model.compile, inside `with strategy.scope():`."
                )


def _each(metrics: list[Any]) -> Iterator[Any]:
    """The metrics themselves: what `compile` was given comes as one metric of many."""
    for metric in metrics:
        inner = getattr(metric, "metrics", None)
        yield from _each(inner) if inner else (metric,)


@functools.cache
def step_alike() -> None:
    """`LossScaleOptimizer` skips a step on all replicas where it overflowed on any of them.

    Keras asks the gradients of the first replica of each process, before they are added up. Processes then go
    different ways, and those that do not skip wait for the others.
    """
    check_finite = keras.optimizers.LossScaleOptimizer.check_finite

    @functools.wraps(check_finite)
    def check_finite_everywhere(self: Any, grads: Any) -> Any:
        finite = check_finite(self, grads)
        context = tf.distribute.get_replica_context()
        strategy = tf.distribute.get_strategy()
        if context is None or not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            return finite
        return tf.equal(context.all_reduce(tf.distribute.ReduceOp.SUM, 1 - tf.cast(finite, tf.int32)), 0)

    keras.optimizers.LossScaleOptimizer.check_finite = check_finite_everywhere
