"""What hand-written loops share with tfdist's task: model, data, and an exception that comes when a file is there."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.cluster.identity import identify
from tfdist.tasks.digits import Digits

BATCH = 32
SAVE_EVERY = 20
KEEP = 3


def raise_if_asked(path: str | Path, rank: int) -> None:
    """On rank 1, once, when somebody has made the file."""
    if rank == 1 and os.path.exists(path):
        os.unlink(path)
        raise ValueError("row 17 cannot be read")


def epoch_of_batches(epoch: int) -> tf.data.Dataset:
    """The training examples in the order of an epoch, which is the same one after a restart."""
    images, labels = Digits().dataset("train")
    whole = len(images) // BATCH * BATCH
    return tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images), seed=epoch).take(whole)


def steps_per_epoch() -> int:
    return len(Digits().dataset("train")[0]) // BATCH


def digest(variables: Iterable[Any]) -> str:
    found = hashlib.sha256()
    for variable in variables:
        found.update(variable.numpy().tobytes())
    return found.hexdigest()


@dataclasses.dataclass(kw_only=True)
class Raising(Digits):
    """The task, with the same exception."""

    raise_when: str = ""

    def losses(self, labels: Any, predictions: Any) -> Any:
        def look(losses: Any) -> Any:
            raise_if_asked(self.raise_when, identify().rank)
            return losses

        losses = super().losses(labels, predictions)
        seen = tf.ensure_shape(tf.numpy_function(look, [losses], losses.dtype, stateful=False), [None])
        return losses + tf.stop_gradient(seen - losses)
