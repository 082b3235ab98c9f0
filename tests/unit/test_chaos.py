"""The drawing of faults, and finding the processes of a job by their mark."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tfdist.commands import ChaosCommand
from tfdist.errors import UsageError
from tfdist.evidence.chaos import quantiles
from tfdist.evidence.faults import KINDS, draw
from tfdist.evidence.marked import MARK, end_all, marked, ranks


def test_faults_follow_from_the_seed() -> None:
    kinds = list(KINDS)
    assert draw(50, kinds, 7) == draw(50, kinds, 7) != draw(50, kinds, 8)
    assert draw(20, kinds, 7) == draw(50, kinds, 7)[:20]


def test_kinds_come_equally_often_and_in_all_phases() -> None:
    faults = draw(600, list(KINDS), 1)
    assert {kind: sum(fault.kind == kind for fault in faults) for kind in KINDS} == dict.fromkeys(KINDS, 100)
    phases = {"start-up", "first steps", "during a save", "between saves"}
    assert {fault.phase for fault in faults if fault.kind == "kill"} == phases
    # Nobody watches a rank that is stopped before the ranks have met.
    assert {fault.phase for fault in faults if fault.kind == "stop"} == phases - {"start-up"}


def test_the_command_knows_the_kinds() -> None:
    assert ChaosCommand(faults=tuple(KINDS)).faults == tuple(KINDS)
    with pytest.raises(UsageError, match=r"kil.*Did you mean 'kill'"):
        ChaosCommand(faults=("kil",))
    with pytest.raises(UsageError, match="one process"):
        ChaosCommand(backend="mirrored")
    with pytest.raises(UsageError, match="processes=3 must be 4 or more"):
        ChaosCommand(backend="parameter_server", processes=3)


def test_quantiles_are_values_that_there_were() -> None:
    assert quantiles([None, 3.0, 1.0, 2.0]) == {"p50": 2.0, "p95": 3.0, "max": 3.0}
    assert quantiles([None]) is None


def test_processes_are_found_by_their_mark_and_rank() -> None:
    mark = f"test-{os.getpid()}"
    workers = ["localhost:1", "localhost:2"]
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    started = []
    for index in range(2):
        place = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        started.append(subprocess.Popen(sleeps, env={**os.environ, MARK: mark, "TF_CONFIG": json.dumps(place)}))
    other = subprocess.Popen(sleeps, env={**os.environ, MARK: f"{mark}x"})
    try:
        deadline = time.monotonic() + 10
        while len(found := ranks(marked(mark))) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)  # between fork and exec a process has its parent's variables
        assert [(process.pid, process.rank) for process in found] == [(p.pid, i) for i, p in enumerate(started)]
        found[0].send(signal.SIGSTOP)
        assert found[0].alive
        found[1].send(signal.SIGKILL)
        while found[1].alive and time.monotonic() < deadline:
            time.sleep(0.02)  # not reaped yet, and gone all the same
        assert not found[1].alive
        end_all(mark)
        assert started[0].wait(10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (*started, other):
            process.kill()
            process.wait()
