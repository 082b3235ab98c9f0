"""The watchdog of a process: a thread that tells the others where this one is, and ends it where the job cannot go on.

    process r ── beat: step, phase, seconds ──> rank 0 ── verdict: the first cause ──> all, each of which ends itself

Rank 0 judges, the others judge rank 0 alone. One process prints the cause: the one that failed, if it can, else rank 0,
else the first that misses rank 0. The thread reads no wall clock and waits for no other process.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfdist.cluster.channel import Channel
from tfdist.cluster.exits import leave, limit, say, write_stacks
from tfdist.cluster.heartbeat import BEAT, FAILED, GOODBYE, VERDICT, Message, Star, open_star
from tfdist.cluster.identity import Identity
from tfdist.cluster.places import Place, Seen, table
from tfdist.cluster.verdicts import SILENCE_SECONDS, Judge, Verdict

__all__ = ["Watchdog", "first_cause", "start", "stop", "told_cause"]

_BEAT_SECONDS = 0.5
_TICK_SECONDS = 0.1
_STANDSTILL_SECONDS = 1.0  # a tick that takes as long was no tick: this process stood still
_ANSWER_SECONDS = 2.0  # how long a process that has failed waits to hear whether it was the first
_PRINT_SECONDS = 0.5  # the launcher forwards our output, and drops what it has not read when it ends the job
_QUIET_SECONDS = 1.0  # in which the process that prints the cause ends first
_TELL_SECONDS = 2.0  # the same where that process has to tell more, with a traceback
_FAILED_SECONDS = 6.0  # in which the process that has failed tells it, and ends
_ABORT_SECONDS = 2.0  # in which an orderly end of the job must have ended this process

_running: dict[int, Watchdog] = {}


def start(
    channel: Channel,
    identity: Identity,
    look: Callable[[], Seen],
    *,
    stall_timeout: float,
    folder: Path,
    notice: Callable[[str], None],
) -> Watchdog:
    """Watch over this process until `stop`. Called on every process of the job at once.

    Args:
        look: where this process is; called from a thread.
        stall_timeout: see `Settings`.
        folder: where stacks are written when the job stalls.
        notice: says something to the user.
    """
    hosts = channel.exchange("the hosts", socket.gethostname())
    star = None
    if channel.size > 1:
        star, reason = open_star(channel, hosts)
        if star is None:
            notice(f"no heartbeat, since {reason}; a process that dies is noticed by the backend alone, later")
    parent = os.getppid() if identity.launcher != "alone" and identity.one_console else None
    watchdog = Watchdog(channel, hosts, star, look, stall_timeout=stall_timeout, folder=folder, parent=parent)
    _running[id(channel)] = watchdog
    watchdog.begin()
    return watchdog


def stop(channel: Channel) -> None:
    """Say goodbye to the others, and stop watching; where nothing is watched, nothing happens."""
    watchdog = _running.pop(id(channel), None)
    if watchdog is not None:
        watchdog.end()


def first_cause(channel: Channel, code: int, cause: str) -> Verdict | None:
    """Why the job ends, now that this process fails, too; None where nobody watches, or answers.

    Args:
        code: this process's exit code.
        cause: what it fails with.
    """
    watchdog = _running.get(id(channel))
    return watchdog.fail(code, cause) if watchdog is not None else None


def told_cause(channel: Channel, seconds: float) -> Verdict | None:
    """Why the job ends, as soon as somebody tells; None after so many seconds."""
    watchdog = _running.get(id(channel))
    if watchdog is not None:
        return watchdog.told(seconds)
    time.sleep(seconds)
    return None


class Watchdog:
    """One for each process of a job, between its first step and its last."""

    def __init__(
        self,
        channel: Channel,
        hosts: list[str],
        star: Star | None,
        look: Callable[[], Seen],
        *,
        stall_timeout: float,
        folder: Path,
        parent: int | None,
    ) -> None:
        """See `start`.

        Args:
            star: the connections; None: this process is watched by itself.
            parent: the launcher's process, whose end is this one's.
        """
        self._channel, self._rank, self._hosts, self._star = channel, channel.rank, hosts, star
        self._look, self._folder, self._parent = look, folder, parent
        now = time.monotonic()
        # Who waits in vain for whom, rank 0 knows. Without connections each process knows of itself alone.
        self._place_in_job = self._rank if star is not None else 0
        self._judge = Judge(
            self._place_in_job,
            hosts if star is not None else [hosts[self._rank]],
            now,
            silence=min(SILENCE_SECONDS, stall_timeout or SILENCE_SECONDS),
            stall=stall_timeout if self._place_in_job == 0 else 0.0,
        )
        self._seen: Seen | None = None
        self._since = now
        self._next_beat = now
        self._failures: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._known = threading.Event()
        self._verdict: Verdict | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfdist watchdog", daemon=True)

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Say goodbye, and end the thread."""
        self._stop.set()
        self._thread.join(5.0)

    def fail(self, code: int, cause: str) -> Verdict | None:
        """See `first_cause`. From another thread."""
        self._failures.put((code, cause))
        return self.told(_ANSWER_SECONDS)

    def told(self, seconds: float) -> Verdict | None:
        """See `told_cause`. From another thread."""
        self._known.wait(seconds)
        return self._verdict

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # a watchdog that fails must not do so unseen
            if not self._stop.is_set():
                say(f"tfdist: the watchdog of rank {self._rank} has failed: {error!r}")

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._stop.is_set():
            events = self._receive()
            now = time.monotonic()
            if now - last > _STANDSTILL_SECONDS:
                self._judge.slept(now - last)
                self._since += now - last
            last = now
            if any(message is None for _, message in events):
                self._beat(now)  # the steps of this process tell how far the other one has come
            for rank, message in events:
                self._take(rank, message, now)
            if now >= self._next_beat:
                self._next_beat = now + _BEAT_SECONDS
                self._beat(now)
            self._judge.look(now)
            self._take_failures(now)
            if self._parent is not None and os.getppid() != self._parent:
                self._leave_without_launcher()
            if self._judge.verdict is not None and not self._stop.is_set():
                self._conclude(self._judge.verdict)
        if self._star is not None:
            self._star.leave(Message(GOODBYE))

    def _receive(self) -> list[tuple[int, Message | None]]:
        if self._star is not None and self._star.ranks:
            return self._star.receive(_TICK_SECONDS)
        self._stop.wait(_TICK_SECONDS)
        return []

    def _take(self, rank: int, message: Message | None, now: float) -> None:
        if message is None:
            self._judge.closed(rank)
        elif message.kind == BEAT:
            self._judge.beat(rank, message.place, now)
        elif message.kind == GOODBYE:
            self._judge.goodbye(rank)
        elif message.kind == FAILED and self._rank == 0:
            if message.place.phase == "abandoned":
                self._judge.abandoned(rank)
            else:
                self._judge.failed(rank, message.code, message.text)
        elif message.kind == VERDICT and self._rank != 0:
            kind: Any = message.place.phase
            self._obey(Verdict(kind, message.rank, message.code, message.text))

    def _take_failures(self, now: float) -> None:
        """What the main thread has failed with."""
        with contextlib.suppress(queue.Empty):
            code, cause = self._failures.get_nowait()
            if self._rank == 0 or self._star is None or not self._star.ranks:
                self._judge.failed(self._rank, code, cause)
            else:
                self._star.send(Message(FAILED, code=code, text=cause))

    def _beat(self, now: float) -> None:
        place = self._place(now)
        self._judge.beat(self._place_in_job, place, now)
        if self._star is not None:
            self._star.send(Message(BEAT, place))

    def _place(self, now: float) -> Place:
        seen = self._look()
        before, self._seen = self._seen, seen
        if before is None or (seen.step, seen.marks, seen.moves) != (before.step, before.marks, before.moves):
            self._since = now
        return Place(seen.step, seen.marks, seen.phase, now - self._since, seen.begun)

    def _conclude(self, verdict: Verdict) -> None:
        """This process has found the first cause itself: tell it, and end."""
        limit(_FAILED_SECONDS + 4, verdict.code)  # printing may hang
        places = self._judge.places(time.monotonic())
        if self._star is not None:
            # Where rank 0 has only lost its way to this process, it need not look for a cause.
            self._star.send(_message_of(verdict, VERDICT if self._rank == 0 else FAILED))
        self._tell_main_thread(verdict)
        if verdict.kind == "failed":
            self._wait_for_the_failed(verdict)
            return
        if self._place_in_job != 0:  # several miss rank 0: one comes first
            time.sleep(min(3.0, 0.3 * (self._rank - 1)))
        message = verdict.message
        if verdict.kind in ("silent", "stalled"):
            ranks = [self._rank] if self._place_in_job or self._star is None else range(len(self._hosts))
            message += f" Python stacks: {write_stacks(self._folder, self._rank, ranks)}"
            if len(places) > 1:
                say(table(places, self._hosts))
        say(f"tfdist: {message}")
        time.sleep(_PRINT_SECONDS)
        self._end(verdict.code)

    def _obey(self, verdict: Verdict) -> None:
        """Rank 0 has told the first cause: end without a word."""
        limit(_FAILED_SECONDS + 4, verdict.code)
        self._tell_main_thread(verdict)
        if verdict.kind == "failed":
            self._wait_for_the_failed(verdict)
            return
        if verdict.kind in ("silent", "stalled"):
            write_stacks(self._folder, self._rank, [self._rank])
        time.sleep(_QUIET_SECONDS)
        self._end(verdict.code)

    def _wait_for_the_failed(self, verdict: Verdict) -> None:
        """The process that has failed tells why, and ends; the others give it the time for it."""
        if verdict.rank != self._rank:
            time.sleep(_TELL_SECONDS)
        elif self._stop.wait(_FAILED_SECONDS):
            return
        self._end(verdict.code)

    def _tell_main_thread(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._known.set()

    def _leave_without_launcher(self) -> None:
        """Its end takes this process's output with it, and all others of this host. Rank 0 tells the rest."""
        self._judge.abandoned(self._rank)
        verdict = self._judge.verdict
        assert verdict is not None
        limit(_ABORT_SECONDS, verdict.code)
        if self._place_in_job == 0:
            say(f"tfdist: {verdict.message}")
        if self._star is not None:
            self._star.leave(_message_of(verdict, VERDICT if self._rank == 0 else FAILED))
        leave(verdict.code)

    def _end(self, code: int) -> None:
        """End this process, and through its launcher the job, whatever state the others are in."""
        limit(_ABORT_SECONDS, code)
        with contextlib.suppress(Exception):
            self._channel.abort(code)
        leave(code)


def _message_of(verdict: Verdict, kind: int) -> Message:
    """The kind of the verdict travels where a place has its phase."""
    return Message(kind, Place(phase=verdict.kind), verdict.rank, verdict.code, verdict.message)
