"""Where this process is in its training: marks that compiled loops pass, and what Python does around them.

    begin ─> waiting for input ─> computing ─> in the collective ─> applying the update ─> begin …

A mark adds to one small variable of this process, and takes the time. Nothing that is computed depends on it, so that
no number changes; a watchdog reads the variable from outside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.cluster.places import BEFORE, PHASES
from tfdist.training import clock

__all__ = ["ACTION", "EVALUATING", "SAVING", "WORKERS", "Phases"]

ACTION, EVALUATING, SAVING, WORKERS = "in an action", "evaluating", "saving", "waiting for workers"

_ROUND = len(PHASES)


class Phases:
    """The place of one process. Loops and steps of a run share it."""

    def __init__(self, *, compiled: bool = True) -> None:
        """Begin before the first step.

        Args:
            compiled: whether compiled code passes marks. Not where it runs in another process than this one.
        """
        self._count: tf.Variable | None = None
        if compiled:
            with tf.init_scope(), tf.device("CPU:0"):
                self._count = tf.Variable(0, dtype=tf.int64, trainable=False, name="marks")
        self._outside: str | None = BEFORE
        self.moves = 0
        """Grows with whatever Python begins or ends."""
        self.begun = False
        """Whether the first step has been begun."""
        self.seconds = np.zeros(3)
        """In all steps but the first: waiting for input, computing, and in the collective."""
        self.steps = 0
        """How many these are."""
        self.first_step_ended: float | None = None
        """By the system's clock."""
        self._warm = False

    @contextlib.contextmanager
    def at(self, outside: str | None) -> Iterator[None]:
        """While Python does something; None: while a compiled loop of steps runs."""
        before, self._outside = self._outside, outside
        self.moves += 1
        self.begun = self.begun or outside in (None, WORKERS)
        try:
            yield
        finally:
            self._outside = "between steps" if before == BEFORE and self.begun else before
            self.moves += 1

    def read(self) -> tuple[int, str]:
        """Marks that have been passed, and the phase in words. From any thread."""
        marks = 0 if self._count is None else int(self._count.numpy())
        inside = PHASES[marks % _ROUND]
        outside = self._outside
        if outside is None:
            return marks, inside
        return marks, f"{outside}, {inside}" if outside == EVALUATING and marks % _ROUND else outside

    def mark(self, after: Any, by: int = 1) -> tf.Tensor:
        """Pass on to the next phase, or by several, as soon as `after` is there (traced). Returns the time.

        Args:
            after: values of a nested structure; of several replicas, where the process has several.
        """
        if self._count is None:
            return tf.constant(0.0, tf.float64)
        with tf.control_dependencies(_tensors(after)):
            now = clock.now()
            self._count.assign_add(by, read_value=False)
        return now

    def account(self, times: np.ndarray) -> None:
        """Add up what some steps took.

        Args:
            times: of each step's four marks, a row for each step.
        """
        times, self._warm = times[0 if self._warm else 1 :], True
        # The system's clock may have been set meanwhile.
        self.seconds += np.maximum(np.diff(times, axis=1), 0).sum(axis=0)
        self.steps += len(times)


def _tensors(values: Any) -> list[Any]:
    """All tensors in a structure; values that each replica has its own of are composites of them."""
    return [value for value in tf.nest.flatten(values, expand_composites=True) if tf.is_tensor(value)]
