"""What the end of a process means, with a clock of the test's own."""

from __future__ import annotations

import signal

import pytest

from tfdist.cluster.hosts import Host
from tfdist.cluster.launch import members
from tfdist.cluster.watch import CHIEF_SECONDS, LEAVE_SECONDS, Outcome, Watch, exit_code, how

GRACE = 10.0


def watch(processes: int, servers: int = 0, restarts: int = 3) -> tuple[Watch, list[str]]:
    told: list[str] = []
    return Watch(members((Host("h", processes),), servers), restarts, told.append, grace=GRACE), told


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


@pytest.mark.parametrize("code", [2, 4, 5, 127, 130, -2])
def test_what_another_start_cannot_mend(code: int) -> None:
    job, _ = watch(1)
    job.ended(0, code, now=0)
    assert job.outcome is not None and not job.outcome.again


@pytest.mark.parametrize("code", [1, 3, 6, 7, 8, 9, 75, -9, -11, -15])
def test_what_another_start_may_mend(code: int) -> None:
    job, _ = watch(1)
    job.ended(0, code, now=0)
    assert job.outcome is not None and job.outcome.again


def test_all_have_the_same_grace_once_one_was_asked_to_leave() -> None:
    job, _ = watch(3)
    job.ended(1, 75, now=0)
    job.ended(0, 75, now=GRACE - 0.1)
    assert job.tick(GRACE - 0.1) == [] and job.outcome is None
    job.tick(GRACE)
    text = "worker 1 (rank 1, host h) failed first: exit code 75. A signal had asked it to leave."
    assert job.outcome == Outcome(75, f"{text} Not all others have left within grace=10 s.", again=True)


def test_who_loses_one_that_left_is_not_the_first() -> None:
    job, _ = watch(2)
    job.ended(1, 75, now=0)
    job.ended(0, 7, now=1)
    assert job.outcome is not None and (job.outcome.code, job.outcome.again) == (75, True)
    assert job.outcome.message is not None and job.outcome.message.startswith("worker 1")


def test_a_request_to_leave_that_has_been_met_is_not_followed_by_another_start() -> None:
    job, _ = watch(2)
    job.leave(signal.SIGHUP, now=0)
    job.ended(1, 0, now=1)
    assert job.outcome is None
    job.ended(0, 75, now=1)
    assert job.outcome == Outcome(75, "SIGHUP received; all processes have saved and left.")


def test_beside_a_chief_that_leaves_nobody_is_started_again() -> None:
    job, told = watch(4, servers=1)
    job.ended(3, -9, now=0)
    assert "started again" in told[-1]
    job.leave(signal.SIGINT, now=0)
    job.ended(2, -int(signal.SIGUSR1), now=0)  # was about to begin
    assert job.tick(5) == [] and job.outcome is None
    job.ended(0, 75, now=6)
    job.ended(1, 7, now=6)  # a server without its chief
    assert job.outcome == Outcome(130, "SIGINT received; all processes have saved and left.")


def test_who_stays_after_the_chief_has_saved_is_not_waited_for() -> None:
    job, _ = watch(3, servers=1)
    job.leave(signal.SIGTERM, now=0)
    job.ended(0, 75, now=1)
    job.tick(1 + LEAVE_SECONDS)
    assert job.outcome == Outcome(75, "SIGTERM received; all processes have saved and left.")


def test_a_server_that_dies_before_the_chief_has_saved_is_a_failure() -> None:
    job, _ = watch(3, servers=1)
    job.leave(signal.SIGTERM, now=0)
    job.ended(1, -11, now=1)
    assert job.outcome is not None and (job.outcome.code, job.outcome.again) == (139, False)


def test_a_chief_that_is_done_needs_no_request() -> None:
    job, _ = watch(3, servers=1)
    job.ended(0, 0, now=0)
    job.leave(signal.SIGTERM, now=1)
    job.tick(1 + LEAVE_SECONDS)
    assert job.outcome == Outcome(0, "SIGTERM received; training was done.")
