"""Python's `if` and loops on tensors work in what users write, and nothing of tfdist is converted for it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.toy import ToyLine
from tests.unit.launched import environment
from tests.unit.one_device import trainer


def halved(value: tf.Tensor) -> tf.Tensor:
    while value > 4:
        value = value / 2
    return value


@dataclasses.dataclass(kw_only=True)
class Branching(ToyLine):
    """Input 1 in each row; batches of one row with the labels 2, 16 and -2, in which three functions branch.

    The label 2 stays; 16 is halved to 4; -2 counts as 2 in the loss.
    """

    global_batch_size: int = 1

    def dataset(self, split: str) -> Any:
        return np.ones((3, 1), np.float32), np.array([2, 16, -2], np.float32)

    def augment(self, example: Any, seed: tf.Tensor) -> Any:
        inputs, label = example
        return inputs, halved(label)

    def losses(self, labels: Any, predictions: Any) -> tf.Tensor:
        if tf.reduce_sum(labels) < 0:
            labels = -labels
        return super().losses(labels, predictions)


class WithItsOwnStep(Branching):
    def train_step(self, replica: Any, batch: Any) -> None:
        inputs, labels = batch
        with tf.GradientTape() as tape:
            losses = self.losses(labels, replica.model(inputs, training=True))
            if tf.reduce_sum(losses) > 100:
                losses = losses * 0
            loss = replica.loss(losses)
        variables = replica.model.trainable_variables
        replica.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


class OnTopOfOurs(Branching):
    def train_step(self, replica: Any, batch: Any) -> None:
        inputs, labels = batch
        if labels[0] > 100:
            labels = labels * 0
        super().train_step(replica, (inputs, labels))


NAMES = """
import re, sys
from pathlib import Path
from tests.unit.test_autograph import WithItsOwnStep
from tests.unit.one_device import trainer
trainer(WithItsOwnStep(), steps=3).fit()
files = [Path(module.__file__) for name, module in sys.modules.items() if name.startswith("__autograph_generated")]
print(*sorted({name for file in files for name in re.findall(r"def tf__(\\w+)", file.read_text())}))
"""


@pytest.mark.parametrize("task", [Branching, WithItsOwnStep, OnTopOfOurs])
def test_python_branches_on_tensors(task: type[Branching]) -> None:
    # w = 1 moves by 0.2·(label - w) in each step, whatever the order: 2, 4 and 2.
    report = trainer(task(), shuffle_buffer=0, steps=3).fit()
    assert report.losses == pytest.approx([1, (4 - 1.2) ** 2, (2 - 1.76) ** 2], rel=1e-5)


def test_nothing_of_ours_is_converted() -> None:
    words = [sys.executable, "-c", NAMES]
    run = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment(None), check=True)
    assert run.stdout.split() == ["augment", "halved", "losses", "train_step"]
