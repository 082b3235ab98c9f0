"""What the end of a process means for its job: nothing, a new start, or the end of all. Knows no real processes."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Sequence

from tfdist.cluster.launch import Member

__all__ = [
    "BACK_OFF_SECONDS",
    "CHIEF_SECONDS",
    "HOPELESS",
    "INTERRUPTED",
    "LEAVE_SECONDS",
    "PREEMPTED",
    "Outcome",
    "Watch",
    "exit_code",
    "failure",
    "how",
]

LEAVE_SECONDS = 5.0
"""How long workers and servers may take to leave by themselves once the chief has."""

CHIEF_SECONDS = 60.0
"""How long the chief may take to leave once those that it needs have: it may have sent them away."""

BACK_OFF_SECONDS = 1.0
"""Before the first new start of a worker; doubles with each further one, up to a minute."""


PREEMPTED = 75
"""Exit code of a process that was asked to leave, and has saved."""

INTERRUPTED = 130
"""The same, asked by Ctrl-C."""

_USAGE_ERROR = 2
HOPELESS = frozenset({_USAGE_ERROR, 4, 5, 126, 127})
"""Exit codes after which another start would end in the same way: settings that cannot be used, ranks that disagree,
NaN, a program that is not there."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job has ended."""

    code: int
    message: str | None = None
    again: bool = False
    """Whether another start may end better."""


def exit_code(code: int) -> int:
    """The exit code of a process as a shell gives it: 128 + n after signal n."""
    return code if code >= 0 else 128 - code


