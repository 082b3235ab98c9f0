"""Starts the processes of a test: mpirun jobs, and single Python processes. Ends what it started, and nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Ended:
    """A job that has ended. `code` is 124 where it was ended for being too slow."""

    code: int
    output: str  # stdout and stderr together

    def check(self) -> Ended:
        assert self.code == 0, f"exit code {self.code}\n{self.output[-6000:]}"
        return self


def run_mpi(
    ranks: int, script: str | Path, *args: object, timeout: float = 120, env: Mapping[str, str] | None = None
) -> Ended:
    """`mpirun -np ranks python script args`."""
    start = [mpirun(), "--oversubscribe", "-np", str(ranks)]
    return _run([*start, *_python(script, args)], _environment(env), timeout)


def run_alone(script: str | Path, *args: object, timeout: float = 120, env: Mapping[str, str] | None = None) -> Ended:
    """`python script args`, as a process that no launcher started."""
    return _run(_python(script, args), _environment(env), timeout)


def once_more_if_tensorflow_crashed(job: Callable[[], Ended]) -> Ended:
    """Run a job; where it ended with a segmentation fault, once more.

    TensorFlow 2.21 has a race: the background thread of an iterator over devices (MultiDeviceIterator) may read from
    its dataset while that is being freed (RootDataset::output_dtypes). It is rare, it needs no code of ours, and the
    jobs that make hundreds of iterators on busy processors meet it now and then.
    """
    ended = job()
    return job() if ended.code in (139, -11) else ended


def run_tf_config(
    processes: int,
    script: str | Path,
    *args: object,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
) -> list[Ended]:
    """The script in several processes that know of each other by `TF_CONFIG` alone."""
    workers = [f"127.0.0.1:{port}" for port in free_ports(processes)]
    started = []
    for index in range(processes):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        started.append(_start(_python(script, args), {**_environment(env), "TF_CONFIG": json.dumps(config)}))
    return [_finish(process, timeout) for process in started]


def mpirun() -> str:
    """The mpirun beside this Python, else the one on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    assert found, "no mpirun beside this Python or on PATH: run `make setup`"
    return found


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _python(script: str | Path, args: Sequence[object]) -> list[str]:
    return [sys.executable, str(script), *(str(arg) for arg in args)]


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    # A test that is itself run by mpirun, or with TF_CONFIG, must not hand its own place on to the job.
    foreign = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "TF_CONFIG", "HOROVOD_RANK", "HOROVOD_SIZE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    env["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT), env.get("PYTHONPATH")) if p)
    if os.getuid() == 0:
        env["OMPI_ALLOW_RUN_AS_ROOT"] = env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return {**env, **(extra or {})}


def _run(command: Sequence[str], env: Mapping[str, str], timeout: float) -> Ended:
    return _finish(_start(command, env), timeout)


def _start(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a group of its own, so that all of it, and only it, can be ended
    )


def _finish(process: subprocess.Popen[str], timeout: float) -> Ended:
    try:
        output, _ = process.communicate(timeout=timeout)
        return Ended(process.returncode, output)
    except subprocess.TimeoutExpired:
        return _end(process, timeout)
    finally:
        if process.poll() is None:
            _signal(process, signal.SIGKILL)
            process.wait()


def _end(process: subprocess.Popen[str], timeout: float) -> Ended:
    _signal(process, signal.SIGTERM)  # mpirun then ends its ranks, which are in groups of their own
    try:
        output, _ = process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGKILL)
        output, _ = process.communicate()
    return Ended(124, f"{output}\nended by the test after {timeout} s")


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
