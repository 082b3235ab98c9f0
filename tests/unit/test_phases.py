"""Where a process is in its training, on one device."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.toy import ToyLine
from tests.unit.one_device import trainer
from tfdist.training.phases import ACTION, EVALUATING, WORKERS, Phases


def passed(phases: Phases) -> int:
    return phases.read()[0]


class Watched(ToyLine):
    """Notes the marks and the phase at which a loss is computed, which takes its time."""

    def watch(self, phases: Phases) -> None:
        self.phases, self.seen = phases, []  # type: ignore[var-annotated]

    def losses(self, labels: Any, predictions: Any) -> tf.Tensor:
        def see(losses: Any) -> Any:
            time.sleep(0.02)
            self.seen.append(self.phases.read())
            return losses

        losses = super().losses(labels, predictions)
        seen = tf.numpy_function(see, [losses], losses.dtype)
        return losses + tf.stop_gradient(tf.ensure_shape(seen, [None]) - losses)


@pytest.mark.parametrize(("accumulate", "marks"), [(1, 4), (2, 12)])
def test_marks_of_steps_and_the_seconds_of_their_phases(accumulate: int, marks: int) -> None:
    task = Watched(global_batch_size=1, targets=[0.0] * 8)
    running = trainer(task, steps=3, validate_every=0, accumulate=accumulate, shuffle_buffer=0)
    task.watch(running._phases)
    assert running._phases.read() == (0, "before the first step")
    report = running.fit()
    assert running._phases.read() == (3 * marks, "between steps")
    assert {phase for _, phase in task.seen} == {"computing"}
    assert [count for count, _ in task.seen] == [
        marks * step + 2 + 4 * i for step in range(3) for i in range(accumulate)
    ]
    (own,) = report.ranks
    assert own["compute_seconds"] >= 2 * accumulate * 0.02
    assert 0 <= own["collective_seconds"] < 10
    assert own["input_seconds"] >= 0


def test_evaluation_moves_on_with_each_batch() -> None:
    class Evaluated(ToyLine):
        def evaluation_splits(self) -> tuple[str, ...]:
            return ("test",)

    running = trainer(Evaluated(), steps=1)
    before = passed(running._phases)
    running.evaluate("test")
    assert passed(running._phases) == before + 4


def test_what_python_does_is_told() -> None:
    phases = Phases()
    moves = [phases.moves]
    with phases.at(EVALUATING):
        assert (phases.read()[1], phases.begun) == (EVALUATING, False)
        moves.append(phases.moves)
    assert phases.read()[1] == "before the first step"
    with phases.at(None):
        assert (phases.read()[1], phases.begun) == ("applying the update", True)
        phases.mark([tf.constant(1)])
        assert phases.read()[1] == "waiting for input"
    with phases.at(ACTION):
        assert phases.read()[1] == ACTION
    with phases.at(EVALUATING):
        assert phases.read()[1] == "evaluating, waiting for input"
    assert phases.read()[1] == "between steps"
    moves.append(phases.moves)
    assert moves == sorted(set(moves))


def test_without_marks_there_are_none() -> None:
    phases = Phases(compiled=False)
    with phases.at(WORKERS):
        assert float(phases.mark([tf.constant(1)])) == 0.0
        assert phases.read() == (0, WORKERS)
        assert phases.begun


def test_the_first_step_does_not_count_and_neither_does_a_clock_that_is_set_back() -> None:
    phases = Phases(compiled=False)
    phases.account(np.array([[0.0, 50.0, 60.0, 70.0], [100.0, 101.0, 103.0, 106.0]]))
    phases.account(np.array([[200.0, 100.0, 102.0, 105.0]]))
    assert phases.seconds.tolist() == [1.0, 4.0, 6.0]
    assert phases.steps == 2
