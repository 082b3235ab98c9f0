"""Reproducible runs of several tasks, on one backend and at some numbers of replicas.

    python reproducible_program.py FOLDER BACKEND 4,2,1        or under mpirun, where the number is that of the ranks

Writes what came out, for each number of replicas and case, to FOLDER/BACKEND-rank.json. Started by
`test_reproducible.py`. A case `resumed` goes on from FOLDER/begun, where there is such a folder.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.full import full
from tests.resumable import Resumable
from tfdist import Task, Trainer
from tfdist.cluster.identity import identify

RANK = identify().rank


@dataclasses.dataclass(kw_only=True)
class Cnn(Resumable):
    """Convolutions, BatchNormalization, Keras's own dropout, Adam; 37 images in batches of 16 and a rest of 5."""

    epochs: int = 2
    global_batch_size: int = 16

    def build_model(self) -> keras.Model:
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input([6, 6, 2]),
                layers.Conv2D(8, 3, padding="same", use_bias=False, kernel_regularizer=keras.regularizers.L2(1e-3)),
                layers.BatchNormalization(momentum=0.7),
                layers.Activation("relu"),
                layers.SpatialDropout2D(0.2),
                layers.Conv2D(8, 3),
                layers.BatchNormalization(),
                layers.MaxPooling2D(2),
                layers.Flatten(),
                layers.Dropout(0.3),
                layers.Dense(32, activation="gelu"),
                layers.Dense(3),
            ]
        )

    def dataset(self, split: str) -> Any:
        random = np.random.RandomState(len(split))
        labels = random.randint(0, 3, self.rows)
        return random.randn(self.rows, 6, 6, 2).astype(np.float32), labels, random.rand(self.rows).astype(np.float32)

    def augment(self, example: Any, seed: tf.Tensor) -> Any:
        inputs, *rest = example
        return inputs + 0.1 * tf.random.stateless_normal(inputs.shape, seed), *rest


@dataclasses.dataclass(kw_only=True)
class Transformer(Resumable):
    """One block of attention over 12 tokens, with an embedding, dropout, layer normalization and AdamW."""

    global_batch_size: int = 16

    def build_model(self) -> keras.Model:
        layers = keras.layers
        tokens = keras.Input([12], dtype="int32")
        x = layers.Embedding(20, 16)(tokens)
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, 8, dropout=0.1)(y, y, use_causal_mask=True)
        y = layers.Dense(32, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dropout(0.1)(layers.Dense(16)(y))
        return keras.Model(tokens, layers.Dense(20)(x))

    def build_optimizer(self, learning_rate: float) -> Any:
        return keras.optimizers.AdamW(learning_rate)

    def dataset(self, split: str) -> Any:
        tokens = np.random.RandomState(len(split)).randint(0, 20, [self.rows, 13]).astype(np.int32)
        return tokens[:, :-1], tokens[:, 1:]

    def losses(self, labels: Any, predictions: Any) -> tf.Tensor:
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, predictions), 1)

    def augment(self, example: Any, seed: tf.Tensor) -> Any:
        inputs, labels = example
        return tf.where(tf.random.stateless_uniform(inputs.shape, seed) < 0.1, 0, inputs), labels


class WithNoise(Resumable):
    """A step of its own that draws for each shard, and looks at the ids of the shards."""

    def train_step(self, replica: Any, batch: Any) -> None:
        inputs, labels = batch
        noise = tf.random.stateless_normal(tf.shape(inputs), replica.seed())
        with tf.GradientTape() as tape:
            losses = self.losses(labels, replica.model(inputs + noise, training=True))
            loss = replica.loss(losses * (1.0 + 0.1 * tf.cast(replica.id, tf.float32)))
        variables = replica.model.trainable_variables
        replica.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


ALL: dict[str, tuple[Task, dict[str, Any]]] = {
    "cnn": (Cnn(), {}),
    "transformer": (Transformer(), {}),
    "small batches": (WithNoise(), {"global_batch_size": 5}),  # fewer rows than shards
    "accumulate": (Cnn(), {"accumulate": 2, "clip_global_norm": 1.0, "ema": 0.9}),
    "twelve shards": (Resumable(), {"virtual_shards": 12}),
    "float16": (Resumable(), {"precision": "float16"}),
}
CASES = ALL if full() else {name: ALL[name] for name in ("cnn", "transformer")}


def train(task: Task, backend: str, replicas: int | None, **settings: Any) -> dict[str, Any]:
    report = Trainer(task, backend=backend, replicas=replicas, reproducible=True, quiet=True, **settings).fit()
    kept = ("state_sha256", "weights_sha256", "losses", "penalties", "metrics", "steps", "examples_seen")
    return {name: getattr(report, name) for name in kept}


def main(folder: Path, backend: str, counts: list[int]) -> None:
    found: dict[str, dict[str, Any]] = {}
    for count in counts:
        replicas = count if backend in ("mirrored", "central_storage") else None
        for name, (task, settings) in CASES.items():
            if settings.get("virtual_shards", 8) % count == 0:
                found[f"{count} {name}"] = train(task, backend, replicas, **settings)
        begun = str(folder / "begun")
        if backend == "mirrored" and count == max(counts):
            train(Cnn(), backend, replicas, checkpoint_dir=begun, stop_after_steps=4)
        if 8 % count == 0 and (full() or backend in ("one_device", "horovod")):
            found[f"{count} resumed"] = train(Cnn(), backend, replicas, resume=begun)
    (folder / f"{backend}-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [int(count) for count in sys.argv[3].split(",")])
