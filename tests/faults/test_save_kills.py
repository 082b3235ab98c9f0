"""A process that is killed while it saves a checkpoint leaves only whole ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.faults.save_kills import PHASES
from tests.jobs import Job, environment


def test_whatever_is_visible_after_a_kill_is_whole(tmp_path: Path) -> None:
    # In a process of its own: children can be forked only while TensorFlow has not run any operation.
    words = ["-m", "tests.faults.save_kills", "--points", "20", "--json", str(tmp_path / "kills.json")]
    Job([sys.executable, *words], environment({"TF_CPP_MIN_LOG_LEVEL": "2"})).finish(120).check()
    result = json.loads((tmp_path / "kills.json").read_text())
    assert result["failures"] == []
    assert result["at_boundaries"] + result["at_random"] == sum(result["phases"].values()) == 20
    assert all(result["phases"][phase] for phase in PHASES[1:5]), result["phases"]
    assert result["checkpoints_read"] >= 40


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_three_hundred_points_of_a_save(tmp_path: Path) -> None:
    words = ["-m", "tests.faults.save_kills", "--points", "300", "--json", str(tmp_path / "kills.json")]
    Job([sys.executable, *words], environment({"TF_CPP_MIN_LOG_LEVEL": "2"})).finish(1800).check()
    assert json.loads((tmp_path / "kills.json").read_text())["failures"] == []
