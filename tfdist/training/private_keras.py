"""The private Keras names that tfdist needs, each with its reason. `tests/unit/test_private_keras.py` watches them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras

__all__ = ["has_synchronized_layer", "without_second_reduction"]


@contextlib.contextmanager
def without_second_reduction(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """While tracing inside, `optimizer.apply` takes gradients that are already summed over all replicas.

    By itself `apply` sums them over the replicas again (`_all_reduce_sum_gradients`), after it has clipped them. No
    public way leaves that out: outside of a replica, where it would not reduce, `apply` fails under MirroredStrategy.
    Enter it around `strategy.run`, not inside: MirroredStrategy interleaves the traces of its replicas.
    """
    name = "_all_reduce_sum_gradients"
    getattr(optimizer, name)  # a Keras that has renamed it must fail here and not reduce twice
    setattr(optimizer, name, lambda gradients_and_variables: gradients_and_variables)
    try:
        yield
    finally:
        delattr(optimizer, name)


def has_synchronized_layer(model: keras.Model) -> bool:
    """Whether a layer of the model, at any depth, counts its rows over all replicas, as synchronized BatchNorm does.

    `model.layers` does not show the layers inside of a layer that a user has written (`_flatten_layers` does).
    """
    return any(getattr(layer, "synchronized", False) for layer in model._flatten_layers())
