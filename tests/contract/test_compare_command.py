"""`tfdist compare`, with real runs: what agrees agrees, and planted faults are found where they are."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.comparison_result import result
from tests.full import full
from tests.jobs import LIMIT, ROOT, Job, environment

BACKENDS = "one_device,mirrored,horovod" if full() else "mirrored,horovod"
TASKS = ROOT / "tests" / "contract" / "faulty.py"

pytestmark = pytest.mark.timeout(2 * LIMIT)


def compare(folder: Path, code: int, *words: str) -> tuple[dict[str, Any], str]:
    """Run it; its JSON file, and what it printed."""
    command = [sys.executable, "-m", "tfdist", "compare", *words, "--json", str(folder / "c.json")]
    ended = Job(command, environment(None)).finish(LIMIT)
    assert ended.code == code, ended.output
    return json.loads((folder / "c.json").read_text()), ended.output


def test_backends_agree(tmp_path: Path) -> None:
    page = tmp_path / "c.html"
    words = ("--backends", BACKENDS, "--task", f"{TASKS}:Net", "--steps", "6", "--rounds", "1")
    told, printed = compare(tmp_path, 0, *words, "--html", str(page), "--network", "100gbit,2us")
    arms = {arm["name"]: arm for arm in told["arms"]}
    pairs = {(pair["a"], pair["b"]): pair["verdict"] for pair in told["pairs"]}
    assert pairs["mirrored x 2", "horovod x 2"] == "same bits"
    if full():
        assert pairs["one_device x 1", "mirrored x 2"] in ("rounding", "same bits")
        assert arms["one_device x 1"]["efficiency"] is None
    assert set(result()) <= set(told)
    for own, sample in zip(told["arms"], result()["arms"], strict=False):
        assert set(sample) <= set(own)
    assert arms["mirrored x 2"]["state_sha256"] == arms["horovod x 2"]["state_sha256"]
    for arm in told["arms"]:
        assert arm["examples_per_second"]["low"] <= arm["examples_per_second"]["median"]
        assert arm["memory_mb"] > 100
        assert arm["startup_seconds"] > 0.5
        assert all(part >= 0 for part in arm["split_ms"].values())
    assert arms["horovod x 2"]["efficiency"]["median"] > 0
    networks = {(p["network"], p["backend"]) for p in told["scaling"]["predictions"]}
    assert networks == {("as measured", "horovod"), ("100gbit,2us", "any")}
    assert told["scaling"]["message_bytes"] == 4 * (8 * 16 + 16 + 16 * 3 + 3)
    assert "verdict: " in printed
    assert page.stat().st_size > 10_000


FAULTS = {
    "WrongDivisor": {"name": "reduced gradients", "step": 1, "rank": 1},
    "WrongLoss": {"name": "local gradients", "step": 1, "rank": 1},
    "WrongLabels": {"name": "batch", "step": 1, "rank": None},
}
CHOSEN = list(FAULTS) if full() else ["WrongDivisor"]


@pytest.mark.parametrize("task", CHOSEN)
def test_a_planted_fault_is_found_where_it_is(tmp_path: Path, task: str) -> None:
    words = ("--backends", "mirrored,horovod", "--task", f"{TASKS}:{task}", "--steps", "4", "--rounds", "0")
    told, printed = compare(tmp_path, 1, *words)
    (pair,) = told["pairs"]
    assert (told["verdict"], pair["verdict"]) == ("different", "different")
    stage = pair["stage"]
    assert {name: stage[name] for name in FAULTS[task]} == FAULTS[task]
    assert f"what differs first is the {stage['name']}" in printed


def started_with(value: str) -> list[int]:
    """Processes whose environment holds a text."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and value.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM] if full() else [signal.SIGTERM])
def test_no_run_outlives_the_command(tmp_path: Path, number: signal.Signals) -> None:
    words = ["--backends", "horovod,mirrored", "--task", f"{TASKS}:Net", "--steps", "100000", "--rounds", "0"]
    mark = f"TFDIST_TEST_RUN={tmp_path}"
    env = environment(dict([mark.split("=")]))
    with subprocess.Popen([sys.executable, "-m", "tfdist", "compare", *words], env=env) as process:
        try:
            deadline = time.monotonic() + LIMIT
            while len(started_with(mark)) < 4:  # itself, mpirun and two ranks
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.send_signal(number)
            assert process.wait(60) == 128 + number
            assert not started_with(mark)
        finally:
            process.kill()
