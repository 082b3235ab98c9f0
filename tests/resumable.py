"""A task in which much must be kept for a run to go on as if nothing had happened."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import Task

__all__ = ["Resumable", "Twins"]


@dataclasses.dataclass(kw_only=True)
class Resumable(Task):
    """BatchNorm's statistics, dropout, augmentation, Adam's slots, shuffling; 37 rows in batches of 8."""

    epochs: int = 3
    global_batch_size: int = 8
    learning_rate: float = 1e-2
    rows: int = 37
    width: int = 6

    def build_model(self) -> keras.Model:
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input([4]),
                layers.Dense(self.width),
                layers.BatchNormalization(momentum=0.7),
                layers.Dropout(0.3, seed=1),
                layers.Dense(3),
            ]
        )

    def build_optimizer(self, learning_rate: float) -> Any:
        return keras.optimizers.Adam(learning_rate)

    def dataset(self, split: str) -> Any:
        random = np.random.RandomState(len(split))
        return random.randn(self.rows, 4).astype(np.float32), random.randint(0, 3, self.rows)

    def losses(self, labels: Any, predictions: Any) -> tf.Tensor:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, predictions)

    def metrics(self) -> dict[str, keras.metrics.Metric]:
        return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}

    def augment(self, example: Any, seed: tf.Tensor) -> Any:
        inputs, label = example
        return inputs + 0.1 * tf.random.stateless_normal([4], seed), label


class Twins(Resumable):
    """Two optimizers, each with variables of its own."""

    def build_optimizer(self, learning_rate: float) -> Any:
        return {"first": keras.optimizers.Adam(learning_rate), "second": keras.optimizers.SGD(learning_rate, 0.9)}

    def train_step(self, replica: Any, batch: Any) -> None:
        inputs, labels = batch
        for name, part in (("first", slice(0, 2)), ("second", slice(2, None))):
            with tf.GradientTape() as tape:
                losses = self.losses(labels, replica.model(inputs, training=True))
                loss = replica.loss(losses, name=name)
            variables = replica.model.trainable_variables[part]
            pairs = zip(tape.gradient(loss, variables), variables, strict=True)
            replica.apply_gradients(pairs, name=name)
