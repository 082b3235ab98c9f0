"""Every error that a user of tfdist can meet.

Nothing here imports anything of tfdist: all other modules may raise these. A message gives the setting,
its value and the way out, since it is printed as it stands, without a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "EnvironmentProblem",
    "NonFiniteError",
    "RanksDisagree",
    "TaskFailure",
    "TfdistError",
    "UsageError",
    "closest",
]


class TfdistError(Exception):
    """Base of all errors of tfdist."""

    exit_code = 1
    """What the process ends with."""

    shared = False
    """Whether every rank of the job raises this same error, so that the chief alone should print it."""


class UsageError(TfdistError):
    """A setting, a task or a dataset that cannot be used as it is. Nothing has been trained."""

    exit_code = 2


class EnvironmentProblem(TfdistError):
    """Something that this machine or this launch lacks: a package, a compiler, a peer, a device."""


class RanksDisagree(TfdistError):
    """The processes of one job do not hold or do the same thing."""


class NonFiniteError(TfdistError):
    """The global loss or gradient of a step is NaN or infinite."""


class TaskFailure(TfdistError):
    """The task's own code raised. The message holds the traceback of that code."""


def closest(word: str, known: Iterable[str]) -> str:
    """' Did you mean …?' for the known name that is nearest to `word`, else an empty string."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""
