"""Starts the processes of a check as a user would start them, waits for them, and ends only those."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfdist.cluster.mpirun import mpirun
from tfdist.strategies.table import BACKENDS

__all__ = ["Job", "missing", "mpirun", "read", "run"]


@dataclasses.dataclass(frozen=True)
class Job:
    """One start of a backend, which runs cases at one or several numbers of replicas."""

    backend: str
    replicas: tuple[int, ...]
    cases: tuple[str, ...]

    @property
    def results(self) -> int:
        """How many values each process will write."""
        return len(self.replicas) * len(self.cases)


def missing(backend: str) -> str | None:
    """Why a backend cannot be checked on this machine; None where it can."""
    if not BACKENDS[backend].processes:
        return None
    if mpirun() is None:
        return "there is no mpirun"
    for package in ("mpi4py", "horovod") if backend == "horovod" else ("mpi4py",):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return None


def run(
    job: Job, folder: Path, *, timeout: float, progress: Callable[[int], None] = lambda done: None
) -> tuple[dict[int, list[dict[str, Any]]], str]:
    """Run a job to its end.

    Args:
        folder: for the results and the output.
        timeout: seconds after which it is ended.
        progress: told how many results there are, now and then.

    Returns:
        For each number of replicas what each process wrote (case to value or error), by rank; and what went wrong with
        the job as a whole, or an empty string.
    """
    program = [sys.executable, "-m", "tfdist.evidence.program", str(folder), job.backend]
    arguments = [",".join(map(str, job.replicas)), ",".join(job.cases)]
    command = [*program, *arguments]
    if BACKENDS[job.backend].processes:
        start = mpirun()
        assert start is not None
        # Beside the workers of an asynchronous backend, a chief and a parameter server.
        processes = job.replicas[0] + 2 * BACKENDS[job.backend].asynchronous
        command = [start, "--map-by", "slot:oversubscribe", "-np", str(processes), *command]
    log = folder / f"{job.backend}-{job.replicas[0]}.log"
    deadline = time.monotonic() + timeout
    with log.open("wb") as output:
        # A group of its own, so that all of it, and only it, can be ended.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
                progress(sum(len(_read(folder, job.backend, count, 0)) for count in job.replicas))
        finally:
            late = process.poll() is None
            if late:
                _end(process)
    values = {count: read(folder, job.backend, count) for count in job.replicas}
    if late:
        return values, f"ended after {timeout:.0f} s; its output is in {log}"
    return values, "" if process.returncode == 0 else _cause(log, process.returncode)


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):  # mpirun ends its ranks on the first
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
            return


def read(folder: Path, backend: str, count: int) -> list[dict[str, Any]]:
    """What each process that trains wrote (case to value or error), by rank; of an asynchronous backend the chief."""
    processes = count if BACKENDS[backend].processes and not BACKENDS[backend].asynchronous else 1
    return [_read(folder, backend, count, rank) for rank in range(processes)]


def _read(folder: Path, backend: str, count: int, rank: int) -> dict[str, Any]:
    path = folder / f"{backend}-{count}-{rank}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    results = [json.loads(line) for line in lines if line.endswith("\n")]
    return {result["case"]: result for result in results}


def _cause(log: Path, code: int) -> str:
    text = log.read_text(errors="replace")
    if "OMPI_ALLOW_RUN_AS_ROOT" in text:
        return (
            "mpirun does not start as root unless OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 are set"
        )
    lines = [line.strip() for line in text.splitlines() if re.match(r"\s*(tfdist: |[\w.]*(Error|Exception)\b)", line)]
    return f"{lines[-1] if lines else 'failed'} (exit code {code}; its output is in {log})"
