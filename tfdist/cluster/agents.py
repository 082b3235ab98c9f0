"""The launcher's side of an agent: starts it here or through ssh, talks to it, shows what its processes print."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import select
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfdist.cluster.hosts import Host

__all__ = ["SILENCE_SECONDS", "AgentLink", "Event", "Mark", "Output", "agent_command", "hosts_that_fail"]

Mark = Callable[[int, bytes], tuple[str, bytes]]

SILENCE_SECONDS = 60.0
"""After so long without a word, an agent on another host takes the launcher for lost, and the launcher the agent."""


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that the supervisor must know."""

    kind: str
    """ready, ports, ended, gone (an agent), signal, unread (nobody reads the launcher's output)."""
    host: str = ""
    value: Any = None


class Output:
    """The launcher's own stdout and stderr: whole lines, each with a prefix, from several threads."""

    def __init__(self, events: queue.SimpleQueue[Event]) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._ending = False
        self._unread: set[int] = set()

    def line(self, stream: int, prefix: str, line: bytes) -> None:
        """Write a line at once. Waits where nobody reads on, and with it, in the end, the process that printed it."""
        try:
            with self._lock:
                self._write(stream, f"[{prefix}] ".encode() + line)
        except OSError:
            self._events.put(Event("unread"))

    def tell(self, text: str) -> None:
        """Say something of the launcher's own."""
        with contextlib.suppress(OSError), self._lock:
            self._write(2, f"tfdist: {text}\n".encode(errors="surrogateescape"))

    def end(self) -> None:
        """From now on wait for nobody: the job must end, whether its output is read or not."""
        self._ending = True

    def _write(self, descriptor: int, text: bytes) -> None:
        while text and descriptor not in self._unread:
            # A descriptor that is ready takes this much without blocking.
            if select.select([], [descriptor], [], 0.5)[1]:
                text = text[os.write(descriptor, text[: select.PIPE_BUF]) :]
            elif self._ending:
                self._unread.add(descriptor)


def agent_command(host: Host, rsh: Sequence[str], folder: str, python_path: str | None) -> list[str]:
    """How the agent of a host is started: as a process here, or by a command on another host."""
    command = [sys.executable, "-m", "tfdist.cluster.agent"]
    if host.is_this:
        return command
    command += ["--silence", str(SILENCE_SECONDS)]
    if python_path:
        command = ["env", f"PYTHONPATH={python_path}", *command]
    # ssh gives the command to the other host's shell as one text.
    return [*rsh, host.name, f"cd {shlex.quote(folder)} && exec {shlex.join(command)}"]


def hosts_that_fail(hosts: Sequence[Host], rsh: Sequence[str], seconds: float) -> dict[str, str]:
    """Those of the other hosts on which nothing can be run within so many seconds, with the reason."""
    reasons: dict[str, str] = {}
    probes: dict[str, subprocess.Popen[bytes]] = {}
    for host in hosts:
        try:
            if not host.is_this:
                probes[host.name] = subprocess.Popen(
                    [*rsh, host.name, "true"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except OSError as error:
            reasons[host.name] = str(error)
    deadline = time.monotonic() + seconds
    for name, probe in probes.items():
        try:
            code = probe.wait(max(0.0, deadline - time.monotonic()))
            if code != 0:
                reasons[name] = f"{shlex.join([*rsh, name])} ends with exit code {code}"
        except subprocess.TimeoutExpired:
            probe.kill()
            probe.wait()
            reasons[name] = f"no answer within {seconds:g} s"
    return reasons


class AgentLink:
    """A started agent."""

    def __init__(
        self, host: Host, rsh: Sequence[str], mark: Mark, output: Output, events: queue.SimpleQueue[Event]
    ) -> None:
        """Start it.

        Args:
            mark: from a rank and a line of its output to who has printed it, and the line itself.

        Raises:
            OSError: the command cannot be run at all.
        """
        self.host = host
        self._mark, self._output, self._events = mark, output, events
        self._lock = threading.Lock()
        self._closed = False
        self._heard = time.monotonic()
        self._process = subprocess.Popen(
            agent_command(host, rsh, str(Path.cwd()), os.environ.get("PYTHONPATH")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # an interrupt from the terminal comes to the launcher alone
        )
        for listen in (self._listen, self._listen_to_errors):
            threading.Thread(target=listen, daemon=True).start()

    def send(self, **command: Any) -> None:
        """Give a command. Nothing happens where the agent has gone, which comes as an event."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()

    def is_silent(self, now: float) -> bool:
        """Whether an agent on another host has said nothing for too long."""
        return not self.host.is_this and now - self._heard > SILENCE_SECONDS

    def close(self, deadline: float) -> None:
        """Let it go, which ends what it has started, and wait until then. No event comes from it any more."""
        assert self._process.stdin is not None
        with self._lock:
            self._closed = True
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.close()
        try:
            self._process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        greeted = False
        for line in self._process.stdout:
            self._heard = float("inf")  # not silent, however long the terminal takes to show it
            try:
                answer = json.loads(line)
                known = isinstance(answer, dict) and (greeted or "agent" in answer)
            except ValueError:
                known = False
            if known:
                greeted = True
                self._take(answer)
            else:  # of a shell's start-up files, before the agent
                self._output.line(2, self.host.name, line)
            self._heard = time.monotonic()
        self._tell(Event("gone", self.host.name, self._process.wait()))

    def _take(self, answer: dict[str, Any]) -> None:
        match answer:
            case {"rank": rank, "stream": stream, "text": text}:
                self._output.line(stream, *self._mark(rank, text.encode(errors="surrogateescape")))
            case {"rank": rank, "ended": code}:
                self._tell(Event("ended", self.host.name, (rank, code)))
            case {"ports": ports}:
                self._tell(Event("ports", self.host.name, ports))
            case {"agent": _}:
                self._tell(Event("ready", self.host.name))

    def _tell(self, event: Event) -> None:
        with self._lock:
            if not self._closed:
                self._events.put(event)

    def _listen_to_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._output.line(2, self.host.name, line)
