"""From the command line of `tfdist launch` to hosts and a plan; nothing is started here."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import ROOT
from tfdist.cli import _launch, main
from tfdist.cluster.agents import agent_command
from tfdist.cluster.hosts import Host, hosts_of, read_hostfile
from tfdist.cluster.identity import LAUNCHED, Identity
from tfdist.cluster.launch import Member, ProcessSpec, members, specs
from tfdist.command_line import parse
from tfdist.commands import LaunchCommand
from tfdist.errors import UsageError


def refusal(words: str) -> str:
    with pytest.raises(UsageError) as caught:
        _launch(["launch", *shlex.split(words)], Identity("alone"))
    return str(caught.value)


def dry(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert _launch(["launch", *shlex.split(words)], Identity("alone")) == 0
    return capsys.readouterr().out


def test_flags() -> None:
    words = "launch --hosts a,b:2 --rsh ssh\\ -q --worker-restarts 1 --start-seconds 5 --dry-run plan --job-name j "
    words += "--max-restarts 3 --min-processes 2 --grace 5"
    assert parse(shlex.split(words)) == LaunchCommand(
        hosts="a,b:2",
        rsh="ssh -q",
        worker_restarts=1,
        start_seconds=5.0,
        dry_run="plan",
        job_name="j",
        max_restarts=3,
        min_processes=2,
        grace=5.0,
    )


def test_hosts() -> None:
    assert hosts_of(3, None, None) == (Host("localhost", 3),)
    assert hosts_of(None, "a, b.example:2,10.0.0.1:3", None) == (
        Host("a", 1),
        Host("b.example", 2),
        Host("10.0.0.1", 3),
    )


def test_a_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# a cluster\nnode1 slots=2  # fast\n\nnode2:3\nnode3\n")
    assert read_hostfile(path) == [Host("node1", 2), Host("node2", 3), Host("node3", 1)]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a slots=x", ["line 1: 'a slots=x'", "'x' processes cannot be started"]),
        ("a\nb max_slots=2", ["line 2: 'b max_slots=2'", "is not understood", "host slots=2"]),
        ("a:2 slots=2", ["is not understood"]),
        ("-oProxyCommand=x", ["is no name of a host"]),
        ("a\na", ["names a twice", "a:2"]),
        ("# nothing", ["names no host"]),
    ],
)
def test_a_wrong_hostfile_is_told(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    message = refusal(f"--hostfile {path}")
    assert all(part in message for part in [f"hostfile={path}", *parts]), message


def test_roles_without_and_with_servers() -> None:
    hosts = (Host("a", 1), Host("b", 3))
    assert members(hosts) == tuple(Member(rank, "worker", rank, "abbb"[rank]) for rank in range(4))
    assert members(hosts, servers=1) == (
        Member(0, "chief", 0, "a"),
        Member(1, "ps", 0, "b"),
        Member(2, "worker", 0, "b"),
        Member(3, "worker", 1, "b"),
    )
    with pytest.raises(UsageError, match=r"parameter_servers=3 needs a chief, 3 server.* Start 5 or more"):
        members(hosts, servers=3)


def test_the_plan_of_each_process() -> None:
    first, second = members((Host("a", 1), Host("b", 1)))
    cluster = {"worker": ["a:1", "b:2"]}

    def environment(index: int) -> tuple[tuple[str, str], ...]:
        config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        return (("TF_CONFIG", json.dumps(config)), ("TF_GRPC_REUSE_PORT", "true"), (LAUNCHED, "1"))

    assert specs((first, second), ["a:1", "b:2"], ["python", "x"]) == (
        ProcessSpec(first, "a:1", ("python", "x"), environment(0)),
        ProcessSpec(second, "b:2", ("python", "x"), environment(1)),
    )
    assert specs((first,), None, ["python"]) == (ProcessSpec(first, None, ("python",), ()),)


def test_what_a_cluster_with_servers_is_told() -> None:
    planned = members((Host("localhost", 4),), servers=1)
    last = specs(planned, [f"127.0.0.1:{port}" for port in range(4)], ["python"])[-1]
    assert json.loads(dict(last.environment)["TF_CONFIG"]) == {
        "cluster": {"chief": ["127.0.0.1:0"], "ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2", "127.0.0.1:3"]},
        "task": {"type": "worker", "index": 1},
    }


def test_how_agents_are_started() -> None:
    agent = [sys.executable, "-m", "tfdist.cluster.agent"]
    assert agent_command(Host("localhost", 1), ["ssh"], "/a", "/p") == agent
    start = f"{shlex.join(agent)} --silence 60.0"
    far = Host("far.example", 1)
    assert agent_command(far, ["ssh", "-q"], "/a b", None) == ["ssh", "-q", far.name, f"cd '/a b' && exec {start}"]
    assert agent_command(far, ["ssh"], "/a", "/p;q")[-1] == f"cd /a && exec env 'PYTHONPATH=/p;q' {start}"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("", ["nothing says how many processes", "--processes N"]),
        ("--processes 0", ["processes=0 must be 1 or more"]),
        ("--processes two", ["processes=two must be a whole number"]),
        ("--processes 2 --hosts a", ["processes=2 and hosts=a are both set"]),
        ("--hosts a:0", ["hosts=a:0: '0' processes"]),
        ("--hosts a:b", ["'b' processes"]),
        ("--hosts ,", ["names no host"]),
        ("--hosts a,a", ["names a twice"]),
        ("--hosts 'a;b'", ["'a;b' is no name of a host"]),
        ("--hosts=-oProxyCommand=x", ["is no name of a host"]),
        ("--hosts me@a", ["'me@a' is no name"]),
        ("--hosts localhost,b", ["cannot reach localhost"]),
        ("--hosts a:5000", ["5000 processes", "at most 4096"]),
        ("--hostfile /nowhere/hosts", ["hostfile=/nowhere/hosts cannot be read"]),
        ("--processes 2 --rsh ''", ["rsh=''"]),
        ("--processes 2 --start-seconds 0", ["start_seconds=0.0"]),
        ("--processes 2 --worker-restarts -1", ["worker_restarts=-1 must be 0 or more"]),
        ("--processes 2 --worker-restarts 1", ["worker_restarts=1 has no effect without parameter servers"]),
        ("--processes 2 --max-restarts -1", ["max_restarts=-1 must be 0 or more"]),
        ("--processes 2 --min-processes 1", ["min_processes=1 has no effect without max_restarts"]),
        ("--processes 2 --max-restarts 1 --min-processes 3", ["min_processes=3 is more than the 2 process(es)"]),
        ("--processes 2 --max-restarts 1 --min-processes 1", ["min_processes=1 has no effect with one host"]),
        (
            "--hosts a:2,b:2 --max-restarts 1 --min-processes 2 -- --backend parameter_server",
            ["min_processes=2 is too few for a chief, 1 parameter server(s) and a worker", "3 or more"],
        ),
        ("--processes 2 --grace 5", ["grace=5 has no effect without checkpoint_dir"]),
        ("--processes 2 --grace 0 -- --checkpoint-dir x", ["grace=0.0 must be"]),
        ("--processes 2 --config x", ["--config is a flag of tfdist train", "after --"]),
        ("--processes 2 -- --max-restarts 3", ["--max-restarts is a flag of tfdist launch", "before --"]),
        ("--processes 2 --dry-run yes", ["dry_run=yes must be one of no, plan, kubernetes"]),
        ("--processes 2 --job-name My_Job", ["job_name='My_Job'"]),
        ("--proceses 2", ["--proceses is not a flag", "'processes'", "tfdist launch --help"]),
        ("--processes 2 --steps 3", ["--steps is a flag of tfdist train", "after --"]),
        ("--processes 2 -- --stps 3", ["--stps is not a flag", "'steps'", "tfdist train --help"]),
        ("--processes 2 -- --steps 0", ["steps=0 must be 1 or more"]),
        ("--processes 2 -- --backend mirored", ["backend='mirored' is unknown"]),
        ("--processes 2 -- --backend mirrored", ["backend='mirrored' trains in one process", "Leave launch out"]),
        ("--hosts a.example -- --backend mirrored", ["start it on a.example without launch"]),
    ],
)
def test_what_cannot_be_started_is_told_before_anything_starts(words: str, parts: list[str]) -> None:
    message = refusal(words)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("launcher", ["mpi", "tf_config"])
def test_a_launch_inside_a_launch_is_refused(launcher: str) -> None:
    with pytest.raises(UsageError, match="starts its own processes"):
        _launch(["launch", "--processes", "2"], Identity(launcher))  # type: ignore[arg-type]


def test_the_plan_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    told = dry(capsys, "--hosts a:2,b --dry-run plan -- --task 'my task.py:Mine'")
    assert told == (
        "rank  role      host  address\n"
        "0     worker 0  a     a:<free port>\n"
        "1     worker 1  a     a:<free port>\n"
        "2     worker 2  b     b:<free port>\n"
        "\n"
        f"each runs: {sys.executable} -m tfdist train --task 'my task.py:Mine'\n"
    )


def test_the_plan_with_servers(capsys: pytest.CaptureFixture[str]) -> None:
    told = dry(capsys, "--processes 4 --dry-run plan -- --backend parameter_server")
    assert [line.split()[1] for line in told.splitlines()[1:5]] == ["chief", "ps", "worker", "worker"]
    assert told.count("127.0.0.1:<free port>") == 4
    told = dry(capsys, "--processes 4 --dry-run plan -- --backend parameter_server --parameter-servers 2")
    assert [line.split()[1] for line in told.splitlines()[1:5]] == ["chief", "ps", "ps", "worker"]
    assert "needs a chief" in refusal("--processes 2 --dry-run plan -- --backend parameter_server")


def test_the_plan_of_an_mpi_job(capsys: pytest.CaptureFixture[str]) -> None:
    told = dry(capsys, "--hosts a,b:2 --dry-run plan -- --backend horovod")
    assert told.splitlines()[-1] == (
        f"each runs: mpirun --host a:1,b:2 -np 3 {sys.executable} -m tfdist train --backend horovod"
    )


def test_help_of_both_sides_of_the_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    for words, flag in (("launch --help", "--worker-restarts"), ("launch --processes 2 -- --help", "--learning-rate")):
        with pytest.raises(SystemExit) as caught:
            main(words.split())
        assert caught.value.code == 0
        assert flag in capsys.readouterr().out


def test_tensorflow_is_not_imported() -> None:
    program = (
        "import sys\nfrom tfdist.cli import main\n"
        "code = main(['launch', '--processes', '2', '--dry-run', 'kubernetes', '--', '--steps', '3'])\n"
        "import tfdist.cluster.supervise, tfdist.cluster.agent\n"
        "found = {name.split('.')[0] for name in sys.modules} & {'tensorflow', 'keras', 'mpi4py', 'horovod'}\n"
        "sys.exit(code or ', '.join(found) or 0)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=300, check=True, stdout=subprocess.DEVNULL)
