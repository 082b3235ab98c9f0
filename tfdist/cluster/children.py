"""A process of an agent: in a group of its own, ended with the agent, its output read line by line."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

__all__ = ["LINE_BYTES", "Child", "adopt_orphans", "end_orphans"]

LINE_BYTES = 1 << 16
"""A longer line is passed on in pieces, each a line of its own, so that memory stays bounded."""

_DRAIN_SECONDS = 1.0
"""How long the output of a process is read after its end: one of its own children may hold the pipe for ever."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)  # loaded here, since little is safe between fork and exec


def adopt_orphans() -> None:
    """From now on, what the processes of this process leave behind becomes its own, whatever group it is in."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_orphans() -> None:
    """End all processes of this process. Call it when nothing else waits for any of them."""
    own = Path(f"/proc/self/task/{os.getpid()}/children")
    # A process that is ended may leave others behind, which come next; not for ever, should one start new ones.
    for _ in range(1000):
        try:
            left = own.read_text().split()
        except OSError:
            return
        if not left:
            return
        for pid in map(int, left):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


class Child:
    """A started process."""

    def __init__(self, rank: int, argv: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
        agent = os.getpid()

        def die_with_the_agent() -> None:
            # The agent has one thread, so the system's "parent thread" is the agent itself.
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != agent:
                os.kill(os.getpid(), signal.SIGKILL)

        self.rank = rank
        self.code: int | None = None
        """How it ended, as in `subprocess`; known once `has_ended` is true."""
        self._process = subprocess.Popen(
            argv,
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            process_group=0,
            preexec_fn=die_with_the_agent,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self.pipes: dict[int, IO[bytes]] = {1: self._process.stdout, 2: self._process.stderr}
        """Its open output pipes by file descriptor."""
        for pipe in self.pipes.values():
            os.set_blocking(pipe.fileno(), False)
        self._partial = {1: b"", 2: b""}
        self._drained_at: float | None = None

    def read(self, stream: int) -> tuple[list[bytes], bool]:
        """Whole lines that have come, and whether the stream has ended. An ended stream is no longer in `pipes`."""
        read: bytes | None = self.pipes[stream].read(LINE_BYTES)
        if read is None:  # nothing yet
            return [], False
        if not read:
            del self.pipes[stream]
            return self._cut(stream, final=True), True
        self._partial[stream] += read
        return self._cut(stream, final=False), False

    def rest(self, stream: int) -> list[bytes]:
        """What is still in a pipe; closes it."""
        lines = []
        with self.pipes[stream] as pipe:
            while read := pipe.read(LINE_BYTES):
                self._partial[stream] += read
                lines += self._cut(stream, final=False)
                if len(lines) > LINE_BYTES:  # somebody else still writes to it
                    break
        self.pipes.pop(stream, None)
        return lines + self._cut(stream, final=True)

    def has_ended(self, now: float) -> bool:
        """Whether it has ended and its output has been read. Ends what it has left in its group."""
        if self.code is None:
            # It stays a zombie while its group is signalled: until then its number cannot become another group's.
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return False
            self._signal_group(signal.SIGKILL)
            self.code = self._process.wait()
            self._drained_at = now + _DRAIN_SECONDS
        assert self._drained_at is not None
        return not self.pipes or now >= self._drained_at

    def send_signal(self, number: int, *, to_all: bool = True) -> None:
        """Send a signal to all of its group, or to it alone."""
        if self.code is None:
            if to_all:
                self._signal_group(number)
            else:  # not by `subprocess`, which would reap it
                os.kill(self._process.pid, number)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _cut(self, stream: int, *, final: bool) -> list[bytes]:
        """Lines with their ends, from what has been read; a last one without an end gets one."""
        *lines, rest = self._partial[stream].split(b"\n")
        if final and rest:
            lines.append(rest)
            rest = b""
        while len(rest) > LINE_BYTES:
            lines.append(rest[:LINE_BYTES])
            rest = rest[LINE_BYTES:]
        self._partial[stream] = rest
        starts = ((line, range(0, max(1, len(line)), LINE_BYTES)) for line in lines)
        return [line[start : start + LINE_BYTES] + b"\n" for line, where in starts for start in where]
