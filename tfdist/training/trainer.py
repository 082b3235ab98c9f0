"""The trainer: takes a task and a backend, and does the same on every one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import socket
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpoints.checkpoint import find
from tfdist.checkpoints.store import Store
from tfdist.cluster import watchdog
from tfdist.cluster.channel import require_same, shared, together
from tfdist.cluster.failure import ends_the_job
from tfdist.cluster.places import Seen
from tfdist.cluster.runtime import terminal_width
from tfdist.config import Settings, learning_rate
from tfdist.errors import Interrupted, Preempted, TfdistError, UsageError
from tfdist.strategies.session import Session, open_session
from tfdist.training import report as reporting
from tfdist.training.actions import Action
from tfdist.training.averages import Averages
from tfdist.training.building import build_model, build_optimizers, check_task, digest, source_digest, structure
from tfdist.training.chunk import columns, width
from tfdist.training.console import Console, Plan, numbers, open_console
from tfdist.training.coordination import CoordinatedLoop, Snapshot
from tfdist.training.course import Course
from tfdist.training.data import Examples, load_examples, load_inputs
from tfdist.training.drift import require_equal
from tfdist.training.exporting import export
from tfdist.training.learning_rate import schedule
from tfdist.training.leaving import Leaving, Why
from tfdist.training.local_sgd import LocalSgdLoop
from tfdist.training.loops import EvaluationLoop, TrainingLoop
from tfdist.training.metrics import MetricTotals
from tfdist.training.phases import SAVING, Phases
from tfdist.training.prediction import PredictionLoop
from tfdist.training.replica import ONLY
from tfdist.training.report import Report
from tfdist.training.resuming import (
    AVERAGES,
    Resumed,
    choose,
    copy_from_chief,
    require_same_course,
    restore,
    restore_weights,
)
from tfdist.training.saving import Saver, named
from tfdist.training.slowness import slow_ranks
from tfdist.training.step import TrainingStep
from tfdist.training.stopping import Decisions, less_is_better
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
        self._leaving = Leaving()
        self._store: Store | None = None
        self._saver = Saver(None, {})
        self._resumed: Resumed | None = None
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
        if given.init_from is not None:
            self.load_weights(given.init_from)

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
        with contextlib.ExitStack() as stack:
            if self.settings.checkpoint_dir is not None:
                stack.enter_context(self._leaving.listening())
            self._store = together(channel, "opening checkpoint_dir", self._open_store)
            stack.callback(self._close)
            with ends_the_job(channel, lambda: "before training"):
                plan = together(channel, "preparing training", self._prepare)
            console = open_console(visible=self._speaks, width=terminal_width(self.session.identity))
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
                raise _left(course.left, self.step, self.settings.checkpoint_dir)
            with ends_the_job(channel, lambda: f"after step {self.step}"):
                report = self._report(course)
            for note in slow_ranks(report.ranks, self._phases.steps):
                console.note(note)
            console.end(_summary(report, course))
        return report

    def _begin(self, plan: Plan, console: Console) -> Course:
        """The run, at its first step or where a checkpoint left it."""
        console.begin(plan)
        variables = self._named()
        self._saver = Saver(self._store, variables)
        course = Course(
            plan,
            self.session,
            self.settings,
            loop=self._loop,
            iterator=self._iterator,
            evaluate={split: functools.partial(self.evaluate, split) for split in self.task.evaluation_splits()},
            decisions=self._decisions,
            plateau=self._plateau,
            kept={n: v for n, v in variables.items() if n.startswith(("model/", AVERAGES))},
            actions=self._actions,
            console=console,
            saver=self._saver,
            about={**self._about, "names": list(variables)},
            check=lambda when: require_equal(self.session, variables, when),
        )
        if self._resumed is not None:
            arrays = restore(self.session, self._resumed, variables)
            course.resume(self._resumed.step, self._resumed.state, arrays)
            self._saver.last = self._resumed.step if self._resumed.here else None
            console.note(f"resumed from {self._resumed.path}: {self._resumed.step} of {plan.steps} steps are done")
        require_equal(self.session, variables, "before the first step")
        return course

    def _named(self) -> dict[str, Any]:
        """All variables that a run must keep, by their names in a checkpoint."""
        return named(
            (
                *self._model_groups(),
                *(
                    ("optimizer" if name == ONLY else f"optimizer/{name}", [(v.path, v) for v in optimizer.variables])
                    for name, optimizer in self.optimizers.items()
                ),
                ("trainer", [(v.name.partition(":")[0], v) for v in self._own_variables()]),
            )
        )

    def _model_groups(self) -> list[tuple[str, list[tuple[str, Any]]]]:
        averages = [] if self.averages is None else self.averages.mapping
        return [
            ("model", [(v.path, v) for v in self.model.variables]),
            (AVERAGES.rstrip("/"), [(weight.path, average) for weight, average in averages]),
        ]

    def _own_variables(self) -> list[tf.Variable]:
        """Those of the trainer itself, but for averages."""
        plateau = [] if self._plateau is None else [self._plateau.factor]
        return [*self._step.own_variables, *plateau, *self._loop.variables]

    def _open_store(self) -> Store | None:
        given = self.settings
        if given.checkpoint_dir is None or not self.session.is_chief:
            return None
        best = given.keep_best
        less = best is None or less_is_better(best, given.monitor_mode)
        return Store(Path(given.checkpoint_dir), keep=given.keep, keep_best=best is not None, less_is_better=less)

    def _close(self) -> None:
        self._saver.close()
        if self._store is not None:
            self._store.close()

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

    def predict(self, examples: Any = "test") -> Any:
        """What the model says of each example. Every process calls it, and gets all of it.

        Args:
            examples: the name of one of the task's splits, whose inputs are taken; or inputs, as a `tf.data.Dataset` of
                single ones or as arrays whose first axis counts them.

        Returns:
            The model's outputs: an array, or a structure of arrays. The first axis counts the examples in their order.

        Raises:
            UsageError: the examples cannot be used, or never end.
        """
        channel = self.session.channel
        strategy = tf.distribute.get_strategy() if self.session.asynchronous else self.session.strategy

        def prepare() -> tuple[PredictionLoop, Any, int]:
            given = self._examples(examples, count=True) if isinstance(examples, str) else None
            source = load_inputs(examples) if given is None else given.inputs()
            if source.size is None:
                raise UsageError("the examples to predict never end. Give a finite dataset.")
            iterator = source.evaluation_batches(strategy, global_batch_size=self.global_batch_size)
            steps = source.steps_per_epoch(self.global_batch_size)
            return PredictionLoop(strategy, self.model, values=self._evaluated_values()), iterator, steps

        loop, iterator, steps = together(channel, "preparing to predict", prepare)
        if self._snapshot is not None:
            self._snapshot.take()
        with ends_the_job(channel, lambda: "while predicting"):
            return loop.run(iterator, steps)

    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Take the weights of a checkpoint or of a `.keras` file, and nothing else. Every process calls it alike.

        The chief reads it; no code in the file is run.

        Raises:
            UsageError: there is no such file, or it is one of another model.
            CheckpointProblem: it is damaged.
        """
        place = Path(path)
        averages = {} if self.averages is None else named(self._model_groups()[1:])
        variables = named(self._model_groups()[:1])
        channel = self.session.channel
        if place.suffix == ".keras":
            together(channel, "reading the weights", lambda: self._read_keras(place) if self.session.is_chief else None)
            copy_from_chief(self.session, variables)
        else:
            read = functools.partial(find, place, self._notice)
            checkpoint = together(channel, "reading the checkpoint", lambda: read() if self.session.is_chief else None)
            with ends_the_job(channel, lambda: "while loading weights"):
                restore_weights(self.session, checkpoint, variables, averages, str(place))

    def _read_keras(self, path: Path) -> None:
        if not path.is_file():
            raise UsageError(f"there is no file {path}.")
        try:
            self.model.load_weights(path)
        except (ValueError, OSError, KeyError, zipfile.BadZipFile) as error:
            raise UsageError(f"{path} does not fit the model: {str(error).splitlines()[0]}") from None

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the model as it is evaluated, with averages of the weights where there are some.

        Every process calls it; the chief writes. What is written loads without tfdist, but for tfdist's own layers in a
        `.keras` file.

        Args:
            path: a file whose name ends in `.keras`, or the folder of a SavedModel.

        Raises:
            UsageError, CheckpointProblem: it cannot be written.
        """
        averages = {} if self.averages is None else {id(weight): average for weight, average in self.averages.mapping}

        def write() -> None:
            if self.session.is_chief:
                values = [averages.get(id(v), v).numpy() for v in self.model.variables]
                export(self.task, self.settings, values, Path(path))

        together(self.session.channel, "exporting the model", write)

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
        self._resumed = choose(self.settings, self._store, self.session, self._notice)
        first = 0 if self._resumed is None else self._resumed.step
        # Accumulation must know where an epoch ends, and so must a run that goes on in the middle of one.
        needed = self.settings.steps is None or self.settings.accumulate > 1 or self.settings.checkpoint_dir is not None
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
            leave=None if self.session.asynchronous else self._leaving.request,
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
            batches = train.numbered_batches(**order, epochs=epochs, first=first)
            self._iterator = None
            self._loop = CoordinatedLoop(
                strategy,
                self._step,
                batches,
                list(self.optimizers.values()),
                max_in_flight=self.settings.max_in_flight,
                leaving=self._leaving,
                phases=self._phases,
            )
        else:
            done = first * accumulate
            if steps_per_epoch is not None and batches_per_epoch is not None:  # an epoch's last step may have fewer
                done = first // steps_per_epoch * batches_per_epoch + first % steps_per_epoch * accumulate
            self._iterator = train.training_batches(strategy, **order, first=done)
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
        self._about = self._description(plan)
        if self._resumed is not None:
            require_same_course(self._resumed, self._about["course"], self._notice)
        return plan

    def _description(self, plan: Plan) -> dict[str, Any]:
        """What a checkpoint says of its run."""
        overlap = self.session.asynchronous and (plan.examples or 0) % plan.global_batch_size > 0
        cls = type(self.task)
        about = {
            "backend": plan.backend,
            "replicas_in_sync": plan.replicas,
            "task": {
                "class": f"{cls.__module__}:{cls.__qualname__}",
                "task": getattr(self.task, "loaded_from", None),
            },
            "course": {
                "seed": self.settings.seed,
                "shuffle_buffer": self.settings.shuffle_buffer,
                "global_batch_size": plan.global_batch_size,
                "accumulate": plan.accumulate,
                "examples": plan.examples,
                "batches": "going on over the end of an epoch" if overlap else "cut at the end of an epoch",
                "settings": dataclasses.asdict(self.settings),
            },
        }
        told: dict[str, Any] = json.loads(json.dumps(about))  # as it comes back
        return told

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
            "the code of the task": source_digest(type(self.task)),
            "the structure of the training examples": str(self._splits["train"].dataset.element_spec),
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
        parts_count = len(self.optimizers)
        chunks = course.chunks or [columns(np.zeros((0, width(parts_count)), np.float32), np.zeros(0), parts_count)]
        losses, rates, penalties, rows, seconds = (
            np.concatenate([getattr(c, f) for c in chunks]) for f in ("losses", "rates", "penalties", "rows", "seconds")
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
            resumed_from=course.first or None,
            skipped_steps=course.totals["skipped_steps"],
            stopped=course.stopped,
            best=None if self._decisions.best is None else dataclasses.asdict(self._decisions.best),
            examples_seen=course.totals["examples_seen"],
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
            checkpoints=None if self.settings.checkpoint_dir is None else self._saver.describe(),
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
