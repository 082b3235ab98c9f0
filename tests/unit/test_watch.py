"""What the end of a process means, with a clock of the test's own."""

from __future__ import annotations

import pytest

from tfdist.cluster.hosts import Host
from tfdist.cluster.launch import members
from tfdist.cluster.watch import CHIEF_SECONDS, LEAVE_SECONDS, Outcome, Watch, exit_code, how


def watch(processes: int, servers: int = 0, restarts: int = 3) -> tuple[Watch, list[str]]:
    told: list[str] = []
    return Watch(members((Host("h", processes),), servers), restarts, told.append), told


@pytest.mark.parametrize(
    ("code", "shell", "words"),
    [(0, 0, "exit code 0"), (3, 3, "exit code 3"), (-9, 137, "killed by SIGKILL"), (-99, 227, "killed by signal 99")],
)
def test_codes(code: int, shell: int, words: str) -> None:
    assert (exit_code(code), how(code)) == (shell, words)


def test_all_must_end_well() -> None:
    job, _ = watch(2)
    job.ended(1, 0, now=0)
    assert job.outcome is None
    job.ended(0, 0, now=100)
    assert job.outcome == Outcome(0)


def test_the_first_failure_counts() -> None:
    job, _ = watch(3)
    job.ended(2, -11, now=0)
    job.ended(0, 1, now=0)
    assert job.outcome == Outcome(139, "worker 2 (rank 2, host h) failed first: killed by SIGSEGV.", again=True)


def test_the_chief_gives_the_others_time_to_leave() -> None:
    job, _ = watch(4, servers=1)
    job.ended(0, 0, now=0)
    job.ended(2, 1, now=1)  # lost its chief
    assert job.tick(LEAVE_SECONDS - 0.1) == [] and job.outcome is None
    job.tick(LEAVE_SECONDS)
    assert job.outcome == Outcome(0)


def test_all_leave_with_the_chief() -> None:
    job, _ = watch(3, servers=1)
    for rank, now in ((1, 0), (2, 1), (0, 2)):  # told to leave by the chief, which leaves last
        job.ended(rank, 0, now)
    assert job.outcome == Outcome(0)


@pytest.mark.parametrize(("rank", "name"), [(1, "ps 0"), (2, "worker 0")])
def test_who_is_needed_must_not_leave_long_before_the_chief(rank: int, name: str) -> None:
    job, _ = watch(3, servers=1)
    job.ended(rank, 0, now=5)
    job.tick(5 + CHIEF_SECONDS - 0.1)
    assert job.outcome is None
    job.tick(5 + CHIEF_SECONDS)
    assert job.outcome is not None and job.outcome.code == 1
    assert job.outcome.message is not None and name in job.outcome.message and "still needs it" in job.outcome.message


def test_the_chief_fails() -> None:
    job, _ = watch(4, servers=1)
    job.ended(0, 2, now=0)
    assert job.outcome == Outcome(2, "chief 0 (rank 0, host h) failed first: exit code 2.")


def test_workers_come_back_later_and_later() -> None:
    job, told = watch(4, servers=1, restarts=2)
    job.ended(2, -9, now=0)
    assert job.tick(0.9) == []
    assert job.tick(1.0) == [2]
    assert job.tick(1.1) == []
    job.ended(3, 1, now=10)
    assert job.tick(11.9) == []
    assert job.tick(12) == [3]
    job.ended(2, 1, now=20)
    assert job.tick(1000) == [] and job.outcome is None
    assert "worker_restarts=2 are used up; the job goes on with 1 worker(s)" in told[-1]
    job.ended(3, 4, now=2000)
    text = "worker 0 (rank 2, host h) failed first: killed by SIGKILL. No worker is left."
    assert job.outcome == Outcome(137, text, again=True)


def test_a_worker_that_waits_for_its_new_start_is_still_one() -> None:
    job, _ = watch(4, servers=1, restarts=1)
    job.ended(2, 1, now=0)
    job.ended(3, 1, now=0)
    assert job.outcome is None
    assert job.tick(1) == [2]


def test_a_server_cannot_come_back() -> None:
    job, _ = watch(4, servers=1)
    job.ended(1, -9, now=0)
    assert job.outcome is not None and job.outcome.code == 137
    assert job.outcome.message is not None and "weights it held are lost" in job.outcome.message
