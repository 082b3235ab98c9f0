"""When a job starts again: the policy alone, and with real processes that fail."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.launched import jobs_in, last, rsh
from tfdist.cluster.restarts import LONGEST_SECONDS, STEADY_SECONDS, Restarts
from tfdist.cluster.watch import Outcome

FAILED = Outcome(137, "worker 1 failed first: killed by SIGKILL.", again=True)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    yield from jobs_in(tmp_path)


def waits(restarts: Restarts, count: int, lasted: float = 1.0) -> list[float | None]:
    return [restarts.after(FAILED, lasted)[0] for _ in range(count)]


def test_waits_double_up_to_a_minute_and_are_counted() -> None:
    assert waits(Restarts(9), 10) == [1, 2, 4, 8, 16, 32, LONGEST_SECONDS, LONGEST_SECONDS, LONGEST_SECONDS, None]
    many = Restarts(5000)
    assert waits(many, 5000)[-1] == LONGEST_SECONDS
    assert waits(many, 1) == [None]


def test_a_start_that_has_lasted_begins_the_waits_anew_but_not_the_count() -> None:
    restarts = Restarts(4)
    assert waits(restarts, 2) == [1, 2]
    assert waits(restarts, 1, STEADY_SECONDS + 1) == [1]
    assert waits(restarts, 2) == [2, None]


def test_what_is_said() -> None:
    restarts = Restarts(2)
    assert restarts.after(FAILED, 1) == (1, f"{FAILED.message} All start again in 1 s: start 2 of 3.")
    restarts.after(FAILED, 1)
    assert restarts.after(FAILED, 1) == (None, f"{FAILED.message} max_restarts=2 are used up.")
    assert Restarts(0).after(FAILED, 1) == (None, FAILED.message)


def test_what_no_start_can_mend_is_not_started_again() -> None:
    wrong = Outcome(2, "worker 0 failed first: exit code 2.")
    text = f"{wrong.message} It is not started again, since that would end in the same way."
    assert Restarts(2).after(wrong, 1) == (None, text)
    assert Restarts(2).after(Outcome(0), 1) == (None, None)
    left = Outcome(75, "SIGTERM received; all processes have saved and left.")
    assert Restarts(2).after(left, 1) == (None, left.message)


def test_a_killed_process_means_a_new_start_of_all_at_new_ports(job: Any) -> None:
    body = """\
note(f"{index}-{begun}.address", config["cluster"]["worker"][index])
wait_for(f"?-{begun}.address", 2)
if begun == 1:
    os.kill(os.getpid(), signal.SIGKILL) if index == 1 else time.sleep(60)
"""
    started = job(body, processes=2, max_restarts=3)
    code, _, errors = started.ended()
    assert code == 0
    assert errors == (
        "tfdist: worker 1 (rank 1, host localhost) failed first: killed by SIGKILL. All start again in 0.05 s: start 2 "
        "of 4.\n"
    )
    assert len({path.read_text() for path in started.folder.glob("*.address")}) == 4


def test_the_same_failure_again_and_again_ends_with_its_code(job: Any) -> None:
    started = job("sys.exit(3)\n", processes=1, max_restarts=2)
    code, _, errors = started.ended()
    assert (code, len(list(started.folder.glob("*.pid")))) == (3, 3)
    assert [line.rpartition(". ")[2] for line in errors.splitlines()] == [
        "All start again in 0.05 s: start 2 of 3.",
        "All start again in 0.1 s: start 3 of 3.",
        "max_restarts=2 are used up.",
    ]


def test_wrong_usage_is_not_tried_again(job: Any) -> None:
    started = job("sys.exit(2)\n", processes=1, max_restarts=2)
    code, _, errors = started.ended()
    assert (code, len(list(started.folder.glob("*.pid")))) == (2, 1)
    assert "would end in the same way" in last(errors)


def test_a_server_that_dies_means_a_new_start_of_all(job: Any) -> None:
    body = """\
wait_for(f"*.pid", 3)
if role == "ps" and begun == 1:
    sys.exit(9)
if begun == 1:
    time.sleep(60)
"""
    code, _, errors = job(body, processes=3, servers=1, max_restarts=1).ended()
    assert code == 0
    assert "exit code 9. The weights it held are lost: the job must start again. All start again" in last(errors)


def test_a_process_that_was_asked_to_leave_takes_the_others_with_it_when_they_have_saved(job: Any) -> None:
    body = """\
if begun == 1:
    time.sleep(0.7 * index)
    note(f"{index}.saved")
    sys.exit(75)
"""
    started = job(body, processes=2, max_restarts=1)
    code, _, errors = started.ended()
    assert code == 0
    assert len(list(started.folder.glob("*.saved"))) == 2
    assert "worker 0 (rank 0, host localhost) failed first: exit code 75. A signal had asked it to leave" in errors


# A host that has gone as soon as there is a file `down`; its processes are the agent's, which has a shell above it.
LOST = 'if [ "$host" = b.test ] && [ -e down ]; then exit 255; fi\nexec sh -c "$1"'
LOSES_B = """\
wait_for("*.pid", 3)
note("size-" + str(len(config["cluster"]["worker"])) + f"-{index}")
if begun == 1 and index == 2:
    note("down")
    os.kill(os.getppid(), signal.SIGKILL)
if begun == 1:
    time.sleep(60)
"""


def test_a_restart_goes_on_without_a_lost_host(job: Any, tmp_path: Path) -> None:
    started = job(
        LOSES_B, hosts="a.test:2,b.test", rsh=rsh(tmp_path, LOST), max_restarts=2, min_processes=2, quiet=True
    )
    code, _, errors = started.ended()
    assert code == 0, errors
    assert len(list(started.folder.glob("size-2-*"))) == 2
    first, second = (line for line in errors.splitlines() if line.startswith("tfdist: "))
    assert first.startswith("tfdist: host b.test: its agent has ended") and first.endswith("start 2 of 3.")
    assert second == (
        "tfdist: host b.test is lost (its agent has ended (exit code 255)). The job goes on with 2 of 3 processes."
    )


def test_too_few_processes_are_no_job(job: Any, tmp_path: Path) -> None:
    settings = {"hosts": "a.test:2,b.test", "rsh": rsh(tmp_path, LOST), "max_restarts": 1, "min_processes": 3}
    code, _, errors = job(LOSES_B, **settings).ended()
    assert code == 3
    assert last(errors).endswith("2 of 3 processes are left, and min_processes=3. max_restarts=1 are used up.")


def test_a_signal_between_two_starts_ends_the_job(job: Any) -> None:
    started = job("sys.exit(1)\n", processes=1, max_restarts=5, back_off=30.0)
    assert b"start 2 of 6" in started.launcher.stderr.readline()
    started.launcher.send_signal(signal.SIGTERM)
    start = time.monotonic()
    code, _, errors = started.ended(15)
    assert time.monotonic() - start < 10
    assert (code, last(errors)) == (
        143,
        "tfdist: SIGTERM received; all processes have been ended. It is not started again.",
    )
