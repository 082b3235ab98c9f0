"""Small tasks with known answers, used by the contract suite and by command-line tests."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import Task
from tfdist.cluster.identity import identify


@dataclasses.dataclass(kw_only=True)
class ToyLine(Task):
    """One weight w, no bias, from w = 1; input 1; loss (w - y)²; SGD 0.1: a step moves w by 0.2·(mean y - w)."""

    learning_rate: float = 0.1
    global_batch_size: int = 4
    targets: list[float] = dataclasses.field(default_factory=lambda: [0.0, 1.0, 2.0, 3.0])
    weights: list[float] | None = None
    """Weight of each row; none where unset."""

    def evaluation_splits(self) -> tuple[str, ...]:
        return ()

    def build_model(self) -> keras.Model:
        one = keras.initializers.Constant(1.0)
        return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer=one)])

    def dataset(self, split: str) -> Any:
        labels = np.array(self.targets, np.float32)
        rows = np.ones((len(labels), 1), np.float32), labels
        return rows if self.weights is None else (*rows, np.array(self.weights, np.float32))

    def losses(self, labels: Any, predictions: Any) -> tf.Tensor:
        return tf.square(predictions[:, 0] - labels)


@dataclasses.dataclass(kw_only=True)
class ToyNet(Task):
    """Dense 8-16-3 on 64 random rows; Adam 1e-2, global batch 16."""

    learning_rate: float = 1e-2
    global_batch_size: int = 16

    def build_model(self) -> keras.Model:
        layers = [keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)]
        return keras.Sequential(layers)

    def build_optimizer(self, learning_rate: float) -> keras.optimizers.Optimizer:
        return keras.optimizers.Adam(learning_rate)

    def dataset(self, split: str) -> Any:
        random = np.random.RandomState(0)
        inputs = random.randn(64, 8).astype(np.float32)
        return inputs, random.randint(0, 3, 64).astype(np.int32)

    def losses(self, labels: Any, predictions: Any) -> tf.Tensor:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, predictions)

    def metrics(self) -> dict[str, keras.metrics.Metric]:
        return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}


@dataclasses.dataclass(kw_only=True)
class GuideStyle(ToyNet):
    """`ToyNet` with a training step of its own, in the style of TensorFlow's guide."""

    def train_step(self, replica: Any, batch: Any) -> None:
        inputs, labels = batch
        with tf.GradientTape() as tape:
            logits = replica.model(inputs, training=True)
            per_example = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = replica.loss(per_example)
        gradients = tape.gradient(loss, replica.model.trainable_variables)
        replica.apply_gradients(zip(gradients, replica.model.trainable_variables, strict=True))


@dataclasses.dataclass(kw_only=True)
class BatchNormNet(ToyNet):
    """`ToyNet` with BatchNormalization, whose statistics each replica computes on its own rows."""

    rows: int = 64
    synchronized: bool = False

    def build_model(self) -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16),
                keras.layers.BatchNormalization(synchronized=self.synchronized),
                keras.layers.ReLU(),
                keras.layers.Dense(3),
            ]
        )

    def dataset(self, split: str) -> Any:
        inputs, labels = super().dataset(split)
        return inputs[: self.rows], labels[: self.rows]


@dataclasses.dataclass(kw_only=True)
class ConvNet(BatchNormNet):
    """Convolutions and pooling, whose CPU kernels do not run on no rows; batch k has rows 16k to 16k+15 of `rows`."""

    def build_model(self) -> keras.Model:
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((8,)),
                layers.Reshape((8, 1)),
                layers.Conv1D(4, 3, activation="silu"),
                layers.Reshape((6, 4, 1)),
                layers.SeparableConv2D(4, 3, padding="same"),
                layers.MaxPooling2D(2),
                *([layers.BatchNormalization(synchronized=True)] if self.synchronized else []),
                layers.Conv2D(3, 2),
                layers.Flatten(),
                layers.Dense(3),
            ]
        )


@dataclasses.dataclass(kw_only=True)
class OwnSeed(BatchNormNet):
    """A careless task: every rank seeds with its own number."""

    def build_model(self) -> keras.Model:
        keras.utils.set_random_seed(100 + identify().rank)
        return super().build_model()


