"""Horovod over MPI, one process per replica."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tfdist.strategies.table import Place

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["open_horovod"]


def open_horovod(place: Place) -> tf.distribute.Strategy:
    """`hvd_backend.HorovodStrategy`. Raises EnvironmentProblem where Horovod cannot be used."""
    strategy: tf.distribute.Strategy = importlib.import_module("hvd_backend").HorovodStrategy(
        gpu_memory=place.options.gpu_memory
    )
    return strategy
