"""Jobs that are killed at random moments go on, and end as one does that is left alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import ROOT, Job, environment

TOY = ["--task", f"{ROOT / 'tests' / 'toy.py'}:ToyNet"]


def chaos(folder: Path, backend: str, kills: int, *flags: str, limit: float) -> dict[str, Any]:
    words = ["-m", "tfdist", "chaos", "--backend", backend, "--kills", str(kills), "--json", str(folder / "chaos.json")]
    Job([sys.executable, *words, *flags], environment(None)).finish(limit).check()
    result: dict[str, Any] = json.loads((folder / "chaos.json").read_text())
    assert result["passed"]
    assert len(result["faults"]) == kills
    return result


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("backend", "kills", "kinds"),
    [
        ("horovod", 5, ["kill"]),
        pytest.param("multi_worker_mirrored", 2, ["kill", "term"], marks=pytest.mark.faults),
    ],
)
def test_killed_jobs_end_as_one_that_is_left_alone(backend: str, kills: int, kinds: list[str], tmp_path: Path) -> None:
    result = chaos(tmp_path, backend, kills, "--faults", *kinds, *TOY, limit=1100)
    assert {fault["kind"] for fault in result["faults"]} == set(kinds)
    # Not all began anew.
    assert any(fault["resumed_from"] for fault in result["faults"])


@pytest.mark.faults
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("backend", ["horovod", "multi_worker_mirrored", "parameter_server"])
def test_a_hundred_kills(backend: str, tmp_path: Path) -> None:
    result = chaos(tmp_path, backend, 100, limit=4 * 3600)
    assert {fault["phase"] for fault in result["faults"]} >= {"start-up", "first steps", "during a save"}


@pytest.mark.faults
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("backend", ["horovod", "multi_worker_mirrored"])
def test_every_kind_of_fault(backend: str, tmp_path: Path) -> None:
    kinds = ["kill", "kill-all", "launcher", "term", "usr1", "stop"]
    result = chaos(tmp_path, backend, 18, "--faults", *kinds, limit=2 * 3600)
    lost = [f["steps_lost"] for f in result["faults"] if f["kind"] in ("term", "usr1") and f["phase"] != "start-up"]
    assert not any(lost)
