"""MPI jobs under the supervisor: the command, what mpirun says, and jobs of small scripts that need no MPI."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.launched import jobs_in, last, parent
from tests.unit.test_leaving import SAVES
from tfdist.cluster.hosts import Host
from tfdist.cluster.mpirun import ABORT_SECONDS, MPIRUN, Mpi, MpirunOutput, mpirun

needs_mpirun = pytest.mark.skipif(mpirun() is None, reason="no mpirun beside this Python or on PATH")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    yield from jobs_in(tmp_path)


HERE, FAR = (Host("localhost", 2),), (Host("a", 1), Host("b", 2))


@pytest.mark.parametrize(
    ("version", "hosts", "words"),
    [
        ("mpirun (Open MPI) 5.0.11\n", HERE, "--output tag -np 2"),
        ("mpirun (Open MPI) 4.1.4\n", HERE, "--tag-output -np 2"),
        (
            "mpirun (Open MPI) 5.0.11\n",
            FAR,
            "--output tag --prtemca plm_ssh_agent |my ssh| --host a:1,b:2 -x PYTHONPATH -np 3",
        ),
        (
            "mpirun (Open MPI) 4.1.4\n",
            FAR,
            "--tag-output --mca plm_rsh_agent |my ssh| --host a:1,b:2 -x PYTHONPATH -np 3",
        ),
        ("HYDRA build details:\n", FAR, "-prepend-rank -launcher ssh -launcher-exec my -hosts a:1,b:2 -np 3"),
        ("", HERE, "-np 2"),
    ],
)
def test_the_command(version: str, hosts: tuple[Host, ...], words: str) -> None:
    command = Mpi("mpirun", version, ("my", "ssh"), ("PYTHONPATH",)).command(hosts, ["python", "x"])
    assert " ".join(f"|{word}|" if " " in word else word for word in command) == f"mpirun {words} python x"


def test_lines_are_marked_with_who_printed_them() -> None:
    output = MpirunOutput()
    assert output.read(b"[1,3]<stderr>: [1,2]<stdout>: a\n", 0) == ("worker 3", b"[1,2]<stdout>: a\n")
    assert output.read(b"[1,0]<stdout>:old\n", 0) == ("worker 0", b"old\n")
    assert output.read(b"[2] of MPICH\n", 0) == ("worker 2", b"of MPICH\n")
    assert output.read(b"\xff prterun\n", 0) == ("mpirun", b"\xff prterun\n")


KILLED = """\
prterun noticed that process rank 1 with PID 29427 on node vm exited on
signal 9 (Killed).
"""
LEFT = """\
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-29077@1,0]
   Exit code:    75
"""
ABORTED = """\
[1,1]<stderr>: MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
[1,1]<stderr>:   Proc: [[55482,1],1]
[1,1]<stderr>:   Errorcode: 7
"""
MPICH = """\
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 22955 RUNNING AT vm
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
"""
LOST = """\
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-node0-19998@0,0] on node node0
  Remote daemon: [prterun-node0-19998@0,2] on node node2
