"""A rank that fails in every start, and clocks that jump."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.jobs import ROOT, Job, environment

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

TOY = ROOT / "tests" / "toy.py"

JUMPS = """\
import sys, time
sys.path.insert(0, {root!r})
from tests.toy import Slow
from tfdist.cluster.identity import identify

wall = time.time


class Jumping(Slow):
    def losses(self, labels, predictions):
        rank = identify().rank
        time.time = lambda: wall() + (86400 if (int(2 * wall()) + rank) % 2 else -86400)
        time.time_ns = lambda: int(time.time() * 1e9)
        return super().losses(labels, predictions)
"""


def launch(*words: object) -> Job:
    return Job([sys.executable, "-m", "tfdist", "launch", "--processes", "2", *map(str, words)], environment(None))


@pytest.mark.parametrize("backend", ["horovod", "multi_worker_mirrored"])
def test_a_rank_that_fails_in_every_start_ends_the_job(backend: str, tmp_path: Path) -> None:
    began = time.monotonic()
    train = ["--backend", backend, "--task", f"{TOY}:Failing", "--steps", 50, "--checkpoint-dir", tmp_path / "c"]
    ended = launch("--max-restarts", 2, "--", *train).finish(600)
    assert ended.code == 1, ended.output
    assert ended.output.count("ValueError: the sky is falling") >= 3
    assert "All start again in 1 s: start 2 of 3." in ended.output
    assert "All start again in 2 s: start 3 of 3." in ended.output
    assert "max_restarts=2 are used up." in ended.output
    assert time.monotonic() - began > 3


@pytest.mark.parametrize("backend", ["horovod", "multi_worker_mirrored"])
def test_no_time_is_taken_from_a_clock_that_jumps(backend: str, tmp_path: Path) -> None:
    """Each rank's wall clock goes a day ahead and back each second. It is Python's; C++'s cannot be moved alone."""
    (tmp_path / "jumping.py").write_text(JUMPS.format(root=str(ROOT)))
    task = ["--task", f"{tmp_path / 'jumping.py'}:Jumping", "--task-args", "seconds=0.05", "--steps", 100]
    saves = ["--checkpoint-dir", tmp_path / "c", "--save-every", "1s", "--report", tmp_path / "report.json"]
    ended = launch("--", "--backend", backend, *task, *saves, "--stall-timeout", 20).finish(600).check()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["steps"] == 100, ended.output
    assert 2 <= report["checkpoints"]["saved"] <= 30
