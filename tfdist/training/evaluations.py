"""The splits of a task, and what the model makes of them: evaluation and prediction on all replicas."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster.channel import together
from tfdist.cluster.failure import ends_the_job
from tfdist.errors import UsageError
from tfdist.training.built import Built
from tfdist.training.coordination import Snapshot
from tfdist.training.data import Examples, load_examples, load_inputs
from tfdist.training.loops import EvaluationLoop
from tfdist.training.metrics import MetricTotals
from tfdist.training.phases import Phases
from tfdist.training.prediction import PredictionLoop
from tfdist.training.task import in_float32, unpack

__all__ = ["Evaluations"]


class Evaluations:
    """Loads each split once, and traces its evaluation once. Every process calls it alike."""

    def __init__(self, built: Built, phases: Phases) -> None:
        self._built = built
        self._phases = phases
        self._splits: dict[str, Examples] = {}
        self.loops: dict[str, tuple[EvaluationLoop, Any]] = {}
        """By split: the loop and its iterator."""
        self._snapshot: Snapshot | None = None
        # Workers of an asynchronous backend have no replicas in sync: the chief evaluates alone.
        session = built.session
        self._strategy = tf.distribute.get_strategy() if session.asynchronous else session.strategy

    def examples(self, split: str, *, count: bool) -> Examples:
        """A split of the task; with its size, if that is needed.

        Raises:
            UsageError: it cannot be used.
        """
        built = self._built
        if split not in self._splits or (count and not self._splits[split].counted):
            # Shuffling mixes in TensorFlow's global seed, which the task's code may have changed.
            keras.utils.set_random_seed(built.settings.seed)
            self._splits[split] = load_examples(built.task, split, count=count, notice=built.notice)
        return self._splits[split]

    def prepare(self, split: str) -> tuple[EvaluationLoop, Any, int]:
        """The evaluation of a split: its loop, its iterator, and how many global batches there are.

        Raises:
            UsageError: it never ends, or the task's losses or metrics cannot be used.
        """
        built = self._built
        examples = self.examples(split, count=True)
        if examples.size is None:
            raise UsageError(f"the dataset of split {split!r} never ends, so it cannot be evaluated. Make it finite.")
        if split not in self.loops:
            shards = built.settings.shards
            iterator = examples.evaluation_batches(
                self._strategy, global_batch_size=built.global_batch_size, shards=shards
            )
            by_weight = built.settings.loss_reduction == "weighted_mean"
            metrics = MetricTotals(built.task.metrics(), by_weight=by_weight)
            metrics.see(self._samples(examples))
            values = self._values()
            loop = EvaluationLoop(
                self._strategy,
                built.task,
                built.model,
                metrics,
                iterator,
                values=values,
                phases=self._phases,
                shards=shards,
            )
            self.loops[split] = loop, iterator
        return *self.loops[split], examples.steps_per_epoch(built.global_batch_size)

    def evaluate(self, split: str, where: str) -> dict[str, float]:
        """See `Trainer.evaluate`; `where` is told of an error, as in "after step 7"."""
        channel = self._built.session.channel
        loop, iterator, steps = together(channel, f"preparing to evaluate {split}", lambda: self.prepare(split))
        if self._snapshot is not None:
            self._snapshot.take()
        with ends_the_job(channel, lambda: f"while evaluating {split!r} {where}"):
            return loop.run(iterator, steps)

    def predict(self, examples: Any) -> Any:
        """See `Trainer.predict`."""
        built = self._built

        def prepare() -> tuple[PredictionLoop, Any, int]:
            given = self.examples(examples, count=True) if isinstance(examples, str) else None
            source = load_inputs(examples) if given is None else given.inputs()
            if source.size is None:
                raise UsageError("the examples to predict never end. Give a finite dataset.")
            iterator = source.evaluation_batches(self._strategy, global_batch_size=built.global_batch_size)
            steps = source.steps_per_epoch(built.global_batch_size)
            return PredictionLoop(self._strategy, built.model, values=self._values()), iterator, steps

        channel = built.session.channel
        loop, iterator, steps = together(channel, "preparing to predict", prepare)
        if self._snapshot is not None:
            self._snapshot.take()
        with ends_the_job(channel, lambda: "while predicting"):
            return loop.run(iterator, steps)

    def _values(self) -> list[tuple[keras.Variable, Any]]:
        """Variables of the model with what evaluation takes for them: averages, or a copy on the chief."""
        built = self._built
        averages = [] if built.averages is None else built.averages.mapping
        if not built.session.asynchronous:
            return averages
        if self._snapshot is None:
            replaced = {id(v): average for v, average in averages}
            self._snapshot = Snapshot([(v, replaced.get(id(v), v)) for v in built.model.variables])
        return self._snapshot.mapping

    def _samples(self, examples: Examples) -> list[tuple[Any, Any]]:
        """Labels and predictions of a few examples: the first one, and the rest of a batch, where there is one."""
        samples = []
        first, rest = examples.dataset.take(1), examples.dataset.skip(1).take(min(31, self._built.global_batch_size))
        for inputs, labels, _ in map(unpack, first.batch(1).concatenate(rest.batch(31))):
            with keras.StatelessScope():
                samples.append((labels, in_float32(self._built.model(inputs, training=False))))
        return samples
