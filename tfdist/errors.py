"""Every error that a user of tfdist can meet, and the exit code that each ends a process with.

Nothing here imports anything of tfdist: all other modules may raise these. A message gives the setting,
its value and the way out, since it is printed as it stands, without a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CheckpointProblem",
    "EnvironmentProblem",
    "Interrupted",
    "NonFiniteError",
    "PeerLost",
    "Preempted",
    "RanksDisagree",
    "Stalled",
    "TaskFailure",
    "TfdistError",
    "UsageError",
    "closest",
]


class TfdistError(Exception):
    """Base of all errors of tfdist."""

    exit_code = 1
    """What the process ends with. docs/reliability.md has the table."""

    shared = False
    """Whether every rank of the job raises this same error, so that the chief alone should print it."""


class UsageError(TfdistError):
    """A setting, a task or a dataset that cannot be used as it is. Nothing has been trained."""

    exit_code = 2


class EnvironmentProblem(TfdistError):
    """Something that this machine or this launch lacks: a package, a compiler, a peer, a device."""

    exit_code = 3


class RanksDisagree(TfdistError):
    """The processes of one job do not hold or do the same thing."""

    exit_code = 4


class NonFiniteError(TfdistError):
    """The global loss or gradient of a step is NaN or infinite."""

    exit_code = 5


class CheckpointProblem(TfdistError):
    """A checkpoint cannot be written, or is damaged."""

    exit_code = 6


class PeerLost(TfdistError):
    """Another process of the job, or the launcher, has gone."""

    exit_code = 7


class Stalled(TfdistError):
    """A process made no step for longer than is allowed."""

    exit_code = 8


class TaskFailure(TfdistError):
    """The task's own code raised. The message holds the traceback of that code."""


class Preempted(TfdistError):
    """The job was asked to leave, has saved, and can go on later."""

    exit_code = 75


class Interrupted(TfdistError):
    """Somebody pressed Ctrl-C; the job has saved where it can."""

    exit_code = 130


def closest(word: str, known: Iterable[str]) -> str:
    """' Did you mean …?' for the known name that is nearest to `word`, else an empty string."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""
