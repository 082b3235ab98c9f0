r"""`python -m tfdist.cluster.agent`: what `tfdist launch` runs on each host to hold ports and to start processes.

It speaks lines of JSON over its own stdin and stdout and opens no port to speak through. Whoever holds the other ends
commands it: the launcher, over a pipe or over ssh. When they close, all its processes end.

    launcher                                        agent
    {"do": "ports", "count": 2}                 ->  {"ports": [41001, 41002]}
    {"do": "start", "rank": 0, "argv": […], …}  ->  {"rank": 0, "stream": 1, "text": "a line\n"} …
                                                    {"rank": 0, "ended": -9}   as in `subprocess`: minus a signal
    {"do": "signal", "rank": 0, "number": 10}       to the process itself, not to what it has started
    {"do": "end", "grace": 5}                       SIGTERM to all, and SIGKILL after so many seconds
    {"do": "alive"}                             ->  {"alive": true}            (see --silence)
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from typing import IO, Any

from tfdist.cluster.children import Child, adopt_orphans, end_orphans
from tfdist.cluster.ports import hold_port

__all__ = ["Agent", "main"]

_GRACE_SECONDS = 5.0
_UNSENT_BYTES = 1 << 20
"""Above so many bytes that the launcher has not taken yet, the processes' output waits in their pipes."""


class Agent:
    """Serves the launcher until it says nothing more and no process is left."""

    def __init__(self, commands: int, answers: int, silence: float | None) -> None:
        self._commands, self._answers = commands, answers
        self._silence = silence
        self._received = bytearray()
        self._unsent: collections.deque[bytes] = collections.deque()
        self._children: dict[int, Child] = {}
        self._selector = selectors.DefaultSelector()
        self._ports = contextlib.ExitStack()
        self._closing = False
        self._kill_at: float | None = None
        self._heard = time.monotonic()

    def serve(self, wake: socket.socket) -> None:
        """Run until the launcher has gone and all processes have ended.

        Args:
            wake: becomes readable when a signal has come.
        """
        os.set_blocking(self._commands, False)
        os.set_blocking(self._answers, False)
        self._selector.register(self._commands, selectors.EVENT_READ, self._read_commands)
        self._selector.register(wake, selectors.EVENT_READ, lambda: self._signalled(wake))
        self._answer(agent=socket.gethostname())
        with self._ports:
            while not self._closing or self._children:
                self._listen_to_children()
                for key, _ in self._selector.select(0.2):
                    key.data()
                self._watch_the_time()
                self._reap()
                self._send()
            self._send()

    def _read_commands(self) -> None:
        if self._closing:
            return
        try:
            read = os.read(self._commands, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            read = b""
        if not read:
            self._close()
            return
        self._heard = time.monotonic()
        self._received += read
        while b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            self._obey(json.loads(line))

    def _obey(self, command: dict[str, Any]) -> None:
        match command["do"]:
            case "ports":
                held = [self._ports.enter_context(hold_port()) for _ in range(command["count"])]
                self._answer(ports=[one.getsockname()[1] for one in held])
            case "start":
                self._start(command)
            case "signal":
                if command["rank"] in self._children:
                    self._children[command["rank"]].send_signal(command["number"], to_all=False)
            case "end":
                self._end(command["grace"])
            case "alive":
                self._answer(alive=True)

    def _start(self, command: dict[str, Any]) -> None:
        rank = command["rank"]
        try:
            child = Child(rank, command["argv"], {**os.environ, **command["env"]}, command["cwd"])
        except (OSError, subprocess.SubprocessError) as error:
            self._answer(rank=rank, stream=2, text=f"cannot be started: {error}\n")
            self._answer(rank=rank, ended=127)
            return
        self._children[rank] = child

    def _listen_to_children(self) -> None:
        """Read from the processes unless the launcher is slower than they are."""
        listening = sum(map(len, self._unsent)) < _UNSENT_BYTES
        for child in self._children.values():
            for stream, pipe in child.pipes.items():
                if listening and pipe not in self._selector.get_map():
                    self._selector.register(
                        pipe, selectors.EVENT_READ, lambda child=child, stream=stream: self._hear(child, stream)
                    )
                elif not listening and pipe in self._selector.get_map():
                    self._selector.unregister(pipe)

    def _hear(self, child: Child, stream: int) -> None:
        pipe: IO[bytes] = child.pipes[stream]
        lines, ended = child.read(stream)
        for line in lines:
            # Bytes that are no text survive the way there and back as lone surrogates.
            self._answer(rank=child.rank, stream=stream, text=line.decode(errors="surrogateescape"))
        if ended:
            self._selector.unregister(pipe)
            pipe.close()

    def _reap(self) -> None:
        for rank, child in list(self._children.items()):
            if not child.has_ended(time.monotonic()):
                continue
            for stream, pipe in list(child.pipes.items()):
                if pipe in self._selector.get_map():
                    self._selector.unregister(pipe)
                for line in child.rest(stream):
                    self._answer(rank=rank, stream=stream, text=line.decode(errors="surrogateescape"))
            del self._children[rank]
            self._answer(rank=rank, ended=child.code)

    def _watch_the_time(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            for child in self._children.values():
                child.send_signal(signal.SIGKILL)
        if self._silence is not None and now - self._heard > self._silence:
            self._close()

    def _end(self, grace: float) -> None:
        for child in self._children.values():
            child.send_signal(signal.SIGTERM)
        self._kill_at = min(time.monotonic() + grace, self._kill_at or float("inf"))

    def _close(self) -> None:
        """The launcher has gone."""
        if not self._closing:
            self._closing = True
            self._end(_GRACE_SECONDS)
            self._selector.unregister(self._commands)

    def _signalled(self, wake: socket.socket) -> None:
        wake.recv(4096)  # it has woken us, which is all that it is for

    def _answer(self, **answer: Any) -> None:
        self._unsent.append(json.dumps(answer).encode() + b"\n")

    def _send(self) -> None:
        try:
            while self._unsent:
                sent = os.write(self._answers, self._unsent[0])
                rest = self._unsent.popleft()[sent:]
                if rest:
                    self._unsent.appendleft(rest)
        except BlockingIOError:
            pass
        except OSError:  # nobody reads any more
            self._unsent.clear()
            self._close()
        waiting = self._answers in self._selector.get_map()
        if self._unsent and not waiting:
            self._selector.register(self._answers, selectors.EVENT_WRITE, lambda: None)
        elif waiting and not self._unsent:
            self._selector.unregister(self._answers)


def main() -> None:
    """Serve on stdin and stdout."""
    parser = argparse.ArgumentParser(description="Serves tfdist launch; not for people.")
    parser.add_argument("--silence", type=float, help="end all when the launcher has said nothing for so many seconds")
    options = parser.parse_args()
    wake, notified = socket.socketpair()
    for end in (wake, notified):
        end.setblocking(False)
    signal.set_wakeup_fd(notified.fileno(), warn_on_full_buffer=False)
    # A scheduler signals all processes of a job at once. What that means is the launcher's to decide, and when it goes,
    # its connection closes.
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    # What a process or a library prints by mistake must not mix with the answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    adopt_orphans()
    Agent(0, answers, options.silence).serve(wake)
    end_orphans()
    sys.exit(0)


if __name__ == "__main__":
    main()