"""
ROOT = "mpirun starts nothing for root unless OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 are set."


@pytest.mark.parametrize(
    ("text", "code", "ends", "words"),
    [
        (KILLED, 137, 137, "worker 1 (rank 1, host vm) failed first: killed by SIGKILL."),
        (LEFT, 75, 75, "worker 0 (rank 0) failed first: exit code 75."),
        (ABORTED, 7, 7, "worker 1 (rank 1) failed first: exit code 7."),
        (MPICH, 9, 137, "a worker (host vm) failed first: killed by SIGKILL."),
        (LOST, 0, 7, "host node2 is lost: mpirun no longer reaches it."),
        ("prterun has detected an attempt to run as root.\n", 1, 1, ROOT),
        ("", 1, 1, "mpirun failed: exit code 1."),
    ],
)
def test_how_a_job_has_ended(text: str, code: int, ends: int, words: str) -> None:
    output = MpirunOutput()
    for line in text.splitlines(keepends=True):
        output.read(line.encode(), now=5)
    assert (output.code(code), output.describe(MPIRUN, ends)) == (ends, words)
    must_end = words.endswith("exit code 75.") or ends in (7, 137)
    assert output.hangs(5 + ABORT_SECONDS) == must_end
    assert not output.hangs(4.9 + ABORT_SECONDS)
    assert not must_end or output.aborted_with() == ends


def program(folder: Path, body: str) -> str:
    """A stand-in for mpirun."""
    path = folder / "mpirun"
    path.write_text(f"#!/bin/sh\n[ \"$1\" = --version ] && exec echo 'mpirun (Open MPI) 5.0.11'\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_a_lost_host_is_a_failure_although_mpirun_ends_with_0(job: Any, tmp_path: Path) -> None:
    stand_in = program(tmp_path, f"[ -e again ] && exit 0\ntouch again\ncat >&2 <<END\n{LOST}END")
    code, _, errors = job("", processes=1, mpirun=stand_in, max_restarts=1).ended()
    assert code == 0
    assert last(errors).startswith("tfdist: host node2 is lost: mpirun no longer reaches it. All start again")


def test_mpirun_that_does_not_end_an_aborted_job_is_killed(job: Any, tmp_path: Path) -> None:
    stand_in = program(
        tmp_path, f"trap '' TERM\necho $$ >$0.pid\ncat >&2 <<END\n{ABORTED}END\nwhile :; do sleep 1; done"
    )
    code, _, errors = job("", processes=1, mpirun=stand_in).ended()
    assert code == 7
    assert last(errors) == "tfdist: worker 1 (rank 1) failed first: exit code 7. mpirun did not end by itself."


def test_what_mpirun_does_not_do_for_root_is_not_tried_again(job: Any, tmp_path: Path) -> None:
    stand_in = program(tmp_path, "echo 'prterun has detected an attempt to run as root.' >&2\nexit 1")
    code, _, errors = job("", processes=1, mpirun=stand_in, max_restarts=3).ended()
    assert (code, errors.splitlines()[1:]) == (1, [f"tfdist: {ROOT}"])


@needs_mpirun
def test_a_killed_rank_means_a_new_start_of_all(job: Any) -> None:
    body = """\
print("begun", begun)
note(f"{index}-{begun}.up")
wait_for(f"?-{begun}.up", 2)
if begun == 1:
    os.kill(os.getpid(), signal.SIGKILL) if index == 1 else time.sleep(60)
"""
    code, output, errors = job(body, processes=2, mpirun=mpirun(), max_restarts=1).ended()
    assert code == 0, errors
    lines = output.decode().splitlines()
    assert {f"[worker {index}] begun 2" for index in (0, 1)} <= set(lines)
    assert last(errors).startswith("tfdist: worker 1 (rank 1, host ")
    assert last(errors).endswith("failed first: killed by SIGKILL. All start again in 0.05 s: start 2 of 2.")


@needs_mpirun
def test_ranks_end_with_an_mpirun_that_is_killed(job: Any) -> None:
    body = """\
if begun == 1:
    child = subprocess.Popen(["sleep", "60"])
    note(f"child{index}.pid", child.pid)
    wait_for("child*.pid", 2)
    os.kill(os.getppid(), signal.SIGKILL) if index == 1 else time.sleep(60)
"""
    started = job(body, processes=2, mpirun=mpirun(), max_restarts=1)
    code, _, errors = started.ended()
    assert code == 0, errors
    assert last(errors).startswith("tfdist: mpirun failed: killed by SIGKILL. All start again")


@needs_mpirun
def test_ranks_save_and_leave(job: Any) -> None:
    started = job(SAVES.replace("0.3 * index", "0"), processes=2, mpirun=mpirun(), saves=True)
    started.wait_for("*.ready", 2)
    started.launcher.send_signal(signal.SIGTERM)
    code, _, errors = started.ended(20)
    assert (code, last(errors)) == (75, "tfdist: SIGTERM received; all processes have saved and left.")


@needs_mpirun
@pytest.mark.parametrize("victim", ["launcher", "agent"])
def test_nothing_outlives_a_launcher_or_an_agent_that_is_killed(job: Any, victim: str) -> None:
    started = job(SAVES, processes=2, mpirun=mpirun())
    started.wait_for("*.ready", 2)
    started.wait_for("child*.pid", 2)
    rank = int(next(started.folder.glob("worker0-*.pid")).read_text())
    agent = parent(parent(rank))
    assert parent(agent) == started.launcher.pid
    os.kill(agent if victim == "agent" else started.launcher.pid, signal.SIGKILL)
    started.launcher.wait(20)
    started.none_is_left(10)
