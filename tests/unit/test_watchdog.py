"""How processes notice each other's ends: real processes over TCP, without a launcher, MPI or TensorFlow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.jobs import Ended, run_tf_config
from tfdist.cluster import watchdog
from tfdist.cluster.channel import Alone
from tfdist.cluster.identity import Identity
from tfdist.cluster.places import Seen

START = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from tfdist.cluster import watchdog
from tfdist.cluster.failure import ends_the_job
from tfdist.cluster.identity import identify
from tfdist.cluster.places import Seen
from tfdist.cluster.tcp_channel import open_tcp

channel = open_tcp(identify())
me = channel.rank
marks = 70
stall = 0.0

def start():
    look = lambda: Seen(marks // 4, marks, 0, "computing", True)
    watchdog.start(channel, identify(), look, stall_timeout=stall, folder=Path(sys.argv[1]), notice=print)

def pause(seconds):
    "As SIGSTOP and SIGCONT from outside."
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
"""
CAUSE = r"rank {} of {} \(host [^)]*\) {}"


def job(tmp_path: Path, program: str, processes: int = 2) -> list[Ended]:
    path = tmp_path / "program.py"
    path.write_text(START + program)
    return run_tf_config(processes, path, tmp_path, timeout=90)


def codes(jobs: list[Ended]) -> list[int]:
    return [ended.code for ended in jobs]


def said(ended: Ended) -> list[str]:
    return [line for line in ended.output.splitlines() if line.startswith("tfdist:")]


def test_a_process_that_dies_ends_the_others_and_one_says_so(tmp_path: Path) -> None:
    jobs = job(tmp_path, "start()\nif me == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)\n", 3)
    assert codes(jobs) == [7, -9, 7]
    assert len(said(jobs[0])) == 1
    assert re.search(CAUSE.format(1, 3, r"has died (after step 17|before the first step)"), jobs[0].output)
    assert "memory" in jobs[0].output
    assert jobs[2].output == ""


def test_without_rank_0_each_of_the_others_says_so_at_its_own_time(tmp_path: Path) -> None:
    jobs = job(tmp_path, "start()\nif me == 0: os._exit(0)\ntime.sleep(60)\n", 3)
    assert codes(jobs) == [0, 7, 7]
    for other in jobs[1:]:
        assert len(said(other)) == 1
        assert re.search(CAUSE.format(0, 3, "has died"), other.output)


@pytest.mark.parametrize("failing", [0, 1])
def test_one_that_fails_tells_it_and_the_others_are_quiet(tmp_path: Path, failing: int) -> None:
    program = (
        "start()\n"
        "with ends_the_job(channel, lambda: 'at step 18'):\n"
        f"    if me == {failing}: raise ValueError('the sky is falling')\n"
        "    time.sleep(60)\n"
    )
    jobs = job(tmp_path, program, 3)
    assert codes(jobs) == [1, 1, 1]
    lines = jobs[failing].output.splitlines()
    assert re.search(CAUSE.format(failing, 3, "failed at step 18: ValueError: the sky is falling$"), lines[-1])
    assert jobs[failing].output.count("Traceback") == 1
    assert [ended.output for ended in jobs if ended is not jobs[failing]] == ["", ""]


def test_an_error_that_follows_from_another_ones_end_waits_for_the_cause(tmp_path: Path) -> None:
    program = (
        "start()\n"
        "with ends_the_job(channel, lambda: 'at step 18'):\n"
        "    if me == 1: time.sleep(1); raise ValueError('the sky is falling')\n"
        "    error = type('Lost', (Exception,), {'__module__': 'tensorflow.errors'})\n"
        "    raise error('Connection reset by peer')\n"
    )
    jobs = job(tmp_path, program)
    assert codes(jobs) == [1, 1]
    assert (len(said(jobs[1])), jobs[0].output) == (1, "")


