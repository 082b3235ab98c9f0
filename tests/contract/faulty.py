"""Small tasks for `tfdist compare`: one that is right, and some with a fault on rank 1 of Horovod."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from tests.toy import ToyNet
from tfdist.cluster.identity import identify
from tfdist.training import exchange

# Both backends read this file; the command line tells which one runs.
HERE_IS_THE_FAULT = identify().rank == 1 and "horovod" in sys.argv


@dataclasses.dataclass(kw_only=True)
class Net(ToyNet):
    """The toy net, by a name that a command line can give."""


class WrongDivisor(Net):
    """The gradients of all replicas are divided by twice their weight."""

    def build_model(self) -> Any:
        if HERE_IS_THE_FAULT:
            right = exchange._over
            exchange._over = lambda gradient, divisor: right(gradient, 2.0 * divisor)
        return super().build_model()


class WrongLoss(Net):
    """Each loss counts half as much again."""

    def losses(self, labels: Any, predictions: Any) -> Any:
        return super().losses(labels, predictions) * (1.5 if HERE_IS_THE_FAULT else 1.0)


class WrongLabels(Net):
    """The labels of the training split are shifted by one row; on both ranks of Horovod."""

    def dataset(self, split: str) -> Any:
        inputs, labels = super().dataset(split)
        return inputs, [*labels[1:], labels[0]] if "horovod" in sys.argv else labels
