"""Carries out a launch: start after start, until the job is done, asked to leave, or has failed for good."""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from collections.abc import Iterator

from tfdist.cluster.agents import Event, Output
from tfdist.cluster.children import adopt_orphans, end_orphans
from tfdist.cluster.job import Job, Launch, stopped
from tfdist.cluster.restarts import Restarts
from tfdist.cluster.watch import Outcome

__all__ = ["Launch", "supervise"]


def supervise(launch: Launch) -> int:
    """Run a job to its end, or until a signal comes. Returns the exit code; no process is left then."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    restarts = Restarts(launch.max_restarts)
    adopt_orphans()  # of an agent that is killed
    with _signals(events) as received:
        while True:
            output = Output(events)
            began = time.monotonic()
            outcome = _run(launch, restarts.start, output, events)
            lasted = time.monotonic() - began
            if outcome.again and received:
                outcome = _given_up(launch, outcome, received[0])
            wait, message = restarts.after(outcome, lasted)
            if message:
                output.tell(message)
            if wait is None:
                return outcome.code
            _pause(wait, received)
            if received:
                outcome = _given_up(launch, Outcome(0), received[0])
                output.tell(str(outcome.message))
                return outcome.code


def _run(launch: Launch, start: int, output: Output, events: queue.SimpleQueue[Event]) -> Outcome:
    job = Job(launch, start, output, events)
    try:
        return job.run()
    finally:
        job.end()
        end_orphans()
        with contextlib.suppress(queue.Empty):
            while True:  # what the next start must not take for its own
                events.get_nowait()


def _given_up(launch: Launch, outcome: Outcome, number: int) -> Outcome:
    """The end of a job that would have started again."""
    end = stopped(launch, number, "")
    return Outcome(end.code, f"{outcome.message or ''} {end.message} It is not started again.".strip())


def _pause(seconds: float, received: list[int]) -> None:
    """Wait for so long, or until a signal comes."""
    until = time.monotonic() + seconds
    while not received and time.monotonic() < until:
        time.sleep(min(0.1, max(0.0, until - time.monotonic())))


@contextlib.contextmanager
def _signals(events: queue.SimpleQueue[Event]) -> Iterator[list[int]]:
    """Signals become events; gives a list of those that have come."""
    received: list[int] = []

    def take(number: int, _: object) -> None:
        received.append(number)
        events.put(Event("signal", value=number))

    known = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    # One that is ignored, as nohup does with SIGHUP, stays so.
    before = {n: signal.signal(n, take) for n in known if signal.getsignal(n) != signal.SIG_IGN}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
