"""Finds the processes of a job by a variable that all of them inherit, and signals only those."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from tfdist.cluster.identity import identify
from tfdist.errors import UsageError

__all__ = ["MARK", "Process", "end_all", "marked", "ranks"]

MARK = "TFDIST_CHAOS"
"""Variable whose value a job's processes have in common, and no other processes."""


@dataclasses.dataclass(frozen=True)
class Process:
    """A process, told apart from a later one of the same number by when it began."""

    pid: int
    began: str
    rank: int | None
    """None for launchers, agents and the like."""
    role: str
    """worker, chief or ps, where the job has roles; else worker."""

    @property
    def alive(self) -> bool:
        """Whether it runs, or is stopped; one that only waits to be reaped has ended."""
        state, began = _state(self.pid)
        return began == self.began and state not in ("Z", "X")

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it is there still."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def marked(value: str) -> list[Process]:
    """All processes of this user whose `MARK` has a value, the oldest first."""
    wanted = f"{MARK}={value}"
    found = []
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended, or is another user's
            continue
        if wanted not in words or pid == os.getpid():
            continue
        process = _process(pid, dict(word.partition("=")[::2] for word in words if "=" in word))
        if process.alive:
            found.append(process)
    return found


def ranks(processes: Iterable[Process]) -> list[Process]:
    """The processes that train, by their ranks; without what they have started themselves."""
    first: dict[int, Process] = {}
    for process in processes:
        if process.rank is not None:
            first.setdefault(process.rank, process)
    return [first[rank] for rank in sorted(first)]


def end_all(value: str, seconds: float = 10.0) -> None:
    """Kill all processes whose `MARK` has a value."""
    deadline = time.monotonic() + seconds
    while (left := marked(value)) and time.monotonic() < deadline:
        for process in left:
            process.send(signal.SIGKILL)
        time.sleep(0.1)


def _process(pid: int, environ: dict[str, str]) -> Process:
    began = _state(pid)[1]
    try:
        identity = identify(environ)
    except UsageError:
        return Process(pid, began, None, "")
    if identity.launcher == "alone":
        return Process(pid, began, None, "")
    config = identity.tf_config
    return Process(pid, began, identity.rank, config.task_type if config is not None else "worker")


def _state(pid: int) -> tuple[str, str]:
    """Its state, and when it began, as the system counts; empty where it has gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
