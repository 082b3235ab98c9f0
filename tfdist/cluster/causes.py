"""What an exception says to a person: its traceback without our frames, and its first cause in one line."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from tfdist.errors import TfdistError

__all__ = ["cause_of", "task_traceback", "unwrapped"]

_PACKAGE = Path(__file__).parents[1]


def unwrapped(error: BaseException) -> BaseException:
    """The error as it was raised, where TensorFlow has put the traceback of a traced function into its message."""
    while isinstance(error, TfdistError) and isinstance(error.__context__, type(error)):
        error = error.__context__
    return error


def task_traceback(error: BaseException) -> str:
    """The traceback from the task's code on, without the frames of tfdist that called it."""
    report = traceback.TracebackException.from_exception(error)
    own = [_PACKAGE in Path(frame.filename).parents for frame in report.stack]
    if False in own:
        report.stack = traceback.StackSummary.from_list(report.stack[own.index(False) :])
    return "".join(report.format()).rstrip()


def cause_of(error: BaseException) -> str:
    """One line: the kind and the text of the first cause, also where TensorFlow has wrapped a Python exception."""
    if isinstance(error, TfdistError):
        return str(error)
    if isinstance(error, SystemExit):
        return f"SystemExit: the task's code called exit({error.code!r})"
    text = str(error)
    # An exception in a py_function comes back as "{{function_node …}} ValueError: text\nTraceback …".
    python = re.search(
        r"^(?:\{\{.*?\}\}\s*)*([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning): .*)$", text, re.M
    )
    if python and "Traceback" in text:
        return python.group(1)
    first = text.strip().splitlines()[0] if text.strip() else ""
    return f"{type(error).__name__}: {first}"
