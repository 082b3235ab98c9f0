"""What happens to a job when one of its processes dies, stops or fails: real jobs, and what is left of them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.jobs import ROOT, Ended, Job, environment, is_there, mpirun, python, run_tf_config

TRAIN = ROOT / "scripts" / "train.py"
TOY = ROOT / "tests" / "toy.py"
ENDLESS = ["--task", f"{TOY}:ToyNet", "--steps", 10**7, "--validate-every", 0]
SECONDS = 30
"""In which a job must have ended; it takes about one on an idle machine."""


def started(kind: str, *flags: object) -> Job:
    """A job of two processes that trains until something happens to it."""
    if kind == "launch":
        backend = ["--backend", "multi_worker_mirrored"]
        command = python("-m", ["tfdist", "launch", "--processes", 2, "--", *backend, *ENDLESS, *flags])
    else:
        command = [mpirun(), "--oversubscribe", "-np", "2", *python(TRAIN, ["--backend", kind, *ENDLESS, *flags])]
    return Job(command, environment(None))


@contextmanager
def in_training(kind: str, *flags: object) -> Iterator[tuple[Job, dict[int, int]]]:
    """The job once it trains, and its processes by rank. None of them may be left at the end."""
    job = started(kind, *flags)
    try:
        job.wait_for(" step ", timeout=300)
        ranks = job.ranks()
        assert sorted(ranks) == [0, 1]
        begin = time.monotonic()
        yield job, ranks
        deadline = begin + SECONDS
        while any(map(is_there, ranks.values())) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = [rank for rank, pid in ranks.items() if is_there(pid)]
        assert not left, f"ranks {left} are left\n{job.printed()[-3000:]}"
    finally:
        for pid in job.ranks().values():  # where the test has failed
            os.kill(pid, signal.SIGKILL)
        if is_there(job.pid):
            job.finish(0)


def ours(ended: Ended) -> Sequence[str]:
    # mpirun's own lines may come in between, without an end.
    return [line for line in ended.output.splitlines() if re.match(r"\s*(\[.*?\] )?tfdist: ", line)]


@pytest.mark.parametrize(("kind", "code"), [("horovod", 137), ("multi_worker_mirrored", 137), ("launch", 137)])
def test_a_rank_that_is_killed_ends_the_job_and_is_named(kind: str, code: int) -> None:
    with in_training(kind) as (job, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        ended = job.finish(SECONDS)
    assert ended.code == code, ended.output[-3000:]
    causes = [line for line in ours(ended) if "rank 1 of 2" in line]
    assert len(causes) == 1, ended.output[-3000:]
    assert re.search(r"rank 1 of 2 \(host [^)]*\) has died after step \d+", causes[0])
    assert "lost another rank" not in ended.output


def test_a_rank_that_is_stopped_ends_the_job_and_is_named(tmp_path: Path) -> None:
    with in_training("horovod", "--stall-timeout", 5, "--checkpoint-dir", tmp_path) as (job, ranks):
        os.kill(ranks[1], signal.SIGSTOP)
        ended = job.finish(SECONDS)
    assert ended.code == 7, ended.output[-3000:]
    last = ours(ended)[-1]
    assert re.search(r"rank 1 of 2 \(host [^)]*\) has said nothing for 5 s after step \d+", last)
    assert str(tmp_path) in last
    assert "in main" in (tmp_path / "tfdist-stall-rank-0.txt").read_text()


def test_a_failing_step_is_told_once_by_processes_that_no_launcher_ends() -> None:
    flags = ["--backend", "multi_worker_mirrored", "--task", f"{TOY}:Failing", "--steps", "50"]
    chief, failed = run_tf_config(2, TRAIN, *flags, timeout=300)
    assert (chief.code, failed.code) == (1, 1), chief.output[-3000:] + failed.output[-3000:]
    assert ours(chief) == []
    (line,) = ours(failed)
    assert re.search(r"rank 1 of 2 \(host [^)]*\) failed at step 7: ValueError: the sky is falling", line)
    assert failed.output.splitlines()[-1] == line


def test_without_mpirun_no_rank_is_left() -> None:
    with in_training("horovod") as (job, _):
        os.kill(job.pid, signal.SIGKILL)
        job.finish(SECONDS)
