"""A command that starts a job, what it prints with the time of each line, and the job's processes."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tfdist.evidence.marked import MARK, Process, end_all, marked, ranks

__all__ = ["Launched"]


class Launched:
    """A running command, in a session of its own, all of whose processes carry a mark."""

    def __init__(self, command: Sequence[str], mark: str, log: Path) -> None:
        """Start it.

        Args:
            mark: the value of `MARK` for it and all that it starts.
            log: to which all that it prints is appended.
        """
        self._mark, self._log = mark, log
        self._process = subprocess.Popen(
            command,
            env={**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def lines(self) -> list[tuple[float, str]]:
        """What has been printed since the last call, each line with the time at which it came."""
        return [self._lines.get() for _ in range(self._lines.qsize())]

    @property
    def code(self) -> int | None:
        """Its exit code, as in `subprocess`; None while it runs."""
        return self._process.poll()

    def ranks(self) -> list[Process]:
        """The processes that train now, by their ranks."""
        return ranks(marked(self._mark))

    def left(self, seconds: float) -> list[Process]:
        """Those of its processes that are still there after so many seconds at most."""
        deadline = time.monotonic() + seconds
        while (left := marked(self._mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def kill(self) -> None:
        """Kill the command alone, as a fault."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End all of its processes that are left, and read the rest of what they have printed."""
        if self._process.poll() is None or marked(self._mark):
            end_all(self._mark)
        self._process.wait()
        self._reader.join(2.0)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._log.open("a") as log:
            for line in self._process.stdout:
                now = time.monotonic()
                log.write(f"{now:.3f} {line}")
                log.flush()
                self._lines.put((now, line.rstrip("\n")))
