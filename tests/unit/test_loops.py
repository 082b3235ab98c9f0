"""Chunks of steps in one compiled function: what they tell, and where they end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.toy import ToyLine, ToyNet
from tests.unit.one_device import STRATEGY, trainer
from tfdist import Settings
from tfdist.training.data import load_examples
from tfdist.training.loops import TrainingLoop
from tfdist.training.step import TrainingStep


class Running:
    """The training loop of a task on one device, over its examples in their order."""

    def __init__(self, task: ToyLine, *, batches_per_epoch: int | None = None, **settings: Any) -> None:
        given = Settings.of(**settings)
        with STRATEGY.scope():
            self.model = task.build_model()
            self.optimizer = task.build_optimizer(task.learning_rate)
            self.optimizer.build(self.model.trainable_variables)
        examples = load_examples(task, "train", count=True, notice=lambda message: None)
        size = task.global_batch_size
        self.iterator = examples.training_batches(STRATEGY, global_batch_size=size, seed=0, shuffle_buffer=0)
        step = TrainingStep(STRATEGY, task, self.model, self.optimizer, given, global_batch_size=size)
        self.loop = TrainingLoop(
            STRATEGY, step, self.iterator, accumulate=given.accumulate, batches_per_epoch=batches_per_epoch
        )

    def run(self, steps: int, first: int = 0) -> Any:
        return self.loop.run(self.iterator, steps, first)

    @property
    def weight(self) -> float:
        return float(self.model.trainable_variables[0].numpy()[0][0])


def line(*targets: float) -> ToyLine:
    """One row in each batch."""
    return ToyLine(targets=list(targets), global_batch_size=1)


def test_a_chunk_tells_of_each_step() -> None:
    # Target 0: w = 1, 0.8, 0.64 before the steps, the loss its square.
    running = Running(line(0.0))
    chunk = running.run(3)
    assert chunk.losses.tolist() == [[pytest.approx(v)] for v in (1, 0.64, 0.4096)]
    assert chunk.rates.tolist() == [[pytest.approx(0.1)]] * 3
    assert chunk.penalties.tolist() == [0, 0, 0]
    assert chunk.rows.tolist() == [1, 1, 1]
    assert chunk.skipped.tolist() == [False] * 3
    assert chunk.seconds.shape == (3,)
    assert (chunk.seconds >= 0).all()
    assert (chunk.halted, chunk.suspects, chunk.faults.tolist()) == (False, (0, 0), [0, 0, 0])
    assert running.weight == pytest.approx(0.512)


def test_chunks_of_any_length_are_traced_once_and_go_on() -> None:
    running = Running(line(0.0))
    losses = np.concatenate([running.run(steps).losses[:, 0] for steps in (1, 4, 2)])
    assert losses == pytest.approx([0.64**n for n in range(7)])
    assert running.loop.traces == 1


def test_it_ends_with_a_step_after_which_training_cannot_go_on() -> None:
    running = Running(line(0.0, np.nan, 0.0, 0.0, 0.0))
    chunk = running.run(5)
    assert chunk.halted
    assert len(chunk.losses) == len(chunk.rows) == len(chunk.seconds) == 2
    assert chunk.suspects == (1, 0)
    assert running.weight == pytest.approx(0.8), "as after the first step"
    assert int(running.optimizer.iterations) == 1


def test_it_goes_on_after_a_step_that_is_left_out() -> None:
    running = Running(line(0.0, np.nan, 0.0), nan_policy="skip")
    chunk = running.run(3)
    assert chunk.skipped.tolist() == [False, True, False]
    assert not chunk.halted
    assert running.weight == pytest.approx(0.64)


def test_faults_are_those_of_the_last_step() -> None:
    task = ToyLine(targets=[0, 0, 0], weights=[1, -1, 1], global_batch_size=1)
    chunk = Running(task).run(3)
    assert (chunk.halted, len(chunk.losses), chunk.faults.tolist()) == (True, 2, [0, 0, 1])


def test_the_steps_of_a_chunk_that_fails_are_counted() -> None:
    def falls() -> Iterator[Any]:
        yield from ((np.ones(1, np.float32), np.float32(0)) for _ in range(4))
        raise ValueError("the sky is falling")

    class Falling(ToyLine):
        def dataset(self, split: str) -> Any:
            spec = (tf.TensorSpec([1], tf.float32), tf.TensorSpec([], tf.float32))
            dataset = tf.data.Dataset.from_generator(falls, output_signature=spec)
            return dataset.apply(tf.data.experimental.assert_cardinality(10))

    running = Running(Falling(global_batch_size=1))
    running.run(1)
    assert running.loop.steps_done() == 1
    running.loop.forget()
    assert running.loop.steps_done() == 0
    with pytest.raises(tf.errors.InvalidArgumentError, match="the sky is falling"):
        running.run(9)
    assert running.loop.steps_done() == 3


@pytest.mark.parametrize(
    ("accumulate", "batches", "rows"),
    [(2, 5, [2, 2, 1, 2, 2, 1]), (9, 5, [5] * 6), (2, None, [2] * 6)],
)
def test_steps_do_not_cross_epochs(accumulate: int, batches: int | None, rows: list[int]) -> None:
    running = Running(line(0, 0, 0, 0, 0), batches_per_epoch=batches, accumulate=accumulate)
    chunks = [running.run(2, first) for first in (0, 2, 4)]
    assert list(itertools.chain.from_iterable(chunk.rows.tolist() for chunk in chunks)) == rows


class TestEvaluation:
    def test_each_row_counts_once_however_often_it_runs(self) -> None:
        # (1 − y)² for 0, 1, 2, 3, 5: 1 + 0 + 1 + 4 + 16 over 5.
        made = trainer(ToyLine(targets=[0, 1, 2, 3, 5], global_batch_size=2))
        assert [made.evaluate("train") for _ in range(2)] == [{"loss": pytest.approx(4.4)}] * 2
        assert made.model.get_weights() == [[[1.0]]]

    def test_weights_divide_as_in_training(self) -> None:
        # 1·1 + 4·2 over the weights' sum 3.5, or over 3 rows.
        task = ToyLine(targets=[0, 1, 3], weights=[1, 0.5, 2], global_batch_size=2)
        for kind, right in (("weighted_mean", 9 / 3.5), ("sum_over_batch", 3.0)):
            assert trainer(task, loss_reduction=kind).evaluate("train") == {"loss": pytest.approx(right)}

    def test_metrics_are_named_before_anything_is_evaluated(self) -> None:
        made = trainer(ToyNet())
        got = made.evaluate("test")
        loop, _ = made._evaluations.loops["test"]
        assert loop.nothing == {"loss": 0, "accuracy": 0}
        assert list(loop.nothing) == list(got) == ["loss", "accuracy"]
        assert loop.traces == 1