def test_a_second_failure_is_labelled(tmp_path: Path) -> None:
    program = (
        "start()\n"
        "with ends_the_job(channel, lambda: f'at step {18 + me}'):\n"
        "    time.sleep(0.5 * me)\n"
        "    raise ValueError('the sky is falling')\n"
    )
    jobs = job(tmp_path, program)
    assert codes(jobs) == [1, 1]
    assert [len(said(ended)) for ended in jobs] == [1, 1]
    assert said(jobs[0])[0].startswith("tfdist: rank 0 of 2")
    assert said(jobs[1])[0].startswith("tfdist: secondary: rank 1 of 2")


def test_a_pause_does_no_harm_and_a_goodbye_is_no_death(tmp_path: Path) -> None:
    program = (
        "start()\n"
        "if me == 1: pause(3)\n"
        "channel.exchange('after the pause', None)\n"
        "if me: watchdog.stop(channel)\n"
        "else: time.sleep(1); watchdog.stop(channel)\n"
        "print('done')\n"
    )
    jobs = job(tmp_path, program)
    assert [(ended.code, ended.output) for ended in jobs] == [(0, "done\n")] * 2


@pytest.mark.parametrize("stopped", [0, 1])
def test_one_that_is_stopped_ends_the_job(tmp_path: Path, stopped: int) -> None:
    program = (
        "stall = 1.5\n"  # which is then the limit of silence, too
        "start()\n"
        f"if me == {stopped}: pause(5)\n"
        "for marks in range(70, 1000): time.sleep(0.1)\n"
    )
    jobs = job(tmp_path, program)
    assert codes(jobs) == [7, 7]
    (line,) = said(jobs[1 - stopped])
    assert re.search(CAUSE.format(stopped, 2, r"has said nothing for 1.5 s .*: stopped, or cut off"), line)
    assert (tmp_path / f"tfdist-stall-rank-{1 - stopped}.txt").exists()


def test_one_that_stands_still_is_named_with_all_places_and_stacks(tmp_path: Path) -> None:
    program = (
        "stall = 2.0\n"
        "def stuck(): time.sleep(60)\n"
        "start()\n"
        "for marks in range(70, 75):\n"
        "    if me == 1 and marks == 73: stuck()\n"
        "    time.sleep(0.6)\n"
        "time.sleep(60)\n"
    )
    chief, other = job(tmp_path, program)
    assert (chief.code, other.code) == (8, 8)
    assert other.output == ""
    (line,) = said(chief)
    assert re.search(
        CAUSE.format(1, 2, r"has not moved on for 2 s \(stall_timeout\) after step 18 \(computing\)"), line
    )
    assert line.endswith(f"Python stacks: tfdist-stall-rank-0.txt, tfdist-stall-rank-1.txt in {tmp_path}")
    assert chief.output.splitlines()[0].split() == ["rank", "host", "step", "seconds", "phase"]
    assert "in stuck" in (tmp_path / "tfdist-stall-rank-1.txt").read_text()
    assert "in stuck" not in (tmp_path / "tfdist-stall-rank-0.txt").read_text()


def test_the_end_of_the_launcher_is_the_end(tmp_path: Path) -> None:
    program = (
        "os.environ['TFDIST_LAUNCHED'] = '1'\n"
        "if me == 1:\n"
        "    # In between, a launcher that goes away.\n"
        "    if os.fork():\n"
        "        time.sleep(2); os._exit(0)\n"
        "start()\n"
        "time.sleep(60)\n"
    )
    chief, _ = job(tmp_path, program)
    assert chief.code == 7
    (line,) = said(chief)
    assert re.search(CAUSE.format(1, 2, "has lost its launcher after step 17"), line)


def test_a_process_alone_is_watched_until_it_stops(tmp_path: Path) -> None:
    channel = Alone()
    looks: list[int] = []

    def look() -> Seen:
        looks.append(1)
        return Seen(1, len(looks), 0, "computing", True)

    dog = watchdog.start(channel, Identity("alone"), look, stall_timeout=1.0, folder=tmp_path, notice=print)
    while len(looks) < 4:
        dog.told(0.1)
    watchdog.stop(channel)
    assert not dog._thread.is_alive()
    assert watchdog.first_cause(channel, 1, "nobody watches") is None
