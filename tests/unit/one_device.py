"""The strategy of all unit tests that run TensorFlow in this process, and trainers on it.

It is opened when this is imported, and so before any test runs an operation: threads can be set only once per process.
What tfdist sets in the environment for its own process must not reach the processes that other tests start.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from tfdist.strategies.session import open_session
from tfdist.strategies.table import Options
from tfdist.training.task import Task

__all__ = ["SESSION", "STRATEGY", "trainer"]


@contextlib.contextmanager
def _same_environment() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


with _same_environment():
    SESSION = open_session("one_device", Options(intra_op_threads=1))
STRATEGY = SESSION.strategy


def trainer(task: Task, **settings: Any) -> Any:
    """A `tfdist.Trainer` of the task, which prints nothing."""
    from tfdist import Trainer

    with _same_environment():
        return Trainer(task, **{"backend": "one_device", "intra_op_threads": 1, "quiet": True, **settings})
