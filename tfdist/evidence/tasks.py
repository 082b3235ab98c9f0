"""Small tasks whose results can be worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.training.task import Task

__all__ = ["Augmented", "Drops", "Line", "Net", "Noisy", "Normalized", "Pair", "Table", "Twins"]

_ONES = "ones"


@dataclasses.dataclass(kw_only=True)
class Line(Task):
    """One weight w from 1 (and a bias b from 0, if asked for); prediction w·x + b with x = 1; loss (prediction − y)².

    With SGD and learning rate 0.1, a step on rows with mean target m gives w ← w + 0.2·(m − w).
    """

    learning_rate: float = 0.1
    global_batch_size: int = 4
    targets: tuple[float, ...] = (0.0, 1.0, 2.0, 3.0)
    tests: tuple[float, ...] = ()
    """Targets of the test split; without any there is no evaluation."""
    inputs: tuple[float, ...] | None = None
    weights: tuple[float, ...] | None = None
    bias: bool = False
    l2: float = 0.0
    """Penalty l2·w²."""
    activity: float = 0.0
    """Penalty on the outputs: the mean of activity·prediction²."""
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of SGD."""

    def evaluation_splits(self) -> tuple[str, ...]:
        return ("test",) if self.tests else ()

    def build_model(self) -> keras.Model:
        dense = keras.layers.Dense(
            1,
            use_bias=self.bias,
            kernel_initializer=_ONES,
            kernel_regularizer=keras.regularizers.L2(self.l2) if self.l2 else None,
            activity_regularizer=keras.regularizers.L2(self.activity) if self.activity else None,
        )
        return keras.Sequential([keras.Input((1,)), dense])

    def build_optimizer(self, learning_rate: float) -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(**{"learning_rate": learning_rate, **self.optimizer})

    def dataset(self, split: str) -> Any:
        labels = np.array(self.tests if split == "test" else self.targets, np.float32)
        inputs = np.ones(len(labels)) if self.inputs is None or split == "test" else np.array(self.inputs)
        rows = inputs.astype(np.float32)[:, None], labels
        return rows if self.weights is None or split == "test" else (*rows, np.array(self.weights, np.float32))

    def losses(self, labels: Any, predictions: Any) -> tf.Tensor:
        return tf.square(predictions[:, 0] - labels)


@dataclasses.dataclass(kw_only=True)
class Augmented(Line):
    """The targets change at random, in the input pipeline."""

    def augment(self, example: Any, seed: tf.Tensor) -> Any:
        return example[0], example[1] + tf.random.stateless_uniform([], seed)


@dataclasses.dataclass(kw_only=True)
class Noisy(Line):
    """The targets change at random, in the step."""

    def train_step(self, replica: Any, batch: Any) -> None:
        noise = tf.random.stateless_uniform(tf.shape(batch[1]), replica.seed())
        super().train_step(replica, (batch[0], batch[1] + noise))


@dataclasses.dataclass(kw_only=True)
class Net(Task):
    """A dense net on random rows; Adam."""

    learning_rate: float = 1e-2
    global_batch_size: int = 16

    def evaluation_splits(self) -> tuple[str, ...]:
        return ()

    def build_model(self) -> keras.Model:
        layers = [keras.Input((8,)), keras.layers.Dense(16, activation="silu"), keras.layers.Dense(3)]
        return keras.Sequential(layers)

    def build_optimizer(self, learning_rate: float) -> keras.optimizers.Optimizer:
        return keras.optimizers.Adam(learning_rate)

    def dataset(self, split: str) -> Any:
        random = np.random.RandomState(0)
        return random.randn(64, 8).astype(np.float32), random.randint(0, 3, 64).astype(np.int32)

    def losses(self, labels: Any, predictions: Any) -> tf.Tensor:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, predictions)


@dataclasses.dataclass(kw_only=True)
class Normalized(Line):
    """BatchNormalization of momentum 0.5 on the inputs."""

    def build_model(self) -> keras.Model:
        layers = [keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(1)]
        return keras.Sequential(layers)


