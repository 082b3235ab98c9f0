"""Whether, and when, a job that has failed starts again. Knows no processes and no clock."""

from __future__ import annotations

from tfdist.cluster.watch import HOPELESS, Outcome

__all__ = ["LONGEST_SECONDS", "STEADY_SECONDS", "Restarts"]

BACK_OFF_SECONDS = 1.0
"""Before the first new start; doubles with each further one."""

LONGEST_SECONDS = 60.0
"""The longest wait before a new start."""

STEADY_SECONDS = 300.0
"""A start that has lasted longer was no failure to begin: the waits begin anew after it."""


class Restarts:
    """Counts the starts of one job."""

    def __init__(self, allowed: int) -> None:
        """Begin with the first start.

        Args:
            allowed: how often the job may be started again, in all.
        """
        self._allowed = allowed
        self._quick_failures = 0
        self.start = 1
        """The number of the start that runs now."""

    def after(self, outcome: Outcome, lasted: float) -> tuple[float | None, str | None]:
        """What follows the end of a start.

        Args:
            lasted: for how many seconds it ran.

        Returns:
            The seconds until the next start, or None where there is none; and what to say.
        """
        if not outcome.again or self._allowed == 0:
            hopeless = self._allowed > 0 and outcome.code in HOPELESS
            more = "It is not started again, since that would end in the same way." if hopeless else ""
            return None, _joined(outcome.message, more)
        if self.start > self._allowed:
            return None, _joined(outcome.message, f"max_restarts={self._allowed} are used up.")
        if lasted > STEADY_SECONDS:
            self._quick_failures = 0
        wait = min(LONGEST_SECONDS, BACK_OFF_SECONDS * 2.0 ** min(self._quick_failures, 30))
        self._quick_failures += 1
        self.start += 1
        return wait, _joined(outcome.message, f"All start again in {wait:g} s: start {self.start} of {self.starts}.")

    @property
    def starts(self) -> int:
        """How many starts there may be."""
        return self._allowed + 1


def _joined(message: str | None, more: str) -> str | None:
    return f"{message or ''} {more}".strip() or None