@dataclasses.dataclass(kw_only=True)
class OwnShape(ToyNet):
    """A broken task: ranks build layers of different sizes."""

    def build_model(self) -> keras.Model:
        units = 17 if identify().rank == 0 else 16
        return keras.Sequential([keras.Input((8,)), keras.layers.Dense(units, name="hidden"), keras.layers.Dense(3)])


@dataclasses.dataclass(kw_only=True)
class OwnDepth(ToyNet):
    """A broken task: ranks build different numbers of layers."""

    def build_model(self) -> keras.Model:
        extra = [keras.layers.Dense(8)] if identify().rank == 1 else []
        return keras.Sequential([keras.Input((8,)), *extra, keras.layers.Dense(3)])


@dataclasses.dataclass(kw_only=True)
class OwnPlan(ToyNet):
    """A broken task: ranks would take other steps, or other batches."""

    differs: str = "rows"

    def __post_init__(self) -> None:
        if self.differs != "rows" and identify().rank == 1:
            setattr(self, self.differs, getattr(self, self.differs) + 1)

    def dataset(self, split: str) -> Any:
        rows = 32 if self.differs == "rows" and identify().rank == 1 else 64
        return tuple(part[:rows] for part in super().dataset(split))


class Counter(keras.layers.Layer):
    """Counts the rows that it has been trained on, in a whole number."""

    def build(self, input_shape: Any) -> None:
        self.seen = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="seen")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.seen.assign(self.seen + keras.ops.shape(inputs)[0])
        return inputs


@dataclasses.dataclass(kw_only=True)
class Counting(ToyNet):
    """`ToyNet` with a layer that counts rows, and dropout, whose seed is a whole number too."""

    def build_model(self) -> keras.Model:
        return keras.Sequential(
            [keras.Input((8,)), Counter(), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(3)]
        )


@dataclasses.dataclass(kw_only=True)
class RowIds(Task):
    """Each row is its own number; the step notes which replica saw which rows, in `seen`."""

    global_batch_size: int = 4
    rows: int = 10

    def __post_init__(self) -> None:
        self.seen: list[tuple[int, list[int]]] = []

    def evaluation_splits(self) -> tuple[str, ...]:
        return ()

    def build_model(self) -> keras.Model:
        return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

    def dataset(self, split: str) -> Any:
        ids = np.arange(self.rows)
        return ids[:, None].astype(np.float32), ids.astype(np.int64)

    def losses(self, labels: Any, predictions: Any) -> tf.Tensor:
        return predictions[:, 0]

    def train_step(self, replica: Any, batch: Any) -> None:
        def note(replica: Any, ids: Any) -> None:
            self.seen.append((int(replica), [int(i) for i in ids]))

        tf.py_function(note, [replica.id, batch[1][: replica.rows]], [])
        super().train_step(replica, batch)


@dataclasses.dataclass(kw_only=True)
class Slow(ToyLine):
    """A step that takes `seconds` on every replica, the first one `first` seconds more."""

    seconds: float = 0.3
    first: float = 0.0
    targets: list[float] = dataclasses.field(default_factory=lambda: [0.0] * 64)

    def __post_init__(self) -> None:
        self.calls = 0

    def losses(self, labels: Any, predictions: Any) -> tf.Tensor:
        def wait(losses: Any) -> Any:
            self.calls += 1
            time.sleep(self.seconds + (self.first if self.calls == 1 else 0))
            return losses

        losses = super().losses(labels, predictions)
        # Not stateful: TensorFlow would run stateful operations of all replicas one after the other.
        waited = tf.numpy_function(wait, [losses], losses.dtype, stateful=False)
        return losses + tf.stop_gradient(tf.ensure_shape(waited, [None]) - losses)


