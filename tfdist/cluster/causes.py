"""What an exception says to a person: its traceback without our frames, and its first cause in one line."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from tfdist.errors import TfdistError

__all__ = ["account", "cause_of", "is_aftermath", "task_traceback", "unwrapped"]

_PACKAGE = Path(__file__).parents[1]


def unwrapped(error: BaseException) -> BaseException:
    """The error as it was raised, where AutoGraph has put the traceback of a traced function into its message."""
    while (
        isinstance(error, TfdistError) and "in user code:" in str(error) and isinstance(error.__context__, type(error))
    ):
        error = error.__context__
    return error


def task_traceback(error: BaseException) -> str:
    """The traceback from the task's code on, without the frames of tfdist that called it."""
    if "in user code:" in str(error):
        return f"{type(error).__name__}: {error}"  # AutoGraph has put the task's frames, and no others, into the text
    report = traceback.TracebackException.from_exception(error)
    own = [_PACKAGE in Path(frame.filename).parents for frame in report.stack]
    if False in own:
        report.stack = traceback.StackSummary.from_list(report.stack[own.index(False) :])
    return "".join(report.format()).rstrip()


def account(error: BaseException) -> str:
    """All that is worth telling about an error: TensorFlow's own account of a failed step, else the traceback.

    The Python frames above a failed step are ours and TensorFlow's; its message holds the task's, where it has some.
    """
    if _of_tensorflow(error):
        kept = [line for line in str(error).splitlines() if line.strip()]
        return "\n".join([f"{type(error).__name__}: {kept[0] if kept else ''}", *kept[1:]])
    return task_traceback(error)


def is_aftermath(error: BaseException) -> bool:
    """Whether the error says no more than that another process has gone."""
    text = str(error)
    return _of_tensorflow(error) and "Traceback (most recent" not in text and bool(_PEER_GONE.search(text))


def cause_of(error: BaseException) -> str:
    """One line: the kind and the text of the first cause, also where TensorFlow has wrapped a Python exception."""
    if isinstance(error, TfdistError):
        return str(error)
    if isinstance(error, SystemExit):
        return f"SystemExit: the task's code called exit({error.code!r})"
    text = str(error)
    # An exception in a py_function comes back as "{{function_node …}} ValueError: text\nTraceback …".
    python = _PYTHON_ERROR.search(text)
    if python and "Traceback (most recent" in text:
        return python.group(1)
    telling = [line.strip() for line in text.splitlines() if line.strip() and not _NOISE.match(line)]
    first = re.sub(r"\{\{.*?\}\}\s*|\s*\[Op:.*|^\(\d+\) [A-Z_]+: ", "", telling[0]) if telling else ""
    return f"{type(error).__name__}: {first}".rstrip(": ") + (_NO_MEMORY if _out_of_memory(error) else "")


_NO_MEMORY = ". This process has run out of memory: take a smaller global_batch_size, or more processes"


def _out_of_memory(error: BaseException) -> bool:
    # Of TensorFlow's errors of this name, others are about a message or a queue that is too large.
    tensorflow = _of_tensorflow(error) and type(error).__name__ == "ResourceExhaustedError"
    return isinstance(error, MemoryError) or (tensorflow and "OOM" in str(error))


_PYTHON_ERROR = re.compile(
    r"^(?:\{\{.*?\}\}\s*)*([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning): .*)$", re.M
)
_NOISE = re.compile(
    r'Graph execution error|Detected at node|\s*File "|\s*\[\[|The error could be from a previous|'
    r".*<stack traces unavailable>|\s*\d+ root error\(s\) found"
)
_PEER_GONE = re.compile(
    r"Connection reset by peer|Socket closed|failed to connect|Connection refused|has been shut down|"
    r"Collective ops is aborted|preempted|heartbeat",
    re.I,
)


def _of_tensorflow(error: BaseException) -> bool:
    return type(error).__module__.startswith("tensorflow.")
