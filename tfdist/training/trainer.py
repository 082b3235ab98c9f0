"""The trainer: takes a task and a backend, and does the same on every one of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.cluster.channel import require_same, shared, together
from tfdist.cluster.failure import ends_the_job
from tfdist.cluster.runtime import terminal_width
from tfdist.config import Settings, learning_rate
from tfdist.errors import NonFiniteError, TfdistError, UsageError
from tfdist.strategies.session import Session, open_session
from tfdist.training import report as reporting
from tfdist.training.building import build_model, build_optimizer, check_task, digest, structure
from tfdist.training.console import Console, Plan, numbers, open_console
from tfdist.training.data import Examples, load_examples
from tfdist.training.loops import Chunk, EvaluationLoop, TrainingLoop
from tfdist.training.metrics import MetricTotals
from tfdist.training.report import Report
from tfdist.training.step import TrainingStep
from tfdist.training.task import Task, unpack

__all__ = ["Trainer"]


class Trainer:
    """Trains and evaluates one task on one backend.

    Every process of the job creates it and calls the same methods; only the chief prints and writes.

        prepare: open the backend, load the data, build model and optimizer, compare over ranks, trace
        fit:     repeat [ chunk of steps -> show ] until an epoch ends -> evaluate; at the end compare the ranks, report
    """

    def __init__(self, task: Task, **settings: Any) -> None:
        """Open the backend and build everything, so that what is wrong shows before training, on every rank alike.

        Args:
            task: what to train.
            **settings: fields of `tfdist.Settings`.

        Raises:
            UsageError: a setting, the task or its data cannot be used.
            EnvironmentProblem: something that the backend needs is missing.
            RanksDisagree: the ranks did not build the same thing.
        """
        if not isinstance(task, Task):
            raise UsageError(f"Trainer got a {type(task).__name__}; give it an instance of a subclass of tfdist.Task.")
        check_task(task)
        self.task = task
        self.settings = Settings.of(**settings)
        given = self.settings
        self.session: Session = open_session(given.backend, given.replicas, given.intra_op_threads)
        self.global_batch_size = _whole("global_batch_size", given.global_batch_size, task.global_batch_size)
        self.learning_rate = learning_rate(task.learning_rate if given.learning_rate is None else given.learning_rate)
        self.step = 0
        """Steps that have been applied."""
        self._splits: dict[str, Examples] = {}
        self._evaluations: dict[str, tuple[EvaluationLoop, Any]] = {}
        together(self.session.channel, "building the model", self._build)
        require_same(
            self.session.channel,
            "the structure of model and optimizer",
            "the list of variables (path, shape, dtype, trainable)",
            structure([*self.model.variables, *self.optimizer.variables]),
        )

    @property
    def replicas_in_sync(self) -> int:
        """Replicas that train together, over all processes."""
        return int(self.session.strategy.num_replicas_in_sync)

    def fit(self) -> Report:
        """Train for the epochs or steps of the settings, evaluate, and report.

        Raises:
            UsageError: the data or the step cannot be used; before the first step, on every rank alike.
            NonFiniteError: loss or gradients became NaN or infinite; nothing of that step was applied.
            RanksDisagree: at the end the ranks did not hold the same weights.
        """
        if self.step:
            raise UsageError("Trainer.fit was called a second time. Create another Trainer, or ask for more epochs.")
        channel = self.session.channel
        with ends_the_job(channel, lambda: "before training"):
            plan = together(channel, "preparing training", self._prepare)
        console = open_console(visible=self.session.is_chief, width=terminal_width(self.session.identity))
        try:
            with ends_the_job(channel, lambda: f"at step {self.step + self._loop.steps_done() + 1}"):
                console.begin(plan)
                chunks, metrics = self._train(plan, console)
            with ends_the_job(channel, lambda: f"after step {self.step}"):
                report = self._report(plan, chunks, metrics)
            console.end(_summary(report))
        finally:
            console.close()
        return report

    def evaluate(self, split: str = "test") -> dict[str, float]:
        """`loss` and the task's metrics over all examples of a split, each counted once.

        Raises:
            UsageError: the task has no such split, or it never ends.
        """
        channel = self.session.channel
        loop, iterator, steps = together(channel, f"preparing to evaluate {split}", lambda: self._evaluation(split))
        with ends_the_job(channel, lambda: f"while evaluating {split!r} after step {self.step}"):
            return loop.run(iterator, steps)

    def _build(self) -> None:
        keras.utils.set_random_seed(self.settings.seed)
        with self.session.strategy.scope():
            self.model = build_model(self.task)
            self.optimizer = build_optimizer(self.task, self.model, self.learning_rate)

    def _examples(self, split: str) -> Examples:
        if split not in self._splits:
            # Shuffling mixes in TensorFlow's global seed, which the task's code may have changed.
            keras.utils.set_random_seed(self.settings.seed)
            count = self.settings.steps is None or split in self.task.evaluation_splits()
            self._splits[split] = load_examples(self.task, split, count=count, notice=self._notice)
        return self._splits[split]

    def _notice(self, message: str) -> None:
        if self.session.is_chief:
            print(f"tfdist: {message}", flush=True)

    def _prepare(self) -> Plan:
        train = self._examples("train")
        shape = getattr(self.model, "input_shape", None)
        inputs = train.dataset.element_spec[0] if isinstance(train.dataset.element_spec, tuple) else None
        if isinstance(shape, tuple) and isinstance(inputs, tf.TensorSpec) and inputs.shape.rank == len(shape):
            raise UsageError(
                f"the dataset's inputs have shape {inputs.shape}, and the model takes batches of shape {shape}: the "
                "dataset seems to be batched. Give single examples; the trainer makes the batches."
            )
        steps_per_epoch = None if train.size is None else train.steps_per_epoch(self.global_batch_size)
        steps = self._total_steps(steps_per_epoch)
        self._iterator = train.training_batches(
            self.session.strategy,
            global_batch_size=self.global_batch_size,
            seed=self.settings.seed,
            shuffle_buffer=self.settings.shuffle_buffer,
        )
        keras.utils.set_random_seed(self.settings.seed)  # for random operations of the task's own
        step = TrainingStep(self.session.strategy, self.task, self.model, self.optimizer)
        self._loop = TrainingLoop(self.session.strategy, step, self._iterator)
        for split in self.task.evaluation_splits():
            self._evaluation(split)
        plan = Plan(
            backend=self.session.backend,
            replicas=self.replicas_in_sync,
            steps=steps,
            steps_per_epoch=steps_per_epoch,
            global_batch_size=self.global_batch_size,
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

    def _total_steps(self, steps_per_epoch: int | None) -> int:
        if self.settings.steps is not None:
            return self.settings.steps
        if steps_per_epoch is None:
            raise UsageError("the training dataset never ends, so epochs cannot be counted. Set steps.")
        return _whole("epochs", self.settings.epochs, self.task.epochs) * steps_per_epoch

    def _evaluation(self, split: str) -> tuple[EvaluationLoop, Any, int]:
        examples = self._examples(split)
        if examples.size is None:
            raise UsageError(f"the dataset of split {split!r} never ends, so it cannot be evaluated. Make it finite.")
        strategy = self.session.strategy
        if split not in self._evaluations:
            iterator = examples.evaluation_batches(strategy, global_batch_size=self.global_batch_size)
            metrics = MetricTotals(self.task.metrics())
            metrics.see(*self._sample(examples))
            self._evaluations[split] = EvaluationLoop(strategy, self.task, self.model, metrics, iterator), iterator
        return *self._evaluations[split], examples.steps_per_epoch(self.global_batch_size)

    def _sample(self, examples: Examples) -> tuple[Any, Any]:
        """Labels and predictions of one example."""
        inputs, labels, _ = unpack(next(iter(examples.dataset.batch(1))))
        with keras.StatelessScope():
            return labels, self.model(inputs, training=False)

    def _train(self, plan: Plan, console: Console) -> tuple[list[Chunk], dict[str, dict[str, float]]]:
        chunks: list[Chunk] = []
        metrics: dict[str, dict[str, float]] = {}
        validate_every = self.settings.validate_every * (plan.steps_per_epoch or 0)
        while self.step < plan.steps:
            stop = plan.steps
            if validate_every:
                stop = min(stop, (self.step // validate_every + 1) * validate_every)
            chunk = self._loop.run(self._iterator, min(self.settings.steps_per_chunk, stop - self.step))
            chunks.append(chunk)
            if not chunk.finite:
                raise self._not_finite(chunk)
            self.step += len(chunk.losses)
            self._loop.forget()
            console.progress(self.step, float(chunk.losses[-1]), chunk.rows.sum() / chunk.seconds.sum())
            if self.step == stop:
                for split in self.task.evaluation_splits():
                    metrics[split] = self.evaluate(split)
                    console.evaluated(self.step, split, metrics[split])
        return chunks, metrics

    def _not_finite(self, chunk: Chunk) -> TfdistError:
        count, ids = chunk.suspects
        where = f"on replica {ids}" if count == 1 else f"on {count} of {self.replicas_in_sync} replicas"
        what = f"the loss is not finite {where}" if count else "the gradients are not finite"
        return shared(
            NonFiniteError(
                f"step {self.step + len(chunk.losses)}: {what}; the step was not applied, and all ranks stop. "
                "Lower the learning rate, or look at the examples of that step."
            )
        )

    def _report(self, plan: Plan, chunks: list[Chunk], metrics: dict[str, dict[str, float]]) -> Report:
        weights = digest(self.model.trainable_variables)
        state = digest([*self.model.variables, *self.optimizer.variables])
        require_same(
            self.session.channel,
            "the variables at the end",
            f"the digest of all variables after step {self.step}",
            state,
            way_out="Look for code in the task that changes variables outside of the step.",
        )
        losses, rows, seconds = (np.concatenate([getattr(c, f) for c in chunks]) for f in ("losses", "rows", "seconds"))
        return Report(
            backend=self.session.backend,
            task=type(self.task).__name__,
            processes=self.session.identity.size,
            replicas_in_sync=self.replicas_in_sync,
            global_batch_size=self.global_batch_size,
            learning_rate=self.learning_rate,
            seed=self.settings.seed,
            epochs=None if self.settings.steps is not None else self.settings.epochs or self.task.epochs,
            steps=self.step,
            examples_seen=int(rows.sum()),
            losses=[float(loss) for loss in losses],
            metrics=metrics,
            weights_sha256=weights,
            state_sha256=state,
            step_time_ms=reporting.step_time(seconds),
            examples_per_second=reporting.throughput(rows, seconds),
            traces={"train": self._loop.traces}
            | {f"evaluate {s}": e.traces for s, (e, _) in self._evaluations.items()},
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
