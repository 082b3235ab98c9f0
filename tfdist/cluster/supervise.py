"""Carries out a plan: agents on all hosts, processes through them, and an end of all of them in any case."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import signal
import time
from collections.abc import Iterator
from typing import Any

from tfdist.cluster.agents import SILENCE_SECONDS, AgentLink, Event, Output
from tfdist.cluster.hosts import Host
from tfdist.cluster.launch import Member, ProcessSpec, address_host, specs
from tfdist.cluster.watch import Outcome, Watch

__all__ = ["Launch", "supervise"]

_GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """All that is to be started, and how."""

    hosts: tuple[Host, ...]
    members: tuple[Member, ...]
    argv: tuple[str, ...]
    """What every process runs."""
    folder: str
    """The working directory, on all hosts."""
    has_servers: bool = True
    """Whether the processes run TensorFlow's servers, and so need addresses."""
    quiet: bool = False
    rsh: tuple[str, ...] = ("ssh", "-o", "BatchMode=yes")
    worker_restarts: int = 3
    start_seconds: float = 60.0
    """How long an agent may take to answer."""


def supervise(launch: Launch) -> int:
    """Run a job to its end, or until a signal comes. Returns the exit code; no process is left then."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    output = Output(events)
    with _signals(events):
        job = _Job(launch, output, events)
        try:
            outcome = job.run()
        except _Over as over:
            outcome = over.outcome
        finally:
            job.end()
    if outcome.message:
        output.tell(outcome.message)
    return outcome.code


class _Over(Exception):
    def __init__(self, code: int, message: str | None) -> None:
        super().__init__(message)
        self.outcome = Outcome(code, message)


class _Job:
    """The agents and processes of one launch, driven by their events in the main thread."""

    def __init__(self, launch: Launch, output: Output, events: queue.SimpleQueue[Event]) -> None:
        self._launch, self._output, self._events = launch, output, events
        self._links: dict[str, AgentLink] = {}
        self._started: dict[int, str] = {}
        self._gone: set[str] = set()
        self._next_word = 0.0

    def run(self) -> Outcome:
        launch = self._launch
        self._open_agents()
        addresses = self._addresses() if launch.has_servers else None
        plan = {spec.member.rank: spec for spec in specs(launch.members, addresses, launch.argv)}
        if addresses and not launch.quiet:
            self._output.tell(
                "TensorFlow's servers listen on all interfaces of their hosts, without authentication, at "
                + ", ".join(addresses)
            )
        watch = Watch(launch.members, launch.worker_restarts, self._output.tell)
        for spec in plan.values():
            self._start(spec)
        while watch.outcome is None:
            event = self._event(0.2)
            if event is not None and event.kind == "ended":
                rank, code = event.value
                self._started.pop(rank, None)
                watch.ended(rank, code, time.monotonic())
            for rank in watch.tick(time.monotonic()):
                self._start(plan[rank])
        return watch.outcome

    def end(self) -> None:
        """End all processes, then all agents. A second signal shortens the grace to nothing."""
        self._output.end()
        self._tell_all(do="end", grace=_GRACE_SECONDS)
        # An agent that has started nothing has nothing to wait for.
        deadline = time.monotonic() + (_GRACE_SECONDS + 3 if self._started else 1)
        while set(self._started.values()) - self._gone and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=0.2)
                if event.kind == "ended":
                    self._started.pop(event.value[0], None)
                elif event.kind == "gone":
                    self._gone.add(event.host)
                elif event.kind == "signal":
                    self._tell_all(do="end", grace=0)
        for link in self._links.values():
            link.close(deadline)

    def _open_agents(self) -> None:
        launch = self._launch
        for host in launch.hosts:
            names = {member.rank: member.name for member in launch.members if member.host == host.name}
            try:
                self._links[host.name] = AgentLink(host, launch.rsh, names, self._output, self._events)
            except OSError as error:
                raise _Over(1, f"host {host.name}: its agent cannot be started ({error}). See --rsh.") from None
        self._gather("ready")

    def _addresses(self) -> list[str]:
        hosts = self._launch.hosts
        for host in hosts:
            self._links[host.name].send(do="ports", count=host.processes)
        ports = self._gather("ports")
        return [f"{address_host(host.name, hosts)}:{port}" for host in hosts for port in ports[host.name]]

    def _gather(self, kind: str) -> dict[str, Any]:
        """One answer of each agent."""
        answers: dict[str, Any] = {}
        deadline = time.monotonic() + self._launch.start_seconds
        while len(answers) < len(self._links):
            left = deadline - time.monotonic()
            if left <= 0:
                late = ", ".join(name for name in self._links if name not in answers)
                raise _Over(
                    1,
                    f"host {late}: no answer from its agent after start_seconds={self._launch.start_seconds:g}. Check "
                    "that --rsh reaches it without a password, and that Python and this folder are there as here.",
                )
            event = self._event(min(left, 0.2))
            if event is not None and event.kind == kind:
                answers[event.host] = event.value
        return answers

    def _event(self, seconds: float) -> Event | None:
        """The next event that does not end the job."""
        now = time.monotonic()
        if now >= self._next_word:
            self._next_word = now + SILENCE_SECONDS / 6
            self._tell_all(do="alive")
        for link in self._links.values():
            if link.is_silent(now):
                raise _Over(1, f"host {link.host.name}: its agent has said nothing for {SILENCE_SECONDS:g} s.")
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return None
        match event.kind:
            case "signal":
                name = signal.Signals(event.value).name
                raise _Over(128 + event.value, f"{name} received; all processes have been ended.")
            case "unread":
                raise _Over(141, None)
            case "gone":
                self._gone.add(event.host)
                raise _Over(
                    1,
                    f"host {event.host}: its agent has ended (exit code {event.value}), and its processes with it. "
                    "The lines above may say why; if not, the connection was lost.",
                )
        return event

    def _start(self, spec: ProcessSpec) -> None:
        member = spec.member
        self._started[member.rank] = member.host
        environment = {"PYTHONUNBUFFERED": "1", **dict(spec.environment)}
        self._links[member.host].send(
            do="start", rank=member.rank, argv=spec.argv, env=environment, cwd=self._launch.folder
        )

    def _tell_all(self, **command: Any) -> None:
        for link in self._links.values():
            link.send(**command)


@contextlib.contextmanager
def _signals(events: queue.SimpleQueue[Event]) -> Iterator[None]:
    """Signals become events."""
    # One that is ignored, as nohup does with SIGHUP, stays so.
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda n, _: events.put(Event("signal", value=n))) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
