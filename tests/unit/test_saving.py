"""Saving beside training: what is written, what is waited for, and what becomes of a save that fails."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist.checkpoints.checkpoint import Checkpoint
from tfdist.checkpoints.store import Store
from tfdist.errors import CheckpointProblem
from tfdist.training.saving import Saver, named


class Gate(Store):
    """A store whose saves wait until they may go on, and fail when they are told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.open = threading.Event()
        self.fails = False

    def save(self, step: int, *what: Any, **more: Any) -> Path:
        assert self.open.wait(30)
        if self.fails:
            raise CheckpointProblem(f"step {step} cannot be saved: the disk is full.")
        return super().save(step, *what, **more)


@pytest.fixture
def store(tmp_path: Path):
    gate = Gate(tmp_path)
    yield gate
    gate.open.set()
    gate.close()


def newest(store: Store) -> Checkpoint:
    found = store.newest(print)
    assert found is not None
    return found


def test_values_are_those_of_the_moment_of_the_save(store: Gate) -> None:
    variable = tf.Variable([1.0, 2.0])
    saver = Saver(store, {"model/w": variable})
    saver.save(3, {"epoch": 1}, {"best/model/w": np.array([9.0])})
    variable.assign([5.0, 5.0])  # training goes on while the writer waits
    store.open.set()
    saver.finish()
    saved = newest(store)
    assert saved.manifest.step == 3
    assert saved.manifest.state == {"epoch": 1}
    assert {name: value.tolist() for name, value in saved.tensors().items()} == {
        "model/w": [1.0, 2.0],
        "best/model/w": [9.0],
    }
    assert saver.describe()["saved"] == 1
    saver.close()


def test_one_save_waits_for_the_one_before(store: Gate) -> None:
    saver = Saver(store, {"w": tf.Variable(0.0)})
    saver.save(1, {}, {})
    second = threading.Thread(target=saver.save, args=(2, {}, {}))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "memory holds one copy at a time"
    store.open.set()
    second.join(30)
    saver.finish()
    assert newest(store).manifest.step == 2
    saver.close()


def test_the_same_step_is_saved_once(store: Gate) -> None:
    store.open.set()
    saver = Saver(store, {"w": tf.Variable(0.0)})
    for _ in range(2):
        saver.save(7, {}, {})
    saver.finish()
    assert saver.describe()["saved"] == 1
    saver.close()


def test_a_failed_save_is_told_once_and_the_next_one_may_succeed(store: Gate) -> None:
    store.open.set()
    saver = Saver(store, {"w": tf.Variable(0.0)})
    saver.save(1, {}, {})
    saver.finish()
    store.fails = True
    saver.save(2, {}, {})
    with pytest.raises(CheckpointProblem, match="step 2 cannot be saved: the disk is full"):
        saver.finish()
    assert "disk is full" in str(saver.problem())
    assert saver.problem() is None
    assert newest(store).manifest.step == 1, "the one before is intact"
    store.fails = False
    saver.save(2, {}, {})
    saver.finish()
    assert newest(store).manifest.step == 2
    saver.close()


def test_without_a_store_nothing_is_read_or_written() -> None:
    saver = Saver(None, {"w": object()})
    saver.save(1, {}, {})
    saver.finish()
    assert saver.describe()["saved"] == 0
    saver.close()


def test_names_that_come_again_are_numbered() -> None:
    groups = [("model", [("dense/kernel", 1), ("dense/kernel", 2), ("dense/bias", 3)]), ("trainer", [("batches", 4)])]
    assert named(groups) == {
        "model/dense/kernel": 1,
        "model/dense/kernel#2": 2,
        "model/dense/bias": 3,
        "trainer/batches": 4,
    }
