"""`tfdist launch` as a user starts it."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.jobs import LIMIT, ROOT, Job, environment, python, run_alone

TRAIN = ROOT / "scripts" / "train.py"
TOY = ROOT / "tests" / "toy.py"


def start_parameter_servers(processes: int, report: Path, steps: int) -> Job:
    """A chief, a parameter server, and workers."""
    flags = [
        "--backend",
        "parameter_server",
        "--steps",
        steps,
        "--task",
        f"{TOY}:ToyNet",
        "--validate-every",
        0,
        "--report",
        report,
    ]
    return Job(python("-m", ["tfdist", "launch", "--processes", processes, "--", *flags]), environment(None))


def process_of(job: Job, role: str, index: int) -> int:
    """The id of the launched process that has this role."""
    listed = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    for pid in listed:
        try:
            variables = Path("/proc", str(pid), "environ").read_text().split("\0")
            group = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        config = next((v.partition("=")[2] for v in variables if v.startswith("TF_CONFIG=")), "{}")
        if json.loads(config).get("task") == {"type": role, "index": index} and descends(int(group[1]), job.pid):
            return pid
    raise AssertionError(f"no {role} {index} among {job.printed()[-3000:]}")


def descends(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        pid = int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
    return False


def test_several_devices_in_each_process_give_the_numbers_of_as_many_mirrored(tmp_path: Path) -> None:
    common = ["--task", f"{TOY}:ToyNet", "--steps", 8, "--quiet", "--replicas"]
    several = [
        "--backend",
        "multi_worker_mirrored",
        "--collectives",
        "ring",
        *common,
        2,
        "--report",
        tmp_path / "ring.json",
    ]
    run_alone("-m", "tfdist", "launch", "--processes", 2, "--", *several).check()
    run_alone(TRAIN, "--backend", "mirrored", *common, 4, "--report", tmp_path / "mirrored.json").check()
    ring, mirrored = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("ring", "mirrored"))
    assert ring["losses"] == pytest.approx(mirrored["losses"], abs=1e-6)
    assert (ring["replicas_in_sync"], ring["processes"]) == (4, 2)


def test_a_worker_that_is_killed_is_started_again(tmp_path: Path) -> None:
    job = start_parameter_servers(4, tmp_path / "report.json", 800)
    job.wait_for("/800  loss", timeout=LIMIT)
    os.kill(process_of(job, "worker", 1), signal.SIGKILL)
    ended = job.finish(timeout=LIMIT).check()
    assert "worker 1 (rank 3, host localhost) failed: killed by SIGKILL. It is started again" in ended.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["steps"], report["examples_seen"]) == (800, 800 * 16)
    assert 800 <= report["workers"]["updates"] <= 802  # a step that had been applied may have been done again


def test_a_parameter_server_that_is_killed_ends_the_job(tmp_path: Path) -> None:
    job = start_parameter_servers(3, tmp_path / "report.json", 100_000)
    job.wait_for("/100000  loss", timeout=LIMIT)
    os.kill(process_of(job, "ps", 0), signal.SIGKILL)
    ended = job.finish(timeout=LIMIT)
    assert ended.code == 137
    last = [line for line in ended.output.splitlines() if line.startswith("tfdist: ")][-1]
    assert re.search(r"ps 0 \(rank 1, host localhost\) failed first: killed by SIGKILL.*weights it held are lost", last)
    assert not (tmp_path / "report.json").exists()
