"""A small GAN on the handwritten digits: two networks, two optimizers, two losses, one training step.

    python scripts/train.py --task docs/examples/gan.py:Gan --backend mirrored --replicas 2
    mpirun -np 2 python scripts/train.py --task docs/examples/gan.py:Gan --backend horovod

Both commands end with the same weights, to the last bit: the noise comes from `replica.seed()`, which is another one
for each replica and step, and the same on every backend.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import sklearn.datasets
import tensorflow as tf

import tfdist


class Networks(keras.Model):
    """Generator and discriminator as one model, so that the trainer sees all variables."""

    def __init__(self, noise: int) -> None:
        super().__init__()
        layers = keras.layers
        self.generator = keras.Sequential(
            [keras.Input((noise,)), layers.Dense(64, "silu"), layers.Dense(64, "silu"), layers.Dense(64, "sigmoid")]
        )
        self.discriminator = keras.Sequential(
            [keras.Input((64,)), layers.Dense(64, "silu"), layers.Dropout(0.3), layers.Dense(1)]
        )

    def call(self, noise: Any, training: bool = False) -> Any:
        """What the discriminator thinks of generated images, as logits."""
        return self.discriminator(self.generator(noise, training=training), training=training)


@dataclasses.dataclass(kw_only=True)
class Gan(tfdist.Task):
    """Learn to draw digits of 8 by 8 pixels (Goodfellow et al., Generative Adversarial Nets, 2014)."""

    epochs: int = 20
    global_batch_size: int = 64
    learning_rate: float = 1e-3
    noise: int = 16

    def build_model(self) -> keras.Model:
        model = Networks(self.noise)
        model(np.zeros((1, self.noise), np.float32))
        return model

    def build_optimizer(self, learning_rate: float) -> dict[str, keras.optimizers.Optimizer]:
        return {
            "generator": keras.optimizers.Adam(learning_rate, beta_1=0.5),
            "discriminator": keras.optimizers.Adam(learning_rate, beta_1=0.5),
        }

    def dataset(self, split: str) -> Any:
        return (sklearn.datasets.load_digits().data.astype(np.float32) / 16,)

    def evaluation_splits(self) -> tuple[str, ...]:
        return ()

    def train_step(self, replica: tfdist.Replica, batch: Any) -> None:
        (images,) = batch
        model: Networks = replica.model
        noise = tf.random.stateless_normal([tf.shape(images)[0], self.noise], replica.seed())
        with tf.GradientTape(persistent=True) as tape:
            fake = model.generator(noise, training=True)
            real_logits = model.discriminator(images, training=True)[:, 0]
            fake_logits = model.discriminator(fake, training=True)[:, 0]
            losses = {
                "generator": replica.loss(tf.nn.softplus(-fake_logits), name="generator"),
                "discriminator": replica.loss(
                    tf.nn.softplus(-real_logits) + tf.nn.softplus(fake_logits), name="discriminator"
                ),
            }
        for name, loss in losses.items():
            variables = getattr(model, name).trainable_variables
            replica.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True), name=name)
