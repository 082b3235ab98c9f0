"""One start of a job: agents on all hosts, processes through them, and an end of all of them in any case."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import signal
import time
from typing import Any

from tfdist.cluster.agents import SILENCE_SECONDS, AgentLink, Event, Output, hosts_that_fail
from tfdist.cluster.hosts import Host
from tfdist.cluster.launch import ProcessSpec, address_host, members, specs
from tfdist.cluster.mpirun import MPIRUN, Mpi, MpirunOutput
from tfdist.cluster.watch import INTERRUPTED, PREEMPTED, Outcome, Watch, failure

__all__ = ["Job", "Launch", "stopped"]

_LAST_WORDS_SECONDS = 3.0
"""In which processes that miss a failed one end by themselves, and say what they know."""

_GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL."""

_PROBE_SECONDS = 10.0
_NOT_REACHED, _PEER_LOST, _UNREAD = 3, 7, 141


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """All that is to be started, and how."""

    hosts: tuple[Host, ...]
    servers: int = 0
    """Parameter servers, beside a chief; 0: all are workers."""
    argv: tuple[str, ...]
    """What every process runs."""
    argv_again: tuple[str, ...] | None = None
    """What every process of a further start runs, where it is something else."""
    folder: str
    """The working directory, on all hosts."""
    has_servers: bool = True
    """Whether the processes run TensorFlow's servers, and so need addresses."""
    mpi: Mpi | None = None
    """What starts the processes, where it is not the agents."""
    quiet: bool = False
    rsh: tuple[str, ...] = ("ssh", "-o", "BatchMode=yes")
    worker_restarts: int = 3
    max_restarts: int = 0
    min_processes: int | None = None
    """With how many processes a further start may do, where hosts have gone; None: it needs all."""
    saves: bool = False
    """Whether the processes save and leave when SIGUSR1 asks them to."""
    grace: float = 30.0
    """How long that may take."""
    start_seconds: float = 60.0
    """How long an agent may take to answer."""


class _Over(Exception):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


def stopped(launch: Launch, number: int, when: str) -> Outcome:
    """The end of a job whose launcher was signalled when nothing was there to be saved."""
    name = signal.Signals(number).name
    message = f"{name} received{when}; all processes have been ended."
    if launch.saves:
        return Outcome(INTERRUPTED if number == signal.SIGINT else PREEMPTED, message)
    return Outcome(128 + number, message)


