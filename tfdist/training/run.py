"""One run of a trainer: what it needs is prepared, it goes its course, and it is reported.

checkpoint to go on from ─> data at its place, step, loop ─> compare over ranks ─> values ─> course ─> report
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import resource
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpoints.store import Store
from tfdist.cluster import runtime, watchdog
from tfdist.cluster.channel import require_same, shared, together
from tfdist.cluster.failure import ends_the_job
from tfdist.cluster.places import Seen
from tfdist.errors import Interrupted, Preempted, TfdistError, UsageError
from tfdist.training import report as reporting
from tfdist.training.actions import Action
from tfdist.training.building import digest
from tfdist.training.built import Built, whole
from tfdist.training.chunk import columns, width
from tfdist.training.console import Console, Plan, numbers, open_console
from tfdist.training.coordination import CoordinatedLoop
from tfdist.training.course import Course
from tfdist.training.data import Examples
from tfdist.training.drift import require_equal
from tfdist.training.evaluations import Evaluations
from tfdist.training.facts import description, kept_variables, require_same_plan
from tfdist.training.learning_rate import schedule
from tfdist.training.leaving import Leaving, Why
from tfdist.training.local_sgd import LocalSgdLoop
from tfdist.training.loops import TrainingLoop
from tfdist.training.phases import SAVING, Phases
from tfdist.training.private_keras import positions
from tfdist.training.report import Report
from tfdist.training.resuming import Resumed, choose, require_same_course, restore
from tfdist.training.saving import AVERAGES, Saver
from tfdist.training.slowness import slow_ranks
from tfdist.training.step import TrainingStep
from tfdist.training.stopping import Decisions, less_is_better
from tfdist.training.task import Task
from tfdist.training.trace import Trace

__all__ = ["Run"]


class Run:
    """Every process of the job makes one and calls it alike."""

    def __init__(self, built: Built, evaluations: Evaluations, phases: Phases, actions: Sequence[Action]) -> None:
        """Take what the trainer has built; nothing happens yet."""
        self._built, self._evaluations, self._phases, self._actions = built, evaluations, phases, tuple(actions)
        self._settings, self._session, self._task = built.settings, built.session, built.task
        self._leaving = Leaving()
        self._course: Course | None = None
        self._saver = Saver(None, {})
        self._store: Store | None = None
        self._resumed: Resumed | None = None
        self._trace = None if built.settings.trace is None else Trace(Path(built.settings.trace))

    @property
    def step(self) -> int:
        """Steps that have been done, those that were skipped among them."""
        return 0 if self._course is None else self._course.step

    def go(self) -> Report:
        """See `Trainer.fit`."""
        channel = self._session.channel
        with contextlib.ExitStack() as stack:
            if self._settings.checkpoint_dir is not None:
                stack.enter_context(self._leaving.listening())
            self._store = together(channel, "opening checkpoint_dir", self._open_store)
            stack.callback(self._close)
            with ends_the_job(channel, lambda: "before training"):
                plan = together(channel, "preparing training", self._prepare)
            console = open_console(visible=self._built.speaks, width=runtime.terminal_width(self._session.identity))
            stack.callback(console.close)
            with ends_the_job(channel, lambda: "before training"):
                self._watch()
                stack.callback(watchdog.stop, channel)
                self._course = course = self._begin(plan, console)
            with ends_the_job(channel, lambda: course.where):
                course.run()
                with self._phases.at(SAVING):
                    together(channel, "saving", self._saver.finish)
                course.restore_best()
            if course.left is not None:
                raise _left(course.left, self.step, self._settings.checkpoint_dir)
            with ends_the_job(channel, lambda: f"after step {self.step}"):
                report = self._report(course)
            for note in slow_ranks(report.ranks, self._phases.steps):
                console.note(note)
            console.end(_summary(report, course))
        return report

    def _open_store(self) -> Store | None:
        given = self._settings
        if given.checkpoint_dir is None or not self._session.is_chief:
            return None
        best = given.keep_best
        less = best is None or less_is_better(best, given.monitor_mode)
        return Store(Path(given.checkpoint_dir), keep=given.keep, keep_best=best is not None, less_is_better=less)

    def _close(self) -> None:
        self._saver.close()
        if self._store is not None:
            self._store.close()

    def _watch(self) -> None:
        """From now until the end of the run, a process that dies or stands still ends the job."""
        watchdog.start(
            self._session.channel,
            self._session.identity,
            self._seen,
            stall_timeout=self._settings.stall_timeout,
            folder=Path(self._settings.checkpoint_dir or "."),
            notice=self._built.notice,
        )

    def _seen(self) -> Seen:
        """Where this process is. Called from a thread."""
        marks, phase = self._phases.read()
        step = 0 if self._course is None else self._course.done
        return Seen(step, marks, self._phases.moves, phase, self._phases.begun)

    def _prepare(self) -> Plan:
        built, settings, task = self._built, self._settings, self._task
        self._resumed = choose(settings, self._store, self._session, built.notice)
        # Accumulation must know where an epoch ends, and so must a run that goes on in the middle of one.
        needed = settings.steps is None or settings.accumulate > 1 or settings.checkpoint_dir is not None
        train = self._evaluations.examples("train", count=needed or "train" in task.evaluation_splits())
        _require_single_examples(built.model, train)
        plan = self._plan(train)
        with self._shared_scope():
            self._plateau = schedule(
                built.optimizers.values(),
                settings,
                replicas=plan.replicas,
                steps=plan.steps,
                steps_per_epoch=plan.steps_per_epoch,
                notice=built.notice,
            )
        keras.utils.set_random_seed(settings.seed)  # for random operations of the task's own
        asynchronous = self._session.asynchronous
        self._step = TrainingStep(
            self._session.strategy,
            task,
            built.model,
            built.optimizers,
            settings,
            global_batch_size=built.global_batch_size,
            averages=built.averages,
            adasum=self._session.adasum,
            fixed_shapes=self._session.fixed_shapes,
            one_copy=self._session.one_copy,
            leave=None if asynchronous else self._leaving.request,
            phases=None if asynchronous else self._phases,
            traced=None if self._trace is None else lambda: list(self._traced.values()),
        )
        self._traced = kept_variables(built, self._step.own_variables)
        first = 0 if self._resumed is None else self._resumed.step
        self._iterator, self._loop = self._loop_from(train, plan, first)
        if isinstance(self._loop, CoordinatedLoop):
            plan = dataclasses.replace(plan, workers=len(self._loop.workers))
        for split in task.evaluation_splits():
            self._evaluations.prepare(split)
        self._decisions = Decisions(settings, self._session.channel, tuple(task.evaluation_splits()))
        self._decisions.check({split: loop.nothing for split, (loop, _) in self._evaluations.loops.items()})
        require_same_plan(built, plan, train, self._evaluations)
        self._about = description(built, plan)
        if self._resumed is not None:
            require_same_course(self._resumed, self._about["course"], built.notice)
        return plan

    def _plan(self, train: Examples) -> Plan:
        batch, accumulate = self._built.global_batch_size, self._settings.accumulate
        batches = None if train.size is None else train.steps_per_epoch(batch)
        return Plan(
            backend=self._session.backend,
            replicas=int(self._session.strategy.num_replicas_in_sync),
            steps=self._total_steps(train.size),
            steps_per_epoch=None if batches is None else -(-batches // accumulate),
            global_batch_size=batch,
            accumulate=accumulate,
            epochs=self._epochs,
            examples=train.size,
            threads=self._session.intra_op_threads,
        )

    @property
    def _epochs(self) -> int | None:
        """None where the run is counted in steps."""
        return None if self._settings.steps is not None else whole("epochs", self._settings.epochs, self._task.epochs)

    def _total_steps(self, examples: int | None) -> int:
        epochs = self._epochs
        if epochs is None:
            assert self._settings.steps is not None
            return self._settings.steps
        if examples is None:
            raise UsageError("the training dataset never ends, so epochs cannot be counted. Set steps.")
        if self._session.asynchronous:  # whose batches go on over the end of an epoch
            return -(-epochs * examples // self._built.global_batch_size)
        batches = -(-examples // self._built.global_batch_size)
        return epochs * -(-batches // self._settings.accumulate)

    def _shared_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Where variables are made that all processes that compute can read."""
        return self._session.strategy.scope() if self._session.asynchronous else contextlib.nullcontext()

    def _loop_from(self, train: Examples, plan: Plan, first: int) -> tuple[Any, TrainingLoop | CoordinatedLoop]:
        """The iterator and the loop of a run of which `first` steps have been done."""
        settings, strategy = self._settings, self._session.strategy
        order: dict[str, Any] = {
            "global_batch_size": plan.global_batch_size,
            "seed": settings.seed,
            "shuffle_buffer": settings.shuffle_buffer,
            "augment": self._task.augment if type(self._task).augment is not Task.augment else None,
        }
        if settings.shards is not None and settings.shards % plan.replicas:
            raise UsageError(
                f"virtual_shards={settings.shards} must be a multiple of the number of replicas, {plan.replicas}, for "
                "reproducible=True. Set virtual_shards to one, and to the same in all runs that are to agree."
            )
        if self._session.asynchronous:
            loop = CoordinatedLoop(
                strategy,
                self._step,
                train.numbered_batches(**order, epochs=plan.epochs, first=first),
                list(self._built.optimizers.values()),
                max_in_flight=settings.max_in_flight,
                leaving=self._leaving,
                phases=self._phases,
            )
            return None, loop
        batches = None if train.size is None else train.steps_per_epoch(plan.global_batch_size)
        done = first * plan.accumulate
        if batches is not None and plan.steps_per_epoch is not None:  # an epoch's last step may have fewer
            done = first // plan.steps_per_epoch * batches + first % plan.steps_per_epoch * plan.accumulate
        iterator = train.training_batches(strategy, **order, first=done, shards=settings.shards)
        kind = TrainingLoop if settings.sync_every is None else LocalSgdLoop
        return iterator, kind(
            strategy,
            self._step,
            iterator,
            accumulate=plan.accumulate,
            batches_per_epoch=batches,
            trace=self._trace,
        )

    def _begin(self, plan: Plan, console: Console) -> Course:
        """The course, at its first step or where a checkpoint left it."""
        console.begin(plan)
        plateau = [] if self._plateau is None else [self._plateau.factor]
        own = [*self._step.own_variables, *plateau, *self._loop.variables]
        variables = kept_variables(self._built, own)
        self._saver = Saver(self._store, variables)
        splits = self._task.evaluation_splits()
        course = Course(
            plan,
            self._session,
            self._settings,
            loop=self._loop,
            iterator=self._iterator,
            evaluate={split: functools.partial(self._evaluate, split) for split in splits},
            decisions=self._decisions,
            plateau=self._plateau,
            kept={n: v for n, v in variables.items() if n.startswith(("model/", AVERAGES))},
            actions=self._actions,
            console=console,
            saver=self._saver,
            about={**self._about, "names": list(variables)},
            check=lambda when: require_equal(self._session, variables, when),
        )
        if self._resumed is not None:
            arrays = restore(self._session, self._resumed, variables)
            course.resume(self._resumed.step, self._resumed.state, arrays)
            self._saver.last = self._resumed.step if self._resumed.here else None
            console.note(f"resumed from {self._resumed.path}: {self._resumed.step} of {plan.steps} steps are done")
        require_equal(self._session, variables, "before the first step")
        if self._trace is not None:
            self._trace.begin(self._traced)
        return course

    def _evaluate(self, split: str) -> dict[str, float]:
        return self._evaluations.evaluate(split, f"after step {self.step}")

    def _report(self, course: Course) -> Report:
        session, built = self._session, self._built
        if self._trace is not None:
            losses = np.concatenate([chunk.losses.sum(axis=1) for chunk in course.chunks])
            batch = built.global_batch_size * self._settings.accumulate
            addends = batch * positions(built.model)
            self._trace.write(session, self._step.local.trained, self._traced, losses, addends)
        weights = digest(built.model.trainable_variables)
        state = digest([*built.variables, *self._step.variables])
        require_same(
            session.channel,
            "the variables at the end",
            f"the digest of all variables after step {self.step}",
            state,
            way_out="Look for code in the task that changes variables outside of the step.",
        )
        ranks = session.channel.exchange("the seconds of each phase", self._own_seconds())
        count = len(built.optimizers)
        chunks = course.chunks or [columns(np.zeros((0, width(count)), np.float32), np.zeros(0), count)]
        losses, rates, penalties, rows, seconds = (
            np.concatenate([getattr(c, f) for c in chunks]) for f in ("losses", "rates", "penalties", "rows", "seconds")
        )
        parts = {
            name: {"losses": losses[:, i].tolist(), "learning_rates": rates[:, i].tolist()}
            for i, name in enumerate(built.optimizers)
        }
        return Report(
            backend=session.backend,
            task=type(self._task).__name__,
            processes=session.identity.size,
            replicas_in_sync=int(session.strategy.num_replicas_in_sync),
            global_batch_size=built.global_batch_size,
            accumulate=self._settings.accumulate,
            learning_rate=built.learning_rate,
            seed=self._settings.seed,
            epochs=self._epochs,
            steps=self.step,
            resumed_from=course.first or None,
            skipped_steps=course.totals["skipped_steps"],
            stopped=course.stopped,
            best=None if self._decisions.best is None else dataclasses.asdict(self._decisions.best),
            examples_seen=course.totals["examples_seen"],
            losses=losses.sum(axis=1).tolist(),
            penalties=penalties.tolist(),
            learning_rates=rates[:, 0].tolist(),
            loss_scale=float(self._step.scale.value) if self._step.scale.dynamic else None,
            parts=parts if count > 1 else {},
            metrics=course.metrics,
            weights_sha256=weights,
            state_sha256=state,
            step_seconds=seconds.tolist(),
            step_time_ms=reporting.step_time(seconds),
            examples_per_second=reporting.throughput(rows, seconds),
            traces={"train": self._loop.traces}
            | {f"evaluate {split}": loop.traces for split, (loop, _) in self._evaluations.loops.items()},
            checkpoints=None if self._settings.checkpoint_dir is None else self._saver.describe(),
            ranks=[] if session.asynchronous else ranks,
            workers=self._loop.describe() if isinstance(self._loop, CoordinatedLoop) else None,
            intra_op_threads=session.intra_op_threads,
            versions=reporting.versions(),
        )

    def _own_seconds(self) -> dict[str, Any]:
        waiting, computing, collective = self._phases.seconds.tolist()
        return {
            "rank": self._session.identity.rank,
            "host": socket.gethostname(),
            "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,  # kilobytes on Linux
            "startup_seconds": runtime.seconds_since_start(self._phases.first_step_ended),
            "input_seconds": waiting,
            "compute_seconds": computing,
            "collective_seconds": collective,
        }


