"""Networks that fail while three hosts train: for good, for a moment, and in one direction."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.hosts.netlab import AGENT, Lab, lab
from tests.jobs import ROOT, Job, python

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

TOY = ROOT / "tests" / "toy.py"
BACKENDS = ["horovod", "multi_worker_mirrored"]
SECONDS = 40
"""In which a job ends whose network has failed: 15 of silence, and what launchers take to end what they still reach."""


def start(hosts: Lab, backend: str, folder: Path, *, steps: int) -> Job:
    """A job on all hosts, which trains then."""
    launch = ["tfdist", "launch", "--rsh", AGENT, "--hosts", ",".join(hosts.hosts), "--", "--backend", backend]
    slow = ["--task", f"{TOY}:Slow", "--task-args", "seconds=0.1", "--steps-per-chunk", 2, "--steps", steps]
    saves = ["--checkpoint-dir", folder / "checkpoints", "--save-every", 10, "--report", folder / "report.json"]
    job = hosts.start("node0", python("-m", [*launch, *slow, "--intra-op-threads", 1, *saves]))
    job.wait_for("epoch 1/", timeout=300)
    return job


def ends(hosts: Lab, job: Job) -> None:
    """It ends by itself, says that node2 is the cause, and leaves no process."""
    began = time.monotonic()
    ended = job.finish(timeout=120)
    took = time.monotonic() - began
    print(f"ended after {took:.1f} s with {ended.code}: {ended.output[-1500:]}")
    assert ended.code not in (0, 124), ended.output[-3000:]
    assert took < SECONDS, ended.output[-3000:]
    assert "node2" in ended.output.rpartition("epoch 1/")[2]
    hosts.mend("node2")
    deadline = time.monotonic() + 90  # an agent that is cut off ends after a minute of silence
    while left := [pid for host in hosts.hosts for pid in hosts.processes(host)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cut_for_good_ends_the_job(backend: str, tmp_path: Path) -> None:
    with lab(3) as hosts:
        job = start(hosts, backend, tmp_path, steps=5000)
        hosts.cut("node2")
        ends(hosts, job)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_no_longer_reaches_the_others_ends_the_job(backend: str, tmp_path: Path) -> None:
    with lab(3) as hosts:
        job = start(hosts, backend, tmp_path, steps=5000)
        hosts.mute("node2")
        ends(hosts, job)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cut_of_three_seconds_does_no_harm(backend: str, tmp_path: Path) -> None:
    with lab(3) as hosts:
        job = start(hosts, backend, tmp_path, steps=150)
        hosts.cut("node2")
        time.sleep(3)
        hosts.mend("node2")
        job.finish(timeout=120).check()
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == 150
