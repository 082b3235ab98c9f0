"""Starts the processes of a test: mpirun jobs, and single Python processes. Ends what it started, and nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 300.0
"""Seconds after which a job is taken for hanging. Jobs take 5 to 20 on an idle machine, and many more on a busy one."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """A job that has ended. `code` is 124 where it was ended for being too slow."""

    code: int
    output: str  # stdout and stderr together

    def check(self) -> Ended:
        assert self.code == 0, f"exit code {self.code}\n{self.output[-6000:]}"
        return self


def run_mpi(
    ranks: int, script: str | Path, *args: object, timeout: float = LIMIT, env: Mapping[str, str] | None = None
) -> Ended:
    """`mpirun -np ranks python script args`."""
    start = [mpirun(), "--oversubscribe", "-np", str(ranks)]
    return Job([*start, *python(script, args)], environment(env)).finish(timeout)


def run_alone(script: str | Path, *args: object, timeout: float = LIMIT, env: Mapping[str, str] | None = None) -> Ended:
    """`python script args`, as a process that no launcher started."""
    return Job(python(script, args), environment(env)).finish(timeout)


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
    timeout: float = LIMIT,
    env: Mapping[str, str] | None = None,
) -> list[Ended]:
    """The script in several processes that know of each other by `TF_CONFIG` alone."""
    workers = [f"127.0.0.1:{port}" for port in free_ports(processes)]
    started = []
    for index in range(processes):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        started.append(Job(python(script, args), {**environment(env), "TF_CONFIG": json.dumps(config)}))
    return [job.finish(timeout) for job in started]


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


def python(script: str | Path, args: Sequence[object]) -> list[str]:
    """The command `python script args`, with this Python."""
    return [sys.executable, str(script), *(str(arg) for arg in args)]


def environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    """The environment of a new job: this process's own, without its place in a job, and `extra`."""
    # A test that is itself run by mpirun, or with TF_CONFIG, must not hand its own place on to the job.
    foreign = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "TF_CONFIG", "HOROVOD_RANK", "HOROVOD_SIZE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    env["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT), env.get("PYTHONPATH")) if p)
    if os.getuid() == 0:
        env["OMPI_ALLOW_RUN_AS_ROOT"] = env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return {**env, **(extra or {})}


def is_there(pid: int) -> bool:
    """Whether a process runs; not where it has ended, and nobody has asked how."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


_JOB = "TFDIST_TEST_JOB"  # tells the processes of one job from those of others


class Job:
    """A running command. What it prints goes to a file, which no orphan can hold open as it could a pipe."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._name = secrets.token_hex(8)
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - `finish` closes it
        self._process = subprocess.Popen(
            command,
            env={**env, _JOB: self._name},
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, so that all of it, and only it, can be ended
        )

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def finish(self, timeout: float) -> Ended:
        """Wait for its end, or end it."""
        try:
            code, note = self._process.wait(timeout), ""
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGTERM)  # mpirun then ends its ranks, which are in groups of their own
            code, note = 124, f"\nended by the test after {timeout} s"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        finally:
            if self._process.poll() is None:
                self._signal(signal.SIGKILL)
                self._process.wait()
        with self._printed:
            return Ended(code, self.printed() + note)

    def wait_for(self, text: str, timeout: float) -> None:
        """Wait until it has printed `text`; end it where it does not."""
        deadline = time.monotonic() + timeout
        while text not in self.printed():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{text!r} was not printed\n{self.finish(1).output[-6000:]}")
            time.sleep(0.05)

    def printed(self) -> str:
        """What it has printed so far."""
        size = os.fstat(self._printed.fileno()).st_size
        return os.pread(self._printed.fileno(), size, 0).decode(errors="replace")

    def ranks(self) -> dict[int, int]:
        """The ids of its processes that have a rank, by their ranks: of MPI, or of TF_CONFIG with workers only."""
        found = {}
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):
                variables = dict(v.partition("=")[::2] for v in Path(f"/proc/{pid}/environ").read_text().split("\0"))
                config = json.loads(variables.get("TF_CONFIG") or "{}")
                rank = variables.get("OMPI_COMM_WORLD_RANK", config.get("task", {}).get("index"))
                if rank is not None and variables.get(_JOB) == self._name and is_there(pid):
                    found[int(rank)] = pid
        return found

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