class Job:
    """The agents and processes of one start, driven by their events in the main thread."""

    def __init__(self, launch: Launch, start: int, output: Output, events: queue.SimpleQueue[Event]) -> None:
        """Starts nothing yet.

        Args:
            start: its number, from 1.
        """
        self._launch, self._again, self._output, self._events = launch, start > 1, output, events
        self._links: dict[str, AgentLink] = {}
        self._started: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._gone: dict[str, str] = {}
        self._may_lose = False
        self._watch: Watch | None = None
        self._signalled: signal.Signals | None = None
        self._patience = _GRACE_SECONDS
        self._mpirun = MpirunOutput()
        self._next_word = 0.0

    def run(self) -> Outcome:
        """Start all, and wait until it is known how the job ends. Processes may still run then."""
        try:
            plan = self._mpi_plan(self._launch.mpi) if self._launch.mpi else self._plan()
            return self._run(plan)
        except _Over as over:
            return over.outcome

    def end(self) -> None:
        """End all processes, then all agents. A signal to the launcher shortens the grace to nothing."""
        self._output.end()
        self._tell_all(do="end", grace=self._patience)
        # An agent that has started nothing has nothing to wait for.
        deadline = time.monotonic() + (self._patience + 3 if self._started else 1)
        while set(self._started.values()) - set(self._gone) and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=0.2)
                if event.kind == "ended":
                    self._started.pop(event.value[0], None)
                elif event.kind == "gone":
                    self._gone[event.host] = "its agent has ended"
                elif event.kind == "signal":
                    self._tell_all(do="end", grace=0)
        for link in self._links.values():
            link.close(deadline)

    def _run(self, plan: dict[int, ProcessSpec]) -> Outcome:
        launch = self._launch
        self._names = {rank: spec.member.name for rank, spec in plan.items()}
        watch = self._watch = Watch(
            [spec.member for spec in plan.values()],
            launch.worker_restarts,
            self._output.tell,
            grace=launch.grace,
            describe=self._mpirun.describe if launch.mpi else failure,
        )
        for spec in plan.values():
            self._start(spec)
        while watch.outcome is None:
            event = self._event(0.2)
            now = time.monotonic()
            if event and event.kind == "ended":
                rank, code = event.value
                self._started.pop(rank, None)
                watch.ended(rank, self._mpirun.code(code), now)
            for rank in watch.tick(now):
                self._start(plan[rank])
            if watch.outcome is None and self._mpirun.hangs(now):
                self._patience = 0.0
                code = self._mpirun.aborted_with()
                text = f"{self._mpirun.describe(MPIRUN, code)} mpirun did not end by itself."
                raise _Over(Outcome(code, text, again=True))
        if watch.outcome.code and not launch.mpi:  # mpirun has ended its processes by itself
            self._hear_last_words()
        if self._mpirun.refuses_root:
            return dataclasses.replace(watch.outcome, again=False)
        return watch.outcome

    def _hear_last_words(self) -> None:
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while self._started and time.monotonic() < deadline:
            event = self._event(0.2)
            if event and event.kind == "ended":
                self._started.pop(event.value[0], None)

    def _argv(self) -> tuple[str, ...]:
        return (self._again and self._launch.argv_again) or self._launch.argv

    def _plan(self) -> dict[int, ProcessSpec]:
        launch = self._launch
        hosts = self._open_agents(launch.hosts, may_lose=self._again and launch.min_processes is not None)
        addresses = self._addresses(hosts) if launch.has_servers else None
        if addresses and not launch.quiet:
            self._output.tell(
                "TensorFlow's servers listen on all interfaces of their hosts, without authentication, at "
                + ", ".join(addresses)
            )
        planned = specs(members(hosts, launch.servers), addresses, self._argv())
        return {spec.member.rank: spec for spec in planned}

    def _mpi_plan(self, mpi: Mpi) -> dict[int, ProcessSpec]:
        launch, hosts = self._launch, self._launch.hosts
        if self._again and launch.min_processes is not None:
            self._gone = hosts_that_fail(hosts, launch.rsh, min(_PROBE_SECONDS, launch.start_seconds))
            hosts = self._remaining(hosts)
        self._gone = {}
        self._open_agents((Host(MPIRUN.host, 1),), may_lose=False)
        return {MPIRUN.rank: ProcessSpec(MPIRUN, None, mpi.command(hosts, self._argv()), ())}

    def _open_agents(self, hosts: tuple[Host, ...], *, may_lose: bool) -> tuple[Host, ...]:
        """Start an agent on each host; returns the hosts that have one."""
        self._may_lose = may_lose
        for host in hosts:
            try:
                self._links[host.name] = AgentLink(host, self._launch.rsh, self._mark, self._output, self._events)
            except OSError as error:
                text = f"host {host.name}: its agent cannot be started ({error}). See --rsh."
                raise _Over(Outcome(_NOT_REACHED, text)) from None
        self._gather("ready")
        self._may_lose = False
        return self._remaining(hosts)

    def _remaining(self, hosts: tuple[Host, ...]) -> tuple[Host, ...]:
        """The hosts that are there. What is not enough ends this start."""
        if not self._gone:
            return hosts
        left = tuple(host for host in hosts if host.name not in self._gone)
        count, all_of_them = (sum(host.processes for host in some) for some in (left, hosts))
        lost = "; ".join(f"host {name} is lost ({reason})" for name, reason in self._gone.items())
        least = self._launch.min_processes or all_of_them
        if count < least:
            text = f"{lost}. {count} of {all_of_them} processes are left, and min_processes={least}."
            raise _Over(Outcome(_NOT_REACHED, text, again=True))
        self._output.tell(f"{lost}. The job goes on with {count} of {all_of_them} processes.")
        return left

    def _addresses(self, hosts: tuple[Host, ...]) -> list[str]:
        for host in hosts:
            self._links[host.name].send(do="ports", count=host.processes)
        ports = self._gather("ports")
        return [f"{address_host(host.name, hosts)}:{port}" for host in hosts for port in ports[host.name]]

    def _gather(self, kind: str) -> dict[str, Any]:
        """One answer of each agent that is there."""
        answers: dict[str, Any] = {}
        deadline = time.monotonic() + self._launch.start_seconds
        while waited := [name for name in self._links if name not in answers and name not in self._gone]:
            left = deadline - time.monotonic()
            if left <= 0:
                late = f"no answer from its agent after start_seconds={self._launch.start_seconds:g}"
                hint = (
                    "Check that --rsh reaches it without a password, and that Python and this folder are there as here."
                )
                self._lose(waited, late, f"{late}. {hint}")
                continue
            event = self._event(min(left, 0.2))
            if event is not None and event.kind == kind:
                answers[event.host] = event.value
        return answers

    def _lose(self, names: list[str], reason: str, message: str) -> None:
        """Go on without these hosts, where that may be; else end this start."""
        for name in names:
            self._gone[name] = reason
        if not self._may_lose:
            code = _PEER_LOST if self._watch else _NOT_REACHED
            raise _Over(Outcome(code, f"host {', '.join(names)}: {message}", again=True))

    def _event(self, seconds: float) -> Event | None:
        """The next event that does not end the job."""
        now = time.monotonic()
        if now >= self._next_word:
            self._next_word = now + SILENCE_SECONDS / 6
            self._tell_all(do="alive")
        for name, link in self._links.items():
            if name not in self._gone and link.is_silent(now):
                silent = f"its agent has said nothing for {SILENCE_SECONDS:g} s"
                self._lose([name], silent, f"{silent}.")
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return None
        if event.host in self._gone:
            return None
        match event.kind:
            case "signal":
                self._take_signal(signal.Signals(event.value))
                return None
            case "unread":
                raise _Over(Outcome(_UNREAD))
            case "gone":
                ended = f"its agent has ended (exit code {event.value})"
                hint = "The lines above may say why; if not, the connection was lost."
                self._lose([event.host], ended, f"{ended}, and its processes with it. {hint}")
                return None
        return event

    def _take_signal(self, number: signal.Signals) -> None:
        """On the first signal, ask all processes to save and leave, if they can; else end them."""
        if self._watch is None:
            raise _Over(stopped(self._launch, number, " before training had begun"))
        if self._signalled is not None:
            self._patience = 0.0
            text = f"{number.name} received; all processes have been ended at once."
            raise _Over(Outcome(128 + self._signalled, text))
        if not self._launch.saves:
            raise _Over(stopped(self._launch, number, ""))
        self._signalled = number
        self._output.tell(f"{number.name} received: the processes have {self._launch.grace:g} s to save and leave.")
        self._watch.leave(number, time.monotonic())
        # A chief saves what servers hold, and sends them and the workers away: until then they are needed.
        for rank in [0] if self._launch.servers else list(self._started):
            if rank in self._started:
                self._links[self._started[rank]].send(do="signal", rank=rank, number=signal.SIGUSR1)

    def _mark(self, rank: int, line: bytes) -> tuple[str, bytes]:
        if self._launch.mpi is not None:
            return self._mpirun.read(line, time.monotonic())
        return self._names.get(rank, f"rank {rank}"), line

    def _start(self, spec: ProcessSpec) -> None:
        member = spec.member
        self._started[member.rank] = member.host
        # Not for ranks: MPICH marks what is written, not lines.
        environment = (
            dict(spec.environment) if self._launch.mpi else {"PYTHONUNBUFFERED": "1", **dict(spec.environment)}
        )
        self._links[member.host].send(
            do="start", rank=member.rank, argv=spec.argv, env=environment, cwd=self._launch.folder
        )

    def _tell_all(self, **command: Any) -> None:
        for link in self._links.values():
            link.send(**command)
