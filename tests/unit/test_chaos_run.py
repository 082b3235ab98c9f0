"""A run under faults sees what its job does right and wrong. The job is a program that trains nothing."""

from __future__ import annotations

import collections
import sys
from pathlib import Path

import pytest

from tfdist.evidence.chaos_run import Run, Setup
from tfdist.evidence.faults import Fault, Injected

JOB = Path(__file__).with_name("chaos_job.py")


def run(folder: Path, mode: str, faults: list[Fault]) -> tuple[Run, list[Injected]]:
    told: list[Injected] = []
    command = [sys.executable, str(JOB), str(folder), mode]
    setup = Setup(lambda: command, steps=200, save_every=20, asynchronous=False, start_seconds=0.1, timeout=20)
    done = Run(1, setup, folder, collections.deque(faults), 3, told.append)
    done.go()
    return done, told


KILLS = [Fault("kill", "between saves", 2, 0.5, 0.9), Fault("kill-all", "between saves", 1, 0.0, 0.0)]


def test_faults_and_what_they_cost(tmp_path: Path) -> None:
    done, told = run(tmp_path, "honest", KILLS)
    assert done.outcome.problems == []
    assert done.outcome.starts == 3
    assert told == done.injected
    first, second = told
    assert (first.kind, first.rank, first.step_told) == ("kill", 1, True)
    assert (second.kind, second.rank) == ("kill-all", None)
    for fault in told:
        assert fault.resumed_from is not None and fault.ended_after is not None and fault.training_after is not None
        assert fault.resumed_from >= fault.saved
        assert fault.steps_lost is not None and 0 <= fault.steps_lost < 20


def test_a_launcher_that_is_killed_is_started_again(tmp_path: Path) -> None:
    # Nothing ends the processes that it leaves, so that the run waits for them in vain.
    faults = [Fault("launcher", "between saves", 1, 0.0, 0.0)]
    setup_limit = 1.5
    command = [sys.executable, str(JOB), str(tmp_path), "honest"]
    setup = Setup(lambda: command, 200, 20, asynchronous=False, start_seconds=0.1, timeout=setup_limit)
    done = Run(1, setup, tmp_path, collections.deque(faults), 3, lambda fault: None)
    done.go()
    assert done.outcome.problems == ["not all had ended 2 s after launcher"]


@pytest.mark.parametrize(
    ("mode", "problem"), [("forgets", "it went on from step 0, though"), ("fails", "it failed without a fault")]
)
def test_what_is_wrong_is_noticed(mode: str, problem: str, tmp_path: Path) -> None:
    done, _ = run(tmp_path, mode, KILLS[:1] if mode == "forgets" else [])
    assert len(done.outcome.problems) == 1
    assert problem in done.outcome.problems[0]


def test_what_comes_too_late_stays_in_the_queue(tmp_path: Path) -> None:
    faults = collections.deque([KILLS[0]] * 5)
    command = [sys.executable, str(JOB), str(tmp_path), "honest"]
    setup = Setup(lambda: command, 200, 20, asynchronous=False, start_seconds=0.1, timeout=20)
    done = Run(1, setup, tmp_path, faults, 1, lambda fault: None)
    done.go()
    assert len(done.injected) == 1 and len(faults) == 4