@dataclasses.dataclass(kw_only=True)
class Drops(Task):
    """64 ones, of which dropout keeps about half, times 64 weights from 1; the loss is the sum, the rate 1.

    Each weight goes down by 2 · (share of rows that have kept it).
    """

    learning_rate: float = 1.0
    rows: int = 8

    def evaluation_splits(self) -> tuple[str, ...]:
        return ()

    def build_model(self) -> keras.Model:
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer=_ONES)
        return keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5), dense])

    def dataset(self, split: str) -> Any:
        return np.ones((self.rows, 64), np.float32), np.zeros(self.rows, np.float32)

    def losses(self, labels: Any, predictions: Any) -> tf.Tensor:
        return predictions[:, 0]


@dataclasses.dataclass(kw_only=True)
class Table(Task):
    """A table of one number for each word, from 1; rows of words; loss (number − y)² of each word that counts."""

    learning_rate: float = 0.1
    global_batch_size: int = 8
    words: tuple[Any, ...] = (2, 0, 2)
    targets: tuple[Any, ...] = (1.0, 0.0, 0.0)
    size: int = 4
    masked: bool = False
    """Whether word 0 stands for no word."""
    adam: bool = False

    def evaluation_splits(self) -> tuple[str, ...]:
        return ()

    def build_model(self) -> keras.Model:
        shape = np.shape(self.words)[1:]
        table = keras.layers.Embedding(self.size, 1, embeddings_initializer=_ONES, mask_zero=self.masked)
        return keras.Sequential([keras.Input(shape, dtype="int32"), table])

    def build_optimizer(self, learning_rate: float) -> keras.optimizers.Optimizer:
        return (keras.optimizers.Adam if self.adam else keras.optimizers.SGD)(learning_rate)

    def dataset(self, split: str) -> Any:
        return np.array(self.words, np.int32), np.array(self.targets, np.float32)

    def losses(self, labels: Any, predictions: Any) -> tf.Tensor:
        return tf.square(predictions[..., 0] - labels)


@dataclasses.dataclass(kw_only=True)
class Pair(Line):
    """Two inputs and two outputs, each a line of its own; the first layer of three is frozen."""

    def build_model(self) -> keras.Model:
        inputs = {name: keras.Input((1,), name=name) for name in ("left", "right")}
        frozen = keras.layers.Dense(1, use_bias=False, kernel_initializer=_ONES, name="frozen", trainable=False)
        outputs = {
            name: keras.layers.Dense(1, use_bias=False, kernel_initializer=_ONES, name=f"{name}_out")(frozen(value))
            for name, value in inputs.items()
        }
        return keras.Model(inputs, outputs)

    def dataset(self, split: str) -> Any:
        ones, labels = super().dataset(split)
        return {"left": ones, "right": ones}, {"left": labels, "right": labels + 1}

    def losses(self, labels: Any, predictions: Any) -> tf.Tensor:
        return tf.add_n([tf.square(predictions[name][:, 0] - labels[name]) for name in ("left", "right")])


@dataclasses.dataclass(kw_only=True)
class Twins(Line):
    """Two optimizers: `up` moves one weight towards y, `down` another towards −y with twice the rate and weight y."""

    def build_model(self) -> keras.Model:
        inputs = keras.Input((1,))
        layers = [keras.layers.Dense(1, use_bias=False, kernel_initializer=_ONES, name=n) for n in ("up", "down")]
        return keras.Model(inputs, [layer(inputs) for layer in layers])

    def build_optimizer(self, learning_rate: float) -> dict[str, keras.optimizers.Optimizer]:
        return {"up": keras.optimizers.SGD(learning_rate), "down": keras.optimizers.SGD(2 * learning_rate)}

    def train_step(self, replica: Any, batch: Any) -> None:
        inputs, labels = batch
        with tf.GradientTape(persistent=True) as tape:
            up, down = replica.model(inputs, training=True)
            losses = {
                "up": replica.loss(tf.square(up[:, 0] - labels), name="up"),
                "down": replica.loss(tf.square(down[:, 0] + labels), labels, name="down"),
            }
        for name, loss in losses.items():
            variables = replica.model.get_layer(name).trainable_variables
            replica.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True), name=name)
