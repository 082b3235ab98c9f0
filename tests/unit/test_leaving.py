"""A launcher that is asked to end lets its processes save first, where they can."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.launched import jobs_in, last, parent

SAVES = """\
def leave(*_):
    note(f"{index}.asked")
    time.sleep(0.3 * index)
    note(f"{index}.saved")
    sys.exit(75)
signal.signal(signal.SIGUSR1, leave)
child = subprocess.Popen(["sleep", "60"])
note(f"child{index}.pid", child.pid)
note(f"{index}.ready")
time.sleep(60)
"""
STAYS = SAVES.replace("sys.exit(75)", "time.sleep(60)")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    yield from jobs_in(tmp_path)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGUSR1, 75)])
def test_all_save_and_leave(job: Any, number: signal.Signals, code: int) -> None:
    started = job(SAVES, processes=2, saves=True, max_restarts=3)
    started.wait_for("*.ready", 2)
    started.launcher.send_signal(number)
    got, _, errors = started.ended(20)
    assert got == code
    assert len(list(started.folder.glob("*.saved"))) == 2
    assert errors.splitlines() == [
        f"tfdist: {number.name} received: the processes have 30 s to save and leave.",
        f"tfdist: {number.name} received; all processes have saved and left.",
    ]


def test_beside_servers_the_chief_alone_is_asked(job: Any) -> None:
    body = """\
if role == "chief":
    signal.signal(signal.SIGUSR1, lambda *_: (note("saved"), sys.exit(75)))
    wait_for("*.up", 2)
    note("ready")
    time.sleep(60)
note(f"{role}.up")
wait_for("saved")
"""
    started = job(body, processes=3, servers=1, saves=True)
    started.wait_for("ready")
    started.launcher.send_signal(signal.SIGTERM)
    code, _, errors = started.ended(20)
    assert (code, last(errors)) == (75, "tfdist: SIGTERM received; all processes have saved and left.")


def test_a_scheduler_that_signals_every_process_does_not_disturb(job: Any) -> None:
    started = job(SAVES, processes=1, saves=True)
    started.wait_for("*.ready")
    rank = int(next(started.folder.glob("worker0-*.pid")).read_text())
    os.kill(parent(rank), signal.SIGTERM)
    os.kill(started.launcher.pid, signal.SIGTERM)
    assert started.ended(20)[0] == 75


def test_who_does_not_leave_in_time_is_ended(job: Any) -> None:
    started = job(STAYS, processes=1, saves=True, grace=0.5)
    started.wait_for("*.ready")
    started.launcher.send_signal(signal.SIGTERM)
    code, _, errors = started.ended(20)
    assert code == 143
    assert last(errors) == "tfdist: SIGTERM received; not all have left within grace=0.5 s, and have been ended."


def test_a_second_signal_shortens_the_grace_to_nothing(job: Any) -> None:
    started = job("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STAYS, processes=1, saves=True, grace=60.0)
    started.wait_for("*.ready")
    started.launcher.send_signal(signal.SIGTERM)
    started.wait_for("*.asked")
    start = time.monotonic()
    started.launcher.send_signal(signal.SIGTERM)
    code, _, errors = started.ended(20)
    assert time.monotonic() - start < 4
    assert (code, last(errors)) == (143, "tfdist: SIGTERM received; all processes have been ended at once.")


def test_before_training_there_is_nothing_to_save(job: Any) -> None:
    started = job("note(f'{index}.ready')\ntime.sleep(60)\n", processes=2, saves=True)
    started.wait_for("*.ready", 2)
    started.launcher.send_signal(signal.SIGTERM)
    code, _, errors = started.ended(20)
    assert (code, last(errors)) == (
        75,
        "tfdist: SIGTERM received before training had begun; all processes have been ended.",
    )


def test_training_that_is_done_meanwhile_is_done(job: Any) -> None:
    body = """\
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
note("ready")
time.sleep(60)
"""
    started = job(body, processes=1, saves=True)
    started.wait_for("ready")
    started.launcher.send_signal(signal.SIGTERM)
    code, _, errors = started.ended(20)
    assert (code, last(errors)) == (0, "tfdist: SIGTERM received; training was done.")


def test_a_failure_while_saving_is_named(job: Any) -> None:
    body = SAVES.replace("sys.exit(75)", "sys.exit(6 if index == 0 else 75)")
    started = job(body, processes=2, saves=True, max_restarts=3)
    started.wait_for("*.ready", 2)
    started.launcher.send_signal(signal.SIGTERM)
    code, _, errors = started.ended(20)
    assert code == 6
    assert last(errors) == (
        "tfdist: SIGTERM received, but not all have saved. worker 0 (rank 0, host localhost) failed first: exit code 6."
    )
