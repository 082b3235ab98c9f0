"""A cluster of parameter servers in one process, and steps on its workers: run by `test_coordination.py`.

    python coordination_program.py FILE

Writes what each scenario found to FILE, as JSON. The cluster is small: one server, two
workers. A process has it for good.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.jobs import free_ports
from tests.toy import ToyLine
from tfdist import Settings
from tfdist.strategies.parameter_server import Cluster, ParameterServer
from tfdist.training.coordination import CoordinatedLoop, Snapshot
from tfdist.training.data import load_examples
from tfdist.training.step import TrainingStep


def open_cluster() -> ParameterServer:
    chief, server, *workers = (f"127.0.0.1:{port}" for port in free_ports(4))
    cluster = Cluster(chief, (server,), tuple(workers), "chief", 0)
    # With few threads the servers would wait for each other for ever.
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=8, intra_op_parallelism_threads=1)
    for role, index in (("ps", 0), ("worker", 0), ("worker", 1)):
        servers.append(
            tf.distribute.Server(cluster.spec, job_name=role, task_index=index, protocol="grpc", config=config)
        )
    return ParameterServer(cluster, 0)


servers: list[tf.distribute.Server] = []
STRATEGY = open_cluster()


@dataclasses.dataclass(kw_only=True)
class Once(ToyLine):
    """One weight for each row, from 0: input i is row i of the identity, so a step adds to weight i alone.

    The loss of row i is −w_i; with SGD 1.0 and one row in each batch, w_i is how often row i was trained on.
    """

    rows: int = 10
    learning_rate: float = 1.0
    global_batch_size: int = 1

    def build_model(self) -> keras.Model:
        return keras.Sequential(
            [keras.Input((self.rows,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
        )

    def dataset(self, split: str) -> Any:
        return np.eye(self.rows, dtype=np.float32), np.zeros(self.rows, np.float32)

    def losses(self, labels: Any, predictions: Any) -> tf.Tensor:
        return labels - predictions[:, 0]


class Running:
    """The loop of a task on the cluster, over its examples in their order."""

    def __init__(
        self,
        task: ToyLine,
        *,
        epochs: int | None = None,
        max_in_flight: int | None = None,
        dataset: Callable[[tf.data.Dataset], tf.data.Dataset] = lambda batches: batches,
        **settings: Any,
    ) -> None:
        with STRATEGY.scope():
            self.model = task.build_model()
            self.optimizer = task.build_optimizer(task.learning_rate)
            self.optimizer.build(self.model.trainable_variables)
        examples = load_examples(task, "train", count=True, notice=lambda message: None)
        batches = dataset(
            examples.numbered_batches(global_batch_size=task.global_batch_size, seed=0, shuffle_buffer=0, epochs=epochs)
        )
        step = TrainingStep(
            STRATEGY,
            task,
            self.model,
            self.optimizer,
            Settings.of(**settings),
            global_batch_size=task.global_batch_size,
        )
        self.loop = CoordinatedLoop(STRATEGY, step, batches, [self.optimizer], max_in_flight=max_in_flight)

    @property
    def weights(self) -> list[float]:
        return [float(value) for value in self.model.trainable_variables[0].numpy()[:, 0]]

    @property
    def counts(self) -> list[int]:
        """Steps by the loop's own count and by the optimizer's."""
        return [int(self.loop.updates.numpy()), int(self.optimizer.iterations.numpy())]


def each_batch_once() -> Any:
    """200 steps in chunks of different lengths, over a dataset that has just as many batches."""
    running = Running(Once(rows=200), epochs=1)
    chunks = [running.loop.run(None, 150, 0, 50), running.loop.run(None, 50, 150, 0)]
    done = running.loop.steps_done()
    running.loop.forget()
    return {
        "weights": running.weights,
        "counts": running.counts,
        "rows": [int(chunk.rows.sum()) for chunk in chunks],
        "entries": [len(chunk.losses) for chunk in chunks],
        "halted": [chunk.halted for chunk in chunks],
        "non-negative seconds": all((chunk.seconds >= 0).all() for chunk in chunks),
        "done": [done, running.loop.steps_done()],
        "traces": running.loop.traces,
        "describe": running.loop.describe(),
        "passed": [len(running.loop.updates_passed), sum(running.loop.updates_passed)],
    }


def batches_that_cross_epochs() -> Any:
    """10 rows in batches of 4, three times: 7 full steps and one of 2 rows."""
    running = Running(Once(rows=10, global_batch_size=4), epochs=3)
    chunk = running.loop.run(None, 8, 0, 0)
    return {"rows": chunk.rows.tolist(), "weights": running.weights, "counts": running.counts}


def one_at_a_time_is_as_on_one_device() -> Any:
    """Target 0 and one step in flight: w = 0.8^n, and the loss of step n is 0.64^n."""
    running = Running(ToyLine(targets=[0.0], global_batch_size=1), max_in_flight=1)
    chunk = running.loop.run(None, 6, 0, 0)
    return {"losses": chunk.losses[:, 0].tolist(), "weights": running.weights, "passed": running.loop.updates_passed}


def behind() -> Any:
    """Steps whose batches a worker has read past: as when it takes over from one that died."""
    return _behind(first=[30, 31, 32, 33], then=[2, 3, 4, 5, 6, 7])


def behind_at_the_end() -> Any:
    """The same from the last batches on, after which there is nothing more to read."""
    return _behind(first=[36, 37, 38, 39], then=[2, 3, 4, 5, 6, 7])


def _behind(first: list[int], then: list[int]) -> Any:
    running = Running(Once(rows=40), epochs=1)
    loop = running.loop

    def do(numbers: list[int]) -> list[int]:
        for number in numbers:
            loop._pending.append((number, loop._schedule_one(number)))
        return [len(loop._result()[0]) for _ in numbers]

    do(first)
    before = loop._iterator
    # More than one worker can take: those that come second to a worker are before what it has read.
    entries = do(then)
    return {
        "began anew": loop._iterator is not before,
        "entries": entries,
        "weights": running.weights,
        "counts": running.counts,
    }


def in_flight() -> Any:
    """How many steps are handed out, from the oldest that has not come back on."""
    running = Running(Once(rows=40), epochs=1, max_in_flight=5)
    loop = running.loop
    seen: list[list[int]] = []
    original = loop._result

    def result() -> Any:
        seen.append([number for number, _ in loop._pending])
        return original()

    loop._result = result  # type: ignore[method-assign]
    loop.run(None, 6, 0, 2)
    left = [number for number, _ in loop._pending]
    loop.run(None, 2, 6, 0)
    return {"seen": seen, "left": left, "default": Running(Once(), epochs=1).loop.max_in_flight}


def it_ends_where_training_cannot_go_on() -> Any:
    running = Running(ToyLine(targets=[0.0, 0.0, float("nan"), 0.0], global_batch_size=1), max_in_flight=1)
    chunk = running.loop.run(None, 4, 0, 0)
    return {
        "entries": len(chunk.losses),
        "halted": chunk.halted,
        "counts": running.counts,
        "done": running.loop.steps_done(),
    }


def it_goes_on_after_a_step_that_is_left_out() -> Any:
    task = ToyLine(targets=[0.0, float("nan"), 0.0, 0.0], global_batch_size=1)
    running = Running(task, nan_policy="skip", max_in_flight=1)
    chunk = running.loop.run(None, 4, 0, 0)
    return {"skipped": chunk.skipped.tolist(), "counts": running.counts, "weights": running.weights}


def python_in_the_dataset() -> Any:
    def generator() -> Iterator[Any]:
        yield np.ones(1, np.float32), np.float32(0)

    spec = (tf.TensorSpec([1], tf.float32), tf.TensorSpec([], tf.float32))
    kinds = {
        "from_generator": lambda: tf.data.Dataset.from_generator(generator, output_signature=spec),
        "py_function": lambda: plain().map(lambda x, y: (x, tf.py_function(lambda v: v, [y], tf.float32))),
        "numpy_function": lambda: plain().map(lambda x, y: (x, tf.numpy_function(lambda v: v, [y], tf.float32))),
        "inside another function": lambda: tf.data.Dataset.range(2).flat_map(
            lambda i: plain().map(lambda x, y: (x, tf.numpy_function(lambda v: v, [y], tf.float32)))
        ),
        "none": plain,
    }
    found = {}
    for name, kind in kinds.items():
        batches = kind().batch(1).enumerate()
        try:
            Running(ToyLine(), dataset=lambda _, batches=batches: batches)  # type: ignore[misc]
            found[name] = "taken"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def plain() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors((np.ones(1, np.float32), np.float32(0)))


def snapshot() -> Any:
    with STRATEGY.scope():
        weight, other, standing_in = (keras.Variable(float(n)) for n in (1, 2, 3))
    taken = Snapshot([(weight, weight), (other, standing_in)])
    reads = [[float(copy) for _, copy in taken.mapping]]
    for variable in (weight, other, standing_in):
        variable.assign(variable + 10)
    reads.append([float(copy) for _, copy in taken.mapping])
    taken.take()
    reads.append([float(copy) for _, copy in taken.mapping])
    with keras.StatelessScope(taken.mapping):
        inside = [float(weight.value), float(other.value)]
    return {
        "reads": reads,
        "inside": inside,
        "originals": [variable is own for (variable, _), own in zip(taken.mapping, (weight, other), strict=True)],
        "devices": [copy.device.rpartition("/")[2] for _, copy in taken.mapping],
        "jobs": ["job:chief" in copy.device or "job:localhost" in copy.device for _, copy in taken.mapping],
    }


SCENARIOS = (
    each_batch_once,
    batches_that_cross_epochs,
    one_at_a_time_is_as_on_one_device,
    behind,
    in_flight,
    it_ends_where_training_cannot_go_on,
    it_goes_on_after_a_step_that_is_left_out,
    python_in_the_dataset,
    snapshot,
    behind_at_the_end,
)

if __name__ == "__main__":
    found = {}
    for scenario in SCENARIOS:
        start = time.monotonic()
        try:
            found[scenario.__name__] = scenario()
        except Exception as error:
            found[scenario.__name__] = f"{type(error).__name__}: {error}"
        print(scenario.__name__, f"{time.monotonic() - start:.2f} s", flush=True)
    Path(sys.argv[1]).write_text(json.dumps(found))
    os._exit(0)  # servers cannot be stopped
