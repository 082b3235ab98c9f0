"""The strategy of all unit tests that run TensorFlow in this process.

It is opened when this is imported, and so before any test runs an operation: threads can be set only once per process.
What tfdist sets in the environment for its own process must not reach the processes that other tests start.
"""

from __future__ import annotations

import os

from tfdist.strategies.session import Session, open_session

__all__ = ["SESSION", "STRATEGY"]


def _open() -> Session:
    before = dict(os.environ)
    try:
        return open_session("one_device", None, 1)
    finally:
        os.environ.clear()
        os.environ.update(before)


SESSION = _open()
STRATEGY = SESSION.strategy
