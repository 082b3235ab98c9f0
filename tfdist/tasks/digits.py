"""A small convolutional network on the 1797 handwritten digits (8 by 8 pixels) that scikit-learn ships."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import sklearn.datasets

from tfdist.training.task import Task

__all__ = ["Digits"]


@dataclasses.dataclass(kw_only=True)
class Digits(Task):
    """Classify digits; 80 % of the images train, 20 % test."""

    epochs: int = 30
    global_batch_size: int = 32
    learning_rate: float = 3e-3
    filters: int = 24
    """Filters of the first convolution; the second has twice as many."""

    def build_model(self) -> keras.Model:
        # No kinks (ReLU, maximum): at a kink a difference in the last bit flips a gradient, and two runs that differ
        # by rounding alone part visibly.
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(self.filters, 3, padding="same", activation="silu"),
                keras.layers.Conv2D(2 * self.filters, 3, padding="same", activation="silu"),
                keras.layers.AveragePooling2D(2),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="silu"),
                keras.layers.Dense(10),
            ]
        )

    def build_optimizer(self, learning_rate: float) -> keras.optimizers.Optimizer:
        return keras.optimizers.Adam(learning_rate)

    def dataset(self, split: str) -> Any:
        digits = sklearn.datasets.load_digits()
        images = (digits.images[..., None] / 16).astype(np.float32)
        labels = digits.target.astype(np.int32)
        # The images come sorted by writer: every fifth one tests, so that both splits hold all writers.
        test = np.arange(len(labels)) % 5 == 4
        chosen = test if split == "test" else ~test
        return images[chosen], labels[chosen]

    def losses(self, labels: Any, predictions: Any) -> Any:
        return keras.ops.sparse_categorical_crossentropy(labels, predictions, from_logits=True)

    def metrics(self) -> dict[str, keras.metrics.Metric]:
        return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}
