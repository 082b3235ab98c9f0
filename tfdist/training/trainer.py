"""The trainer: takes a task and a backend, and does the same on every one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.cluster import watchdog
from tfdist.cluster.channel import require_same, together
from tfdist.cluster.failure import ends_the_job
from tfdist.cluster.places import Seen
from tfdist.cluster.runtime import terminal_width
from tfdist.config import Settings, learning_rate
from tfdist.errors import UsageError
from tfdist.strategies.session import Session, open_session
from tfdist.training import report as reporting
from tfdist.training.actions import Action
from tfdist.training.averages import Averages
from tfdist.training.building import build_model, build_optimizers, check_task, digest, structure
from tfdist.training.console import Plan, numbers, open_console
from tfdist.training.coordination import CoordinatedLoop, Snapshot
from tfdist.training.course import Course
from tfdist.training.data import Examples, load_examples
from tfdist.training.learning_rate import schedule
from tfdist.training.local_sgd import LocalSgdLoop
from tfdist.training.loops import EvaluationLoop, TrainingLoop
from tfdist.training.metrics import MetricTotals
from tfdist.training.phases import Phases
from tfdist.training.report import Report
from tfdist.training.slowness import slow_ranks
from tfdist.training.step import TrainingStep
from tfdist.training.stopping import Decisions
from tfdist.training.task import Task, in_float32, unpack

__all__ = ["Trainer"]


class Trainer:
    """Trains and evaluates one task on one backend.

    Every process of the job creates it and calls the same methods; only the chief prints and writes.

    After `fit`, `trainer.model` is the trained Keras model; it is the same on every process, so save it on one:

        if trainer.session.is_chief:
            trainer.model.save("model.keras")

    What happens inside:

        prepare: open the backend, load the data, build model and optimizer, compare over ranks, trace
        fit:     repeat [ chunk of steps -> show ] until an epoch ends -> evaluate; at the end compare the ranks, report
    """

    def __init__(self, task: Task, *, actions: Sequence[Action] = (), **settings: Any) -> None:
        """Open the backend and build everything, so that what is wrong shows before training, on every rank alike.

        Args:
            task: what to train.
            actions: functions of a `tfdist.Moment`, called on every process at the end of each chunk, evaluation and
                epoch.
            **settings: fields of `tfdist.Settings`.

        Raises:
            UsageError: a setting, the task or its data cannot be used.
            EnvironmentProblem: something that the backend needs is missing.
            RanksDisagree: the ranks did not build the same thing.
        """
        if not isinstance(task, Task):
            raise UsageError(f"Trainer got a {type(task).__name__}; give it an instance of a subclass of tfdist.Task.")
        check_task(task)
        if not isinstance(actions, list | tuple) or not all(callable(action) for action in actions):
            raise UsageError(f"actions={actions!r} must be a list of functions of a tfdist.Moment.")
        self.task = task
        self._actions = tuple(actions)
        self.settings = Settings.of(**settings)
        given = self.settings
        self.session: Session = open_session(given.backend, given.options)
        self.global_batch_size = _whole("global_batch_size", given.global_batch_size, task.global_batch_size)
        self.learning_rate = learning_rate(task.learning_rate if given.learning_rate is None else given.learning_rate)
        self._course: Course | None = None
        self._snapshot: Snapshot | None = None
        self._phases = Phases()
        self._splits: dict[str, Examples] = {}
        self._evaluations: dict[str, tuple[EvaluationLoop, Any]] = {}
        given.check_for(self.session.backend)
        together(self.session.channel, "building the model", self._build)
        require_same(
            self.session.channel,
            "the structure of model and optimizer",
            "the list of variables (path, shape, dtype, trainable)",
            structure(self._variables()),
        )

    @property
    def replicas_in_sync(self) -> int:
        """Replicas that train together, over all processes."""
        return int(self.session.strategy.num_replicas_in_sync)

    @property
    def step(self) -> int:
        """Steps that have been done, those that were skipped among them."""
        return 0 if self._course is None else self._course.step

    def fit(self) -> Report:
        """Train for the epochs or steps of the settings, evaluate, and report.

        Raises:
            UsageError: the data or the step cannot be used; before the first step, on every rank alike.
            NonFiniteError: loss or gradients became NaN or infinite; nothing of that step was applied.
            RanksDisagree: at the end the ranks did not hold the same weights.
        """
        if self._course is not None:
            raise UsageError("Trainer.fit was called a second time. Create another Trainer, or ask for more epochs.")
        channel = self.session.channel
        with ends_the_job(channel, lambda: "before training"):
            plan = together(channel, "preparing training", self._prepare)
        console = open_console(visible=self._speaks, width=terminal_width(self.session.identity))
        try:
            with ends_the_job(channel, lambda: "before training"):
                self._watch()
                console.begin(plan)
                self._course = course = Course(
                    plan,
                    self.session,
                    self.settings,
                    loop=self._loop,
                    iterator=self._iterator,
                    evaluate={
                        split: functools.partial(self.evaluate, split) for split in self.task.evaluation_splits()
                    },
                    decisions=self._decisions,
                    plateau=self._plateau,
                    kept=[*self.model.variables, *(self.averages.variables if self.averages else [])],
                    actions=self._actions,
                    console=console,
                )
            with ends_the_job(channel, lambda: course.where):
                course.run()
            with ends_the_job(channel, lambda: f"after step {self.step}"):
                report = self._report(course)
            for note in slow_ranks(report.ranks, self._phases.steps):
                console.note(note)
            console.end(_summary(report))
        finally:
            watchdog.stop(channel)
            console.close()
        return report

    def evaluate(self, split: str = "test") -> dict[str, float]:
        """`loss` and the task's metrics over all examples of a split, each counted once.

        Raises:
            UsageError: the task has no such split, or it never ends.
        """
        channel = self.session.channel
        loop, iterator, steps = together(channel, f"preparing to evaluate {split}", lambda: self._evaluation(split))
        if self._snapshot is not None:
            self._snapshot.take()
        with ends_the_job(channel, lambda: f"while evaluating {split!r} after step {self.step}"):
            return loop.run(iterator, steps)

    def _build(self) -> None:
        keras.utils.set_random_seed(self.settings.seed)
        with self.session.strategy.scope():
            self.model = build_model(self.task, self.settings)
            self.optimizers = build_optimizers(self.task, self.model, self.learning_rate, self.settings)
            self.averages = None if self.settings.ema is None else Averages(self.model, self.settings.ema)

    def use_averages(self) -> None:
        """Put the averages of the weights (`ema`) in the place of the weights, to save or use the model with them.

        Raises:
            UsageError: there are none.
        """
        if self.averages is None:
            raise UsageError("there are no averages of the weights. Set ema.")
        for weight, average in self.averages.mapping:
            weight.assign(average.numpy())

    @property
    def optimizer(self) -> keras.optimizers.Optimizer:
        """The task's optimizer; the first one where there are several."""
        return next(iter(self.optimizers.values()))

    def _variables(self) -> list[Any]:
        """All variables of model and optimizers."""
        return [*self.model.variables, *(v for optimizer in self.optimizers.values() for v in optimizer.variables)]

    def _examples(self, split: str, *, count: bool) -> Examples:
        if split not in self._splits or (count and not self._splits[split].counted):
            # Shuffling mixes in TensorFlow's global seed, which the task's code may have changed.
            keras.utils.set_random_seed(self.settings.seed)
            self._splits[split] = load_examples(self.task, split, count=count, notice=self._notice)
        return self._splits[split]

    def _watch(self) -> None:
        """From now until the end of `fit`, a process that dies or stands still ends the job."""
        settings = self.settings
        watchdog.start(
            self.session.channel,
            self.session.identity,
            self._seen,
            stall_timeout=settings.stall_timeout,
            folder=Path(settings.checkpoint_dir or "."),
            notice=self._notice,
        )

    def _seen(self) -> Seen:
        """Where this process is. Called from a thread."""
        marks, phase = self._phases.read()
        step = 0 if self._course is None else self._course.done
        return Seen(step, marks, self._phases.moves, phase, self._phases.begun)

    @property
    def _speaks(self) -> bool:
        return self.session.is_chief and not self.settings.quiet

    def _notice(self, message: str) -> None:
        if self._speaks:
            print(f"tfdist: {message}", flush=True)

    def _prepare(self) -> Plan:
        # Accumulation must know where an epoch ends.
        needed = self.settings.steps is None or self.settings.accumulate > 1
        train = self._examples("train", count=needed or "train" in self.task.evaluation_splits())
        shape = getattr(self.model, "input_shape", None)
        inputs = train.dataset.element_spec[0] if isinstance(train.dataset.element_spec, tuple) else None
        if isinstance(shape, tuple) and isinstance(inputs, tf.TensorSpec) and inputs.shape.rank == len(shape):
            raise UsageError(
                f"the dataset's inputs have shape {inputs.shape}, and the model takes batches of shape {shape}: the "
                "dataset seems to be batched. Give single examples; the trainer makes the batches."
            )
        accumulate = self.settings.accumulate
        batches_per_epoch = None if train.size is None else train.steps_per_epoch(self.global_batch_size)
        steps_per_epoch = None if batches_per_epoch is None else -(-batches_per_epoch // accumulate)
        steps = self._total_steps(train.size)
        strategy = self.session.strategy
        with self._shared_scope():
            self._plateau = schedule(
                self.optimizers.values(),
                self.settings,
                replicas=self.replicas_in_sync,
                steps=steps,
                steps_per_epoch=steps_per_epoch,
                notice=self._notice,
            )
        keras.utils.set_random_seed(self.settings.seed)  # for random operations of the task's own
        self._step = TrainingStep(
            strategy,
            self.task,
            self.model,
            self.optimizers,
            self.settings,
            global_batch_size=self.global_batch_size,
            averages=self.averages,
            adasum=self.session.adasum,
            fixed_shapes=self.session.fixed_shapes,
            one_copy=self.session.one_copy,
            phases=None if self.session.asynchronous else self._phases,
        )
        order: dict[str, Any] = {
            "global_batch_size": self.global_batch_size,
            "seed": self.settings.seed,
            "shuffle_buffer": self.settings.shuffle_buffer,
            "augment": self.task.augment if type(self.task).augment is not Task.augment else None,
        }
        self._loop: TrainingLoop | CoordinatedLoop
        if self.session.asynchronous:
            epochs = None if self.settings.steps is not None else self._epochs
            batches = train.numbered_batches(**order, epochs=epochs)
            self._iterator = None
            self._loop = CoordinatedLoop(
                strategy,
                self._step,
                batches,
                list(self.optimizers.values()),
                max_in_flight=self.settings.max_in_flight,
                phases=self._phases,
            )
        else:
            self._iterator = train.training_batches(strategy, **order)
            self._loop = (TrainingLoop if self.settings.sync_every is None else LocalSgdLoop)(
                strategy, self._step, self._iterator, accumulate=accumulate, batches_per_epoch=batches_per_epoch
            )
        for split in self.task.evaluation_splits():
            self._evaluation(split)
        self._decisions = Decisions(self.settings, self.session.channel, tuple(self.task.evaluation_splits()))
        self._decisions.check({split: loop.nothing for split, (loop, _) in self._evaluations.items()})
        plan = Plan(
            backend=self.session.backend,
            replicas=self.replicas_in_sync,
            steps=steps,
            steps_per_epoch=steps_per_epoch,
            global_batch_size=self.global_batch_size,
            accumulate=accumulate,
            workers=len(self._loop.workers) if isinstance(self._loop, CoordinatedLoop) else None,
            epochs=None if self.settings.steps is not None else self._epochs,
            examples=train.size,
            threads=self.session.intra_op_threads,
        )
        self._compare(plan)
        return plan

    def _compare(self, plan: Plan) -> None:
        """Ranks that would take other steps, or other batches, must not start: they would wait for each other."""
        evaluated = {split: self._splits[split].size for split in self.task.evaluation_splits()}
        metrics = {split: loop.metrics for split, (loop, _) in self._evaluations.items()}
        facts = {
            "the task": type(self.task).__name__,
            "the number of training examples": plan.examples,
            "the number of steps": plan.steps,
            "the global batch size": plan.global_batch_size,
            "the learning rate": self.learning_rate,
            "the sizes of the evaluated splits": evaluated,
            "the metrics": metrics,
            "the settings": dataclasses.asdict(self.settings),
        }
        for what, value in facts.items():
            require_same(self.session.channel, f"comparing {what}", what, value)

    @property
    def _epochs(self) -> int:
        return _whole("epochs", self.settings.epochs, self.task.epochs)

    def _total_steps(self, examples: int | None) -> int:
        if self.settings.steps is not None:
            return self.settings.steps
        if examples is None:
            raise UsageError("the training dataset never ends, so epochs cannot be counted. Set steps.")
        if self.session.asynchronous:  # whose batches go on over the end of an epoch
            return -(-self._epochs * examples // self.global_batch_size)
        batches = -(-examples // self.global_batch_size)
        return self._epochs * -(-batches // self.settings.accumulate)

    def _shared_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Where variables are made that all processes that compute can read."""
        return self.session.strategy.scope() if self.session.asynchronous else contextlib.nullcontext()

    def _evaluation(self, split: str) -> tuple[EvaluationLoop, Any, int]:
        examples = self._examples(split, count=True)
        if examples.size is None:
            raise UsageError(f"the dataset of split {split!r} never ends, so it cannot be evaluated. Make it finite.")
        # Workers of an asynchronous backend have no replicas in sync: the chief evaluates alone.
        strategy = tf.distribute.get_strategy() if self.session.asynchronous else self.session.strategy
        if split not in self._evaluations:
            iterator = examples.evaluation_batches(strategy, global_batch_size=self.global_batch_size)
            by_weight = self.settings.loss_reduction == "weighted_mean"
            metrics = MetricTotals(self.task.metrics(), by_weight=by_weight)
            metrics.see(self._samples(examples))
            values = self._evaluated_values()
            loop = EvaluationLoop(
                strategy, self.task, self.model, metrics, iterator, values=values, phases=self._phases
            )
            self._evaluations[split] = loop, iterator
        return *self._evaluations[split], examples.steps_per_epoch(self.global_batch_size)

    def _evaluated_values(self) -> list[tuple[keras.Variable, Any]]:
        """Variables of the model with what evaluation takes for them: averages, or a copy on the chief."""
        averages = [] if self.averages is None else self.averages.mapping
        if not self.session.asynchronous:
            return averages
        if self._snapshot is None:
            replaced = {id(v): average for v, average in averages}
            self._snapshot = Snapshot([(v, replaced.get(id(v), v)) for v in self.model.variables])
        return self._snapshot.mapping

    def _samples(self, examples: Examples) -> list[tuple[Any, Any]]:
        """Labels and predictions of a few examples: the first one, and the rest of a batch, where there is one."""
        samples = []
        first, rest = examples.dataset.take(1), examples.dataset.skip(1).take(min(31, self.global_batch_size))
        for inputs, labels, _ in map(unpack, first.batch(1).concatenate(rest.batch(31))):
            with keras.StatelessScope():
                samples.append((labels, in_float32(self.model(inputs, training=False))))
        return samples

    def _own_seconds(self) -> dict[str, Any]:
        waiting, computing, collective = self._phases.seconds.tolist()
        return {
            "rank": self.session.identity.rank,
            "host": socket.gethostname(),
            "input_seconds": waiting,
            "compute_seconds": computing,
            "collective_seconds": collective,
        }

    def _report(self, course: Course) -> Report:
        weights = digest(self.model.trainable_variables)
        state = digest([*self._variables(), *self._step.variables])
        require_same(
            self.session.channel,
            "the variables at the end",
            f"the digest of all variables after step {self.step}",
            state,
            way_out="Look for code in the task that changes variables outside of the step.",
        )
        ranks = self.session.channel.exchange("the seconds of each phase", self._own_seconds())
        losses, rates, penalties, rows, skipped, seconds = (
            np.concatenate([getattr(c, f) for c in course.chunks])
            for f in ("losses", "rates", "penalties", "rows", "skipped", "seconds")
        )
        parts = {
            name: {"losses": losses[:, i].tolist(), "learning_rates": rates[:, i].tolist()}
            for i, name in enumerate(self.optimizers)
        }
        return Report(
            backend=self.session.backend,
            task=type(self.task).__name__,
            processes=self.session.identity.size,
            replicas_in_sync=self.replicas_in_sync,
            global_batch_size=self.global_batch_size,
            accumulate=self.settings.accumulate,
            learning_rate=self.learning_rate,
            seed=self.settings.seed,
            epochs=None if self.settings.steps is not None else self._epochs,
            steps=self.step,
            skipped_steps=int(skipped.sum()),
            stopped=course.stopped,
            best=None if self._decisions.best is None else dataclasses.asdict(self._decisions.best),
            examples_seen=int(rows.sum()),
            losses=losses.sum(axis=1).tolist(),
            penalties=penalties.tolist(),
            learning_rates=rates[:, 0].tolist(),
            loss_scale=float(self._step.scale.value) if self._step.scale.dynamic else None,
            parts=parts if len(parts) > 1 else {},
            metrics=course.metrics,
            weights_sha256=weights,
            state_sha256=state,
            step_time_ms=reporting.step_time(seconds),
            examples_per_second=reporting.throughput(rows, seconds),
            traces={"train": self._loop.traces}
            | {f"evaluate {s}": e.traces for s, (e, _) in self._evaluations.items()},
            ranks=[] if self.session.asynchronous else ranks,
            workers=self._loop.describe() if isinstance(self._loop, CoordinatedLoop) else None,
            intra_op_threads=self.session.intra_op_threads,
            versions=reporting.versions(),
        )


def _whole(name: str, given: int | None, default: Any) -> int:
    if given is not None:
        return given
    if not isinstance(default, int) or default < 1:
        raise UsageError(f"the task's {name}={default!r} must be a whole number, 1 or more.")
    return default


def _summary(report: Report) -> str:
    rate = "" if report.examples_per_second is None else f", {report.examples_per_second:.0f} examples/s"
    results = [f"{split} {numbers(metrics)}" for split, metrics in report.metrics.items()]
    return "; ".join([f"done: {report.steps} steps, {report.examples_seen} examples{rate}", *results])
