"""The supervisor with real processes: small scripts in place of training."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import ROOT
from tests.unit.launched import Job, is_alive, jobs_in, last, rsh


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    yield from jobs_in(tmp_path)


def test_output_is_marked_and_lines_stay_whole(job: Any) -> None:
    body = """\
out = sys.stdout.buffer
if index == 0:
    out.write(b"x" * 150_000 + b"\\n" + bytes(range(256)).replace(b"\\n", b"") + b"\\n\\nno end")
else:
    print(*[f"line {i}" for i in range(2000)], sep="\\n")
    print("an error", file=sys.stderr)
"""
    code, output, errors = job(body, processes=2).ended()
    assert code == 0
    assert errors == "[worker 1] an error\n"
    lines = [line + b"\n" for line in output.split(b"\n")[:-1]]
    first = [line.removeprefix(b"[worker 0] ") for line in lines if line.startswith(b"[worker 0] ")]
    second = [line.removeprefix(b"[worker 1] ") for line in lines if line.startswith(b"[worker 1] ")]
    assert len(first) + len(second) == len(lines)
    assert second == [f"line {i}\n".encode() for i in range(2000)]
    assert [set(line) for line in first[:3]] == [set(b"x\n")] * 3
    assert sum(len(line) - 1 for line in first[:3]) == 150_000
    assert first[3:] == [bytes(range(256)).replace(b"\n", b"") + b"\n", b"\n", b"no end\n"]


def test_output_comes_at_once(job: Any) -> None:
    started = job('print("here I am")\nwait_for("go")\n', processes=1)
    assert started.launcher.stdout.readline() == b"[worker 0] here I am\n"
    (started.folder / "go").touch()
    assert started.ended()[0] == 0


def test_the_first_failure_ends_all_and_gives_the_code(job: Any) -> None:
    body = """\
if index == 1:
    sys.exit(7)
time.sleep(60)
"""
    code, _, errors = job(body, processes=3).ended(20)
    assert code == 7
    assert errors == "tfdist: worker 1 (rank 1, host localhost) failed first: exit code 7.\n"


@pytest.mark.parametrize(("name", "code"), [("SIGKILL", 137), ("SIGSEGV", 139)])
def test_a_death_by_a_signal_is_named(job: Any, name: str, code: int) -> None:
    body = f"os.kill(os.getpid(), signal.{name}) if index == 0 else time.sleep(60)\n"
    got, _, errors = job(body, processes=2).ended(20)
    assert got == code
    assert last(errors) == f"tfdist: worker 0 (rank 0, host localhost) failed first: killed by {name}."


def test_a_program_that_is_not_there(job: Any) -> None:
    code, _, errors = job("", processes=1, folder="/nowhere").ended()
    assert code == 127
    assert "cannot be started" in errors and "/nowhere" in errors


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_to_the_launcher_ends_all(job: Any, number: signal.Signals, code: int) -> None:
    started = job('note(f"{index}.ready")\ntime.sleep(60)\n', processes=2)
    started.wait_for("*.ready", 2)
    started.launcher.send_signal(number)
    got, _, errors = started.ended(15)
    assert got == code
    assert last(errors) == f"tfdist: {number.name} received; all processes have been ended."


def test_a_second_signal_does_not_wait(job: Any) -> None:
    body = """\
signal.signal(signal.SIGTERM, lambda *_: note("asked"))
note("up.ready")
while True:
    time.sleep(60)
"""
    started = job(body, processes=1)
    started.wait_for("up.ready")
    started.launcher.send_signal(signal.SIGINT)
    started.wait_for("asked")
    started.launcher.send_signal(signal.SIGINT)
    start = time.monotonic()
    assert started.ended(15)[0] == 130
    assert time.monotonic() - start < 4  # the grace is 5 s


FAMILY = """\
child = subprocess.Popen(["sleep", "60"])
note(f"child{index}.pid", child.pid)
time.sleep(60)
"""


def test_nothing_outlives_a_launcher_that_is_killed(job: Any) -> None:
    started = job(FAMILY, processes=2)
    started.wait_for("*.pid", 4)
    started.launcher.kill()
    started.none_is_left(10)


def test_what_a_process_has_started_ends_with_it(job: Any) -> None:
    started = job(FAMILY.replace("time.sleep(60)", ""), processes=1)
    start = time.monotonic()
    assert started.ended(20)[0] == 0
    assert time.monotonic() - start < 15


def test_what_has_left_its_group_ends_with_the_job(job: Any) -> None:
    body = """\
child = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
note("child.pid", child.pid)
"""
    assert job(body, processes=1).ended(20)[0] == 0


def agents(job: Job) -> list[int]:
    """The numbers of the agents that a launcher has started."""
    parents = [
        int(Path(f"/proc/{path.read_text()}/stat").read_text().rpartition(")")[2].split()[1])
        for path in job.folder.glob("*.pid")
    ]
    return sorted(set(parents))


def test_an_agent_that_dies_takes_its_processes_with_it_and_is_named(job: Any) -> None:
    started = job("time.sleep(60)\n", processes=2)
    started.wait_for("*.pid", 2)
    (agent,) = agents(started)
    os.kill(agent, signal.SIGKILL)
    code, _, errors = started.ended(20)
    assert code == 7
    assert "host localhost: its agent has ended (exit code -9)" in last(errors)


def test_two_launches_at_once_have_other_ports(job: Any) -> None:
    body = """\
port = int(config["cluster"]["worker"][index].rpartition(":")[2])
assert os.environ["TF_GRPC_REUSE_PORT"] == "true"
with socket.socket(socket.AF_INET) as server:
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.bind(("127.0.0.1", port))
    server.listen()
    note(f"{index}.port", port)
    wait_for("go")
"""
    jobs = [job(body, name, processes=4) for name in ("one", "two")]
    ports = [int(path.read_text()) for one in jobs for path in one.wait_for("*.port", 4)]
    assert len(set(ports)) == 8
    for port in ports:
        with socket.socket(socket.AF_INET) as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
    for one in jobs:
        (one.folder / "go").touch()
        assert one.ended()[0] == 0


def test_the_addresses_are_told(job: Any) -> None:
    _, output, errors = job('print(config["cluster"]["worker"][0])\n', processes=1, quiet=False).ended()
    address = output.decode().removeprefix("[worker 0] ").strip()
    assert address.startswith("127.0.0.1:")
    assert errors.strip().endswith(f"without authentication, at {address}")


def test_a_reader_that_has_gone_ends_the_job(job: Any) -> None:
    started = job("while True:\n    print('more')\n    time.sleep(0.01)\n", processes=2)
    started.launcher.stdout.readline()
    started.launcher.stdout.close()
    started.launcher.stdout = None
    assert started.ended(15)[0] == 141


def test_a_reader_that_stops_reading_does_not_keep_the_job_alive(job: Any) -> None:
    started = job("note(f'{index}.ready')\nwhile True:\n    print('y' * 1000)\n", processes=1)
    started.wait_for("*.ready")
    time.sleep(0.5)  # the pipes fill meanwhile; nothing depends on how far
    started.launcher.send_signal(signal.SIGTERM)
    started.launcher.wait(20)
    started.none_is_left(0)
    assert started.launcher.returncode == 143


HERE = 'exec sh -c "$1"'


def test_other_hosts_are_reached_through_rsh(job: Any, tmp_path: Path) -> None:
    reach = rsh(tmp_path, f'echo "Welcome to $host"\ncd /\n{HERE}')
    body = 'print(role, index, os.getcwd(), *[a.rpartition(":")[0] for a in config["cluster"]["worker"]])\n'
    started = job(body, hosts="a.test:2,b.test", rsh=reach)
    code, output, errors = started.ended()
    assert code == 0, errors
    assert sorted(output.decode().splitlines()) == [
        f"[worker {i}] worker {i} {started.folder} a.test a.test b.test" for i in range(3)
    ]
    assert sorted(errors.splitlines()) == ["[a.test] Welcome to a.test", "[b.test] Welcome to b.test"]


def test_a_host_that_cannot_be_reached_is_named(job: Any, tmp_path: Path) -> None:
    reach = rsh(tmp_path, f'if [ "$host" = b.test ]; then echo "no route" >&2; exit 255; fi\n{HERE}')
    code, _, errors = job("time.sleep(60)", hosts="a.test,b.test", rsh=reach).ended()
    assert code == 3
    assert "[b.test] no route" in errors
    assert "tfdist: host b.test: its agent has ended (exit code 255)" in last(errors)


def test_an_agent_that_never_answers_is_named(job: Any, tmp_path: Path) -> None:
    reach = rsh(tmp_path, f'if [ "$host" = b.test ]; then exec sleep 60; fi\n{HERE}')
    start = time.monotonic()
    code, _, errors = job("time.sleep(60)", hosts="a.test,b.test", rsh=reach, start_seconds=1.5).ended(30)
    assert time.monotonic() - start < 20
    assert code == 3
    assert "host b.test: no answer from its agent after start_seconds=1.5" in last(errors)


def test_a_missing_rsh_is_named(job: Any) -> None:
    code, _, errors = job("", hosts="a.test", rsh=["/nowhere/ssh"]).ended()
    assert code == 3
    assert "host a.test: its agent cannot be started" in last(errors)


def test_the_chief_ends_a_job_with_servers(job: Any) -> None:
    body = """\
