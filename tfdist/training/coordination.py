"""Steps that run side by side on workers, each on whole batches of its own: asynchronous training.

    chief   schedule step k, k+1, … ──> whichever worker is free ──> the results, in the order of their numbers
    worker  read batch k ─> read weights ─> gradients ─> clip ─> update the variables on the parameter servers

Every worker reads the same numbered batches and leaves out those that are not its own. So each batch is trained on once
whichever worker takes it, and also when a worker dies and another one does its step again.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import private_tf
from tfdist.cluster.ports import unreachable
from tfdist.cluster.tcp_channel import START_SECONDS, start_seconds
from tfdist.errors import EnvironmentProblem, UsageError
from tfdist.strategies.parameter_server import ParameterServer
from tfdist.training.chunk import Chunk, columns, row, width
from tfdist.training.leaving import Leaving
from tfdist.training.phases import WORKERS, Phases
from tfdist.training.private_keras import count_atomically
from tfdist.training.randomness import OF_A_STEP, refuse_stateful
from tfdist.training.step import TrainingStep

__all__ = ["CoordinatedLoop", "Snapshot"]

_SERVER = re.compile(r"/job:ps/replica:\d+/task:(\d+)")

_STUCK_SECONDS = 60.0
"""How long a worker may say nothing while its host takes connections, or does not answer at all."""


class CoordinatedLoop:
    """As `loops.TrainingLoop`; made and called on the chief."""

    def __init__(
        self,
        strategy: ParameterServer,
        step: TrainingStep,
        batches: tf.data.Dataset,
        optimizers: Sequence[keras.optimizers.Optimizer],
        *,
        max_in_flight: int | None,
        leaving: Leaving | None = None,
        phases: Phases | None = None,
    ) -> None:
        """Trace the step and start the workers' pipelines.

        Args:
            batches: of (number, batch).
            max_in_flight: steps from the oldest that has not come back on.
            leaving: what this process is asked.
            phases: where the chief is.

        Raises:
            UsageError: the dataset calls Python, which is not there on the workers.
        """
        self._step = step
        self._leaving = leaving
        self.phases = phases or Phases(compiled=False)
        """Where the chief is."""
        self._cluster = strategy.cluster
        self._pending: deque[tuple[int, Any]] = deque()
        self._in_chunk = 0
        self.max_in_flight = max_in_flight or 4 * len(self.workers)
        self.traces = 0
        """How often the step was traced."""
        self.updates_passed: list[int] = []
        """For each step, updates of others that were complete between its reading and its writing."""
        for optimizer in optimizers:
            count_atomically(optimizer)
        _refuse_python(batches)
        with strategy.scope():
            self.updates = tf.Variable(0, dtype=tf.int64, trainable=False, name="updates")
            """How many steps have been applied, a variable on a parameter server."""
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._let_go()  # there is one for each strategy, which keeps the error of an earlier run
        # A worker that has read the last one may still get a step before it, of a worker that died.
        self._batches = batches.repeat()
        self._iterator = self._pipelines()
        # Traced on a pipeline of the chief's own, since the workers' come to be on the workers.
        own = iter(self._batches)
        with strategy.scope(), private_tf.traced_for_workers(strategy):
            run = tf.function(self._run, autograph=False)
            self._compiled = run.get_concrete_function(own, tf.constant(0, tf.int64))
        refuse_stateful(self._compiled.graph, *OF_A_STEP)

    def run(self, iterator: Any, steps: int, first: int = 0, ahead: int = 0) -> Chunk:
        """Do `steps` steps, and begin up to `ahead` of those that follow; asked to leave, do what has begun.

        Raises:
            EnvironmentProblem: a parameter server has gone, or all workers have.
        """
        with self.phases.at(WORKERS):
            return self._steps(steps, first, ahead)

    def _steps(self, steps: int, first: int, ahead: int) -> Chunk:
        series: list[np.ndarray] = []
        seconds: list[float] = []
        start = time.monotonic()
        end, limit, asked = first + steps, first + steps + ahead, 0.0
        while first + len(series) < end:
            number = first + len(series)
            asked = asked or (self._leaving.asked if self._leaving else 0.0)
            if asked:  # what is under way is done first, and nothing else is begun
                under_way = self._pending[-1][0] + 1 if self._pending else number
                end = limit = max(first + 1, under_way)
                if number >= end:
                    break
            self._schedule(number, limit)
            entry, passed = self._result()
            now = time.monotonic()
            seconds.append(now - start)
            start = now
            series.append(entry)
            self.updates_passed.append(passed)
            self._in_chunk += 1
            if columns(entry[np.newaxis], np.zeros(1), self._step.parts).halted:
                self._let_go()
                break
        return columns(np.array(series), np.array(seconds), self._step.parts)._replace(leave=asked)

    @property
    def variables(self) -> tuple[tf.Variable, ...]:
        """What a run must keep to go on, beside the step's variables."""
        return (self.updates,)

    def steps_done(self) -> int:
        """Steps that the present chunk has completed, also when it has failed."""
        return self._in_chunk

    def forget(self) -> None:
        """The chunk's steps are accounted for."""
        self._in_chunk = 0

    @property
    def workers(self) -> Sequence[str]:
        """Their addresses."""
        return self._cluster.workers

    def describe(self) -> dict[str, Any]:
        """For the report."""
        passed = self.updates_passed
        return {
            "workers": len(self.workers),
            "parameter_servers": len(self._cluster.servers),
            "max_in_flight": self.max_in_flight,
            "updates": int(self.updates.numpy()),
            "staleness": {"mean": sum(passed) / max(1, len(passed)), "max": max(passed, default=0)},
        }

    def _let_go(self) -> None:
        """Wait for what is under way, whatever comes of it."""
        with contextlib.suppress(Exception):
            self._coordinator.join()

    def _pipelines(self) -> Any:
        return iter(self._coordinator.create_per_worker_dataset(self._batches))

    def _schedule(self, number: int, end: int) -> None:
        """See to it that step `number` and what may run beside it has been handed out."""
        following = self._pending[-1][0] + 1 if self._pending else number
        for k in range(following, min(end, number + self.max_in_flight)):
            with _naming():
                self._pending.append((k, self._schedule_one(k)))

    def _schedule_one(self, number: int) -> Any:
        return self._coordinator.schedule(self._compiled, args=(self._iterator, tf.constant(number, tf.int64)))

    def _result(self) -> tuple[np.ndarray, int]:
        """Of the oldest step."""
        number, result = self._pending.popleft()
        while True:
            with _naming():
                self._wait(result)
                told = _fetched(result)
            if told is not None:
                entry, (passed, done) = told
                if done:
                    return np.asarray(entry), int(passed)
                # A worker that had read on got this step of one that died: its pipeline begins anew.
                self._iterator = self._pipelines()
            result = self._schedule_one(number)

    def _wait(self, result: Any) -> None:
        """Until a step is done. Raises EnvironmentProblem where that cannot come: no worker, or one that is stuck."""
        last = dict.fromkeys(self.workers, time.monotonic())  # when each answered
        while not private_tf.wait_for(result, 5.0):
            now = time.monotonic()
            gone = unreachable(self.workers, 0.0, serving=True)
            last |= {address: now for address in self.workers if address not in gone}
            stuck = [a for a, reason in gone.items() if "refused" not in reason and now - last[a] > _STUCK_SECONDS]
            if stuck:
                raise EnvironmentProblem(
                    f"{self._named(stuck)} took a step and has not answered for {_STUCK_SECONDS:g} s, though its host "
                    "does or did: it is stopped, or cut off. End it, and start the job again."
                )
            if all(now - seen > start_seconds() for seen in last.values()):
                raise EnvironmentProblem(
                    f"no worker has answered for {start_seconds():g} s: {self._named(self.workers)}. Their output "
                    f"tells why; start the job again. ({START_SECONDS} sets how long to wait for new ones.)"
                )

    def _named(self, addresses: Sequence[str]) -> str:
        return ", ".join(f"worker {self.workers.index(address)} ({address})" for address in addresses)

    def _run(self, iterator: Any, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Runs on a worker (traced): the step's entry, and (updates that passed, whether this was its batch)."""
        self.traces += 1
        index, batch = tf.while_loop(
            lambda index, batch: index < number,
            lambda index, batch: next(iterator),
            next(iterator),
            shape_invariants=self._batches.element_spec,
        )

        def work() -> tuple[tf.Tensor, tf.Tensor]:
            before = self.updates.read_value()
            with tf.control_dependencies([before]):
                result = self._step(lambda: batch, place=number)
            entry = row(result)
            with tf.control_dependencies([entry]):
                passed = self.updates.read_value() - before
            applied = ~result.halt & ~result.skipped & tf.reduce_any(self._step.divisors(result.tally) > 0)
            with tf.control_dependencies([passed]):
                self.updates.assign_add(tf.cast(applied, tf.int64))
            return entry, tf.stack([passed, tf.ones_like(passed)])

        def nothing() -> tuple[tf.Tensor, tf.Tensor]:
            return tf.zeros([width(self._step.parts)]), tf.zeros([2], tf.int64)

        return tf.cond(tf.equal(index, number), work, nothing)


class Snapshot:
    """The model's variables as they were at one moment, on the chief, so that evaluation reads them once."""

    def __init__(self, mapping: Sequence[tuple[keras.Variable, keras.Variable | tf.Variable]]) -> None:
        """Make room for copies.

        Args:
            mapping: each variable that evaluation reads, with the one whose value it takes.
        """
        self._sources = [source for _, source in mapping]
        with tf.device("CPU:0"):
            self._copies = [tf.Variable(source.numpy(), trainable=False) for source in self._sources]
        self.mapping = [(variable, copy) for (variable, _), copy in zip(mapping, self._copies, strict=True)]
        """Each variable with its copy, for a Keras stateless scope."""

    def take(self) -> None:
        """Copy all values."""
        for source, copy in zip(self._sources, self._copies, strict=True):
            copy.assign(source.numpy())


def _fetched(result: Any) -> Any:
    """What a worker has made of a step; None where it died before it was asked, so that the step must be done again."""
    try:
        return result.fetch()
    except tf.errors.UnavailableError as error:
        if _SERVER.search(str(error)):
            raise
        return None


@contextlib.contextmanager
def _naming() -> Iterator[None]:
    """TensorFlow's error over a parameter server that has gone, in our words."""
    try:
        yield
    except tf.errors.UnavailableError as error:
        gone = _SERVER.search(str(error))
        if gone is None:
            raise
        raise EnvironmentProblem(
            f"parameter server {gone.group(1)} has gone, and the weights that it held with it. Its own output tells "
            "why; start the job again from the newest checkpoint."
        ) from None


def _refuse_python(batches: tf.data.Dataset) -> None:
    """Raises UsageError where a pipeline calls Python, which is not there on the workers."""
    if {"PyFunc", "PyFuncStateless", "EagerPyFunc"} & private_tf.operations(batches):
        raise UsageError(
            "the training dataset calls Python code (from_generator, py_function, numpy_function), which workers of "
            "backend='parameter_server' cannot call: their pipelines are made of TensorFlow operations. Give arrays, "
            "or read files with tf.data."
        )