@dataclasses.dataclass(kw_only=True)
class Failing(ToyNet):
    """Something goes wrong on replica `replica` at step `at`: it raises, leaves, or gets a NaN."""

    how: str = "raise"
    replica: int = 1
    at: int = 7

    def __post_init__(self) -> None:
        self.steps = 0

    def evaluation_splits(self) -> tuple[str, ...]:
        return ()

    def train_step(self, replica: Any, batch: Any) -> None:
        def fault(losses: Any, replica_id: Any) -> Any:
            if int(replica_id) != self.replica:
                return losses
            self.steps += 1
            if self.steps == self.at:
                if self.how == "raise":
                    raise ValueError("the sky is falling")
                if self.how == "exit":
                    raise SystemExit(0)
                if self.how == "leave":
                    os._exit(0)
                if self.how == "nan":
                    return losses * np.nan
            return losses

        inputs, labels = batch
        with tf.GradientTape() as tape:
            losses = self.losses(labels, replica.model(inputs, training=True))
            faulty = tf.py_function(fault, [losses, replica.id], tf.float32)
            loss = replica.loss(losses + tf.ensure_shape(tf.stop_gradient(faulty - losses), [None]))
        variables = replica.model.trainable_variables
        replica.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


@dataclasses.dataclass(kw_only=True)
class Delayed(ToyNet):
    """On process `rank` each example, or each step (`what`), takes `seconds` longer, from number `after` on."""

    what: str = "input"
    rank: int = 1
    seconds: float = 0.002
    after: int = 0

    def __post_init__(self) -> None:
        self.count = 0

    def evaluation_splits(self) -> tuple[str, ...]:
        return ()

    def dataset(self, split: str) -> Any:
        examples = tf.data.Dataset.from_tensor_slices(super().dataset(split))
        return examples.map(lambda x, y: (self.late(x), y)) if self.what == "input" else examples

    def losses(self, labels: Any, predictions: Any) -> tf.Tensor:
        losses = super().losses(labels, predictions)
        return losses + tf.stop_gradient(self.late(losses) - losses) if self.what == "step" else losses

    def late(self, value: tf.Tensor) -> tf.Tensor:
        def wait(value: Any) -> Any:
            self.count += 1
            if identify().rank == self.rank and self.count > self.after:
                time.sleep(self.seconds)
            return value

        return tf.ensure_shape(tf.numpy_function(wait, [value], value.dtype), value.shape)


@dataclasses.dataclass(kw_only=True)
class Wrapped(ToyLine):
    """A task that hands in an optimizer which Horovod has wrapped."""

    def build_optimizer(self, learning_rate: float) -> keras.optimizers.Optimizer:
        import horovod.tensorflow.keras as hvd

        return hvd.DistributedOptimizer(keras.optimizers.SGD(learning_rate))


@dataclasses.dataclass(kw_only=True)
class Broken(ToyNet):
    """Tasks that are wrong in the way that `wrong` says."""

    wrong: str = "empty"

    def dataset(self, split: str) -> Any:
        inputs, labels = super().dataset(split)
        return {
            "empty": (inputs[:0], labels[:0]),
            "not a tuple": {"inputs": inputs, "labels": labels},
            "four parts": (inputs, labels, labels, labels),
            "unequal lengths": (inputs, labels[:5]),
            "a number": 7,
            "ragged examples": ragged(),
            "negative weight": (inputs, labels, np.where(np.arange(len(labels)) % 4, 1, -1).astype(np.float32)),
            "batched": tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(4),
        }.get(self.wrong, (inputs, labels))

    def losses(self, labels: Any, predictions: Any) -> tf.Tensor:
        losses = super().losses(labels, predictions)
        return {
            "scalar loss": lambda: tf.reduce_mean(losses),
            "loss per class": lambda: predictions,
            "loss of another length": lambda: losses[:-1],
        }.get(self.wrong, lambda: losses)()

    def build_model(self) -> keras.Model:
        if self.wrong == "model raises":
            raise RuntimeError("no such layer here")
        return super().build_model()


def ragged() -> tf.data.Dataset:
    """Examples of different shapes, of unknown number."""
    rows = [(np.zeros(n, np.float32), 0) for n in (8, 7, 8)]
    spec = (tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.int32))
    return tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=spec)


class NoTask:
    """Not a task."""