def _require_single_examples(model: keras.Model, train: Examples) -> None:
    """Raises UsageError where the dataset's examples have the shape of the model's batches."""
    shape, spec = getattr(model, "input_shape", None), train.dataset.element_spec
    inputs = spec[0] if isinstance(spec, tuple) else None
    if isinstance(shape, tuple) and isinstance(inputs, tf.TensorSpec) and inputs.shape.rank == len(shape):
        raise UsageError(
            f"the dataset's inputs have shape {inputs.shape}, and the model takes batches of shape {shape}: the "
            "dataset seems to be batched. Give single examples; the trainer makes the batches."
        )


def _left(why: Why, step: int, folder: str | None) -> TfdistError:
    """The error that every process ends with when it was asked to leave."""
    kind = Preempted if why == "preempted" else Interrupted
    return shared(kind(f"{why} after step {step}, which is saved in {folder}; the same command goes on from there."))


def _summary(report: Report, course: Course) -> str:
    rate = "" if report.examples_per_second is None else f", {report.examples_per_second:.0f} examples/s"
    results = [f"{split} {numbers(metrics)}" for split, metrics in report.metrics.items()]
    what = "done"
    if not course.ended:
        what, results = "stopped, and saved; the same command goes on", []
    elif not course.chunks:
        what = "nothing was left to train"
    return "; ".join([f"{what}: {report.steps} steps, {report.examples_seen} examples{rate}", *results])