if role == "chief":
    wait_for("*.pid", 4)
    sys.exit(0)
time.sleep(60)
"""
    start = time.monotonic()
    code, _, errors = job(body, processes=4, servers=1).ended(20)
    assert (code, errors) == (0, "")
    assert time.monotonic() - start < 15


def test_a_worker_that_dies_is_started_again(job: Any) -> None:
    body = """\
if role == "worker" and index == 0:
    note(f"address-{begun}.address", config["cluster"]["worker"][0])
    if begun < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    note("back")
wait_for("back")
"""
    started = job(body, processes=4, servers=1)
    code, _, errors = started.ended(20)
    assert code == 0, errors
    assert errors.splitlines() == [
        f"tfdist: worker 0 (rank 2, host localhost) failed: killed by SIGKILL. It is started again in {wait} s."
        for wait in ("0.05", "0.1")
    ]
    assert len({path.read_text() for path in started.folder.glob("*.address")}) == 1


def test_a_worker_is_given_up_and_the_last_one_ends_the_job(job: Any) -> None:
    body = """\
if role == "worker" and index == 0:
    sys.exit(9)
if role == "worker":
    wait_for("worker0-*.pid", 2)
    time.sleep(0.5)
    sys.exit(5)
time.sleep(60)
"""
    code, _, errors = job(body, processes=4, servers=1, worker_restarts=1).ended(20)
    assert code == 9
    assert errors.splitlines()[1:] == [
        "tfdist: worker 0 (rank 2, host localhost) failed: exit code 9. worker_restarts=1 are used up; the job goes on "
        "with 1 worker(s).",
        "tfdist: worker 0 (rank 2, host localhost) failed first: exit code 9. No worker is left.",
    ]


def test_a_server_that_dies_ends_the_job(job: Any) -> None:
    body = 'sys.exit(4) if (role, index) == ("ps", 1) else time.sleep(60)\n'
    code, _, errors = job(body, processes=5, servers=2).ended(20)
    assert code == 4
    assert errors == (
        "tfdist: ps 1 (rank 2, host localhost) failed first: exit code 4. The weights it held are lost: the job "
        "must start again.\n"
    )


def test_an_agent_whose_launcher_falls_silent_ends_its_processes(tmp_path: Path) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-m", "tfdist.cluster.agent", "--silence", "0.5"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert agent.stdin is not None and agent.stdout is not None
        shell = ["sh", "-c", "echo $$; exec sleep 60"]
        start = {"do": "start", "rank": 0, "argv": shell, "env": {}, "cwd": str(tmp_path)}
        agent.stdin.write(json.dumps(start).encode() + b"\n")
        agent.stdin.flush()  # and stays open, as a connection that has been cut does
        answers = [json.loads(line) for line in agent.stdout]
        assert agent.wait(20) == 0
        assert answers[-1] == {"rank": 0, "ended": -signal.SIGTERM}
        assert not is_alive(int(answers[1]["text"]))
    finally:
        agent.kill()
        agent.communicate()
