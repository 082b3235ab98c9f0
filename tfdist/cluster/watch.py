"""What the end of a process means for its job: nothing, a new start, or the end of all. Knows no real processes."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Sequence

from tfdist.cluster.launch import Member

__all__ = ["BACK_OFF_SECONDS", "CHIEF_SECONDS", "LEAVE_SECONDS", "Outcome", "Watch", "exit_code", "how"]

LEAVE_SECONDS = 5.0
"""How long workers and servers may take to leave by themselves once the chief has."""

CHIEF_SECONDS = 60.0
"""How long the chief may take to leave once those that it needs have: it may have sent them away."""

BACK_OFF_SECONDS = 1.0
"""Before the first new start of a worker; doubles with each further one, up to a minute."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job has ended."""

    code: int
    message: str | None = None


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


_USAGE_ERROR = 2
"""Exit code of a process whose settings or task cannot be used."""


class Watch:
    """Follows the processes of one job.

    Synchronous training needs all of its processes: the first that fails ends the job. With parameter servers, the
    chief's success is the job's. A worker that dies is started again, then done without; a server's weights cannot be
    replaced.
    """

    def __init__(self, members: Sequence[Member], restarts: int, tell: Callable[[str], None]) -> None:
        """Begin with all processes running.

        Args:
            restarts: how often workers may be started again in all, where there are parameter servers.
            tell: says something to the user while the job goes on.
        """
        self._members = {member.rank: member for member in members}
        self._running = set(self._members)
        self._directed = any(member.role == "chief" for member in members)
        self._restarts, self._allowed, self._tell = restarts, restarts, tell
        self._due: dict[int, float] = {}
        self._first_worker: tuple[Member, int] | None = None
        self._chief_done_at: float | None = None
        self._left_early: tuple[Member, float] | None = None
        self.outcome: Outcome | None = None
        """Known once the job must end or has ended."""

    def ended(self, rank: int, code: int, now: float) -> None:
        """Note that a process has ended."""
        self._running.discard(rank)
        member = self._members[rank]
        if self.outcome is not None:
            return
        if self._directed and (member.role != "chief" or code == 0):
            self._ended_beside_the_chief(member, code, now)
        elif code != 0:
            self._fail(member, code)
        if self.outcome is None and not self._running and not self._due:
            self.outcome = Outcome(0)

    def tick(self, now: float) -> list[int]:
        """Ranks to start again now."""
        if self._chief_done_at is not None and now >= self._chief_done_at + LEAVE_SECONDS:
            self.outcome = self.outcome or Outcome(0)
        if self._chief_done_at is None and self._left_early and now >= self._left_early[1] + CHIEF_SECONDS:
            member, _ = self._left_early
            self._fail(member, 1, "it left with exit code 0 while the chief still needs it.")
        if self.outcome is not None:
            return []
        due = [rank for rank, when in self._due.items() if now >= when]
        for rank in due:
            del self._due[rank]
            self._running.add(rank)
        return due

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
            self._fail(member, code, "The weights it held are lost: start the job again.")
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
        self.outcome = Outcome(exit_code(code), f"{_place(member)} failed first: {how(code)}. {more}".rstrip())


def _place(member: Member) -> str:
    return f"{member.name} (rank {member.rank}, host {member.host})"