def how(code: int) -> str:
    """`exit code 3`, or a signal by its name."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def failure(member: Member, code: int) -> str:
    """Who failed, where and how."""
    return f"{_place(member)} failed first: {how(code)}."


@dataclasses.dataclass
class _Leaving:
    """The job has been asked to save and to leave, or one of its processes has been and leaves first."""

    until: float
    signal: signal.Signals | None
    """What the launcher was asked by; None where a process was asked by somebody else."""
    first: tuple[Member, int] | None = None
    saved: bool = False
    """Whether a process has left before the end of training."""
    chief_has_left: bool = False


class Watch:
    """Follows the processes of one start of a job.

    Synchronous training needs all of its processes: the first that fails ends the job. With parameter servers, the
    chief's success is the job's. A worker that dies is started again, then done without; a server's weights cannot be
    replaced. Once the job is asked to leave, nothing is started any more, and all have the same time to save and leave.
    """

    def __init__(
        self,
        members: Sequence[Member],
        restarts: int,
        tell: Callable[[str], None],
        *,
        grace: float = 30.0,
        describe: Callable[[Member, int], str] = failure,
    ) -> None:
        """Begin with all processes running.

        Args:
            restarts: how often workers may be started again in all, where there are parameter servers.
            tell: says something to the user while the job goes on.
            grace: seconds that processes have for saving and leaving.
            describe: says how a process has failed.
        """
        self._members = {member.rank: member for member in members}
        self._running = set(self._members)
        self._directed = any(member.role == "chief" for member in members)
        self._restarts, self._allowed, self._tell = restarts, restarts, tell
        self._grace, self._describe = grace, describe
        self._due: dict[int, float] = {}
        self._first_worker: tuple[Member, int] | None = None
        self._chief_done_at: float | None = None
        self._left_early: tuple[Member, float] | None = None
        self._leaving: _Leaving | None = None
        self.outcome: Outcome | None = None
        """Known once the job must end or has ended."""

    def leave(self, number: signal.Signals, now: float) -> None:
        """Note that all processes have been asked to save and to leave, since a signal came to the launcher."""
        chief_has_left = self._chief_done_at is not None
        seconds = min(self._grace, LEAVE_SECONDS) if chief_has_left else self._grace
        if self._leaving is not None:  # a process was asked, too, and the others know by now
            self._leaving.signal = number
        else:
            self._leaving = _Leaving(now + seconds, number, chief_has_left=chief_has_left)
        self._due.clear()

    def ended(self, rank: int, code: int, now: float) -> None:
        """Note that a process has ended."""
        self._running.discard(rank)
        member = self._members[rank]
        if self.outcome is not None:
            return
        if self._leaving is not None:
            self._ended_while_leaving(self._leaving, member, code, now)
        elif exit_code(code) in (PREEMPTED, INTERRUPTED):
            self._leaving = _Leaving(now + self._grace, None, (member, code))
            self._due.clear()
            self._ended_while_leaving(self._leaving, member, code, now)
        elif self._directed and (member.role != "chief" or code == 0):
            self._ended_beside_the_chief(member, code, now)
        elif code != 0:
            self._fail(member, code)
        if self.outcome is None and not self._running and not self._due:
            self.outcome = self._have_left(self._leaving) if self._leaving else Outcome(0)

    def tick(self, now: float) -> list[int]:
        """Ranks to start again now."""
        if self.outcome is None:
            self._watch_the_time(now)
        if self.outcome is not None:
            return []
        due = [rank for rank, when in self._due.items() if now >= when]
        for rank in due:
            del self._due[rank]
            self._running.add(rank)
        return due

    def _watch_the_time(self, now: float) -> None:
        if self._leaving is not None:
            if now >= self._leaving.until:
                self.outcome = self._have_left(self._leaving, late=not self._leaving.chief_has_left)
        elif self._chief_done_at is not None:
            if now >= self._chief_done_at + LEAVE_SECONDS:
                self.outcome = Outcome(0)
        elif self._left_early and now >= self._left_early[1] + CHIEF_SECONDS:
            self._fail(self._left_early[0], 1, "It left with exit code 0 while the chief still needs it.")

    def _ended_while_leaving(self, leaving: _Leaving, member: Member, code: int, now: float) -> None:
        if code == 0 or exit_code(code) in (PREEMPTED, INTERRUPTED):
            leaving.saved = leaving.saved or code != 0
            if member.role == "chief":
                leaving.chief_has_left = True
                leaving.until = min(leaving.until, now + LEAVE_SECONDS)
        elif leaving.chief_has_left or (self._directed and member.role == "worker"):
            pass  # what the job has done is the chief's
        elif leaving.signal is None:
            self.outcome = self._have_left(leaving)  # it lost who left first
        elif exit_code(code) == 128 + signal.SIGUSR1:
            text = f"{leaving.signal.name} received before training had begun; all processes have been ended."
            self.outcome = Outcome(_left_code(leaving.signal), text)
        else:
            text = f"{leaving.signal.name} received, but not all have saved. {self._describe(member, code)}"
            self.outcome = Outcome(exit_code(code), text)

    def _have_left(self, leaving: _Leaving, *, late: bool = False) -> Outcome:
        received = leaving.signal
        if received is None:
            assert leaving.first is not None
            member, code = leaving.first
            text = f"{self._describe(member, code)} A signal had asked it to leave."
            if late:
                text += f" Not all others have left within grace={self._grace:g} s."
            return Outcome(exit_code(code), text, again=exit_code(code) == PREEMPTED)
        if late:
            text = f"{received.name} received; not all have left within grace={self._grace:g} s, and have been ended."
            return Outcome(128 + received, text)
        if leaving.saved:
            return Outcome(_left_code(received), f"{received.name} received; all processes have saved and left.")
        return Outcome(0, f"{received.name} received; training was done.")

    def _ended_beside_the_chief(self, member: Member, code: int, now: float) -> None:
        if member.role == "chief":
            self._chief_done_at = now
            self._due.clear()
        elif self._chief_done_at is not None:
            return
        elif member.role == "worker" and code == _USAGE_ERROR:
            self._fail(member, code)  # and would again
        elif member.role == "worker" and code != 0:
            self._lost_worker(member, code, now)
        elif code != 0:
            self._fail(member, code, "The weights it held are lost: the job must start again.")
        elif member.role == "ps" or not self._workers:
            # The chief may have told it to leave, and be about to leave itself.
            self._left_early = self._left_early or (member, now)

    @property
    def _workers(self) -> int:
        return sum(self._members[rank].role == "worker" for rank in {*self._running, *self._due})

    def _lost_worker(self, member: Member, code: int, now: float) -> None:
        self._first_worker = self._first_worker or (member, code)
        if self._restarts:
            wait = min(60.0, BACK_OFF_SECONDS * 2 ** (self._allowed - self._restarts))
            self._restarts -= 1
            self._due[member.rank] = now + wait
            self._tell(f"{_place(member)} failed: {how(code)}. It is started again in {wait:g} s.")
        elif self._workers:
            left = f"worker_restarts={self._allowed} are used up; the job goes on with {self._workers} worker(s)"
            self._tell(f"{_place(member)} failed: {how(code)}. {left}.")
        else:
            self._fail(*self._first_worker, "No worker is left.")

    def _fail(self, member: Member, code: int, more: str = "") -> None:
        text = f"{self._describe(member, code)} {more}".rstrip()
        self.outcome = Outcome(exit_code(code), text, again=exit_code(code) not in HOPELESS)


def _left_code(received: signal.Signals) -> int:
    return INTERRUPTED if received == signal.SIGINT else PREEMPTED


def _place(member: Member) -> str:
    return f"{member.name} (rank {member.rank}, host {member.host})"
