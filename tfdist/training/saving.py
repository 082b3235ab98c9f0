"""What a run saves, and when it waits for that: it copies values out of the variables, and a thread writes them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.checkpoints.store import Store
from tfdist.errors import CheckpointProblem, TfdistError

__all__ = ["AVERAGES", "Saver", "named"]

AVERAGES = "averages/"
"""What the names of averages of weights begin with."""


class Saver:
    """Saves a run's variables. Every process makes one and calls it alike; the one with a store writes.

    Variables hold the same values on every process between two chunks, so that saving needs no other process.
    """

    def __init__(self, store: Store | None, variables: Mapping[str, Any]) -> None:
        """Take the variables by the names that they have in a checkpoint."""
        self._store = store
        self._variables = dict(variables)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tfdist-save")
        self._writing: Future[Path] | None = None
        self._problem: CheckpointProblem | None = None
        self._untold: CheckpointProblem | None = None
        self.last: int | None = None
        """The step that was saved last, or is being saved."""
        self.saved = 0
        self.copy_seconds, self.wait_seconds, self.write_seconds = 0.0, 0.0, 0.0

    def save(
        self, step: int, state: Mapping[str, Any], more: Mapping[str, np.ndarray], score: float | None = None
    ) -> None:
        """Copy the variables, and begin to write them. Waits where the save before is not done.

        Args:
            more: arrays to write beside them.
        """
        if self._store is None or self.last == step:
            return
        self._settle()
        start = time.monotonic()
        tensors = {name: np.asarray(variable.numpy()) for name, variable in self._variables.items()} | dict(more)
        self.copy_seconds += time.monotonic() - start
        self.last = step
        self._writing = self._writer.submit(self._write, self._store, step, tensors, state, score)

    def problem(self) -> CheckpointProblem | None:
        """What has gone wrong since the last time; told once."""
        if self._writing is not None and self._writing.done():
            self._settle()
        untold, self._untold = self._untold, None
        return untold

    def finish(self) -> None:
        """Wait until everything is on the disk. Raises CheckpointProblem where the newest save failed."""
        self._settle()
        if self._problem is not None:
            raise self._problem

    def close(self) -> None:
        """Wait for what is being written, whatever comes of it."""
        self._writer.shutdown(wait=True)

    def describe(self) -> dict[str, Any]:
        """For the report."""
        return {
            "saved": self.saved,
            "last_step": self.last,
            "copy_seconds": self.copy_seconds,
            "wait_seconds": self.wait_seconds,
            "write_seconds": self.write_seconds,
        }

    def _write(self, store: Store, *what: Any) -> Path:
        start = time.monotonic()
        step, tensors, state, score = what
        path = store.save(step, tensors, state, score=score)
        self.write_seconds += time.monotonic() - start
        return path

    def _settle(self) -> None:
        """Wait for the save under way, and note what has become of it."""
        if self._writing is None:
            return
        start = time.monotonic()
        error = self._writing.exception()
        self.wait_seconds += time.monotonic() - start
        self._writing = None
        self._problem = None
        if error is None:
            self.saved += 1
            return
        if not isinstance(error, TfdistError):
            error = CheckpointProblem(f"step {self.last} could not be saved: {type(error).__name__}: {error}")
        assert isinstance(error, CheckpointProblem)
        self._problem = self._untold = error
        self.last = None


def named(groups: Iterable[tuple[str, Iterable[tuple[str, Any]]]]) -> dict[str, Any]:
    """Variables by their names in a checkpoint: group/name, with #2 and so on where a name comes again."""
    found: dict[str, Any] = {}
    for group, members in groups:
        for name, variable in members:
            full, number = f"{group}/{name}", 1
            while full in found:
                number += 1
                full = f"{group}/{name}#{number}"
            found[full] = variable
    return found
