"""The trainer: takes a task and a backend, and does the same on every one of them."""

from __future__ import annotations

import functools
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from tfdist.checkpoints.checkpoint import find
from tfdist.cluster.channel import require_same, together
from tfdist.cluster.failure import ends_the_job
from tfdist.config import Settings
from tfdist.errors import UsageError
from tfdist.strategies.session import Session, open_session
from tfdist.training.actions import Action
from tfdist.training.averages import Averages
from tfdist.training.building import check_task, structure
from tfdist.training.built import build
from tfdist.training.evaluations import Evaluations
from tfdist.training.exporting import export
from tfdist.training.phases import Phases
from tfdist.training.report import Report
from tfdist.training.resuming import copy_from_chief, restore_weights
from tfdist.training.run import Run
from tfdist.training.task import Task

__all__ = ["Trainer"]


class Trainer:
    """Trains and evaluates one task on one backend.

    Every process of the job creates it and calls the same methods; only the chief prints and writes.

    After `fit`, `trainer.model` is the trained Keras model, the same on every process; `trainer.export` writes it.

    What happens inside:

        __init__: open the backend, build model and optimizer, compare over ranks
        fit:      load the data, trace, repeat [ chunk of steps -> show, save ] until an epoch ends -> evaluate; report
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
        channel = self.session.channel
        given.check_for(self.session.backend)
        self._built = together(channel, "building the model", lambda: build(task, given, self.session))
        self._phases = Phases()
        self._evaluations = Evaluations(self._built, self._phases)
        self._run: Run | None = None
        require_same(
            channel,
            "the structure of model and optimizer",
            "the list of variables (path, shape, dtype, trainable)",
            structure(self._built.variables),
        )
        if given.init_from is not None:
            self.load_weights(given.init_from)

    @property
    def model(self) -> keras.Model:
        """The task's model."""
        return self._built.model

    @property
    def optimizers(self) -> dict[str, keras.optimizers.Optimizer]:
        """The task's optimizers by name."""
        return self._built.optimizers

    @property
    def optimizer(self) -> keras.optimizers.Optimizer:
        """The task's optimizer; the first one where there are several."""
        return next(iter(self.optimizers.values()))

    @property
    def averages(self) -> Averages | None:
        """The averages of the weights (`ema`), where there are some."""
        return self._built.averages

    @property
    def global_batch_size(self) -> int:
        """Examples over all replicas that are worked on at a time."""
        return self._built.global_batch_size

    @property
    def learning_rate(self) -> float:
        """Base learning rate."""
        return self._built.learning_rate

    @property
    def replicas_in_sync(self) -> int:
        """Replicas that train together, over all processes."""
        return int(self.session.strategy.num_replicas_in_sync)

    @property
    def step(self) -> int:
        """Steps that have been done, those that were skipped among them."""
        return 0 if self._run is None else self._run.step

    def fit(self) -> Report:
        """Train for the epochs or steps of the settings, evaluate, and report.

        With `checkpoint_dir` it goes on from the newest checkpoint there.

        Raises:
            UsageError: the data, the step or the checkpoint cannot be used; before the first step, on every rank alike.
            NonFiniteError: loss or gradients became NaN or infinite; nothing of that step was applied.
            RanksDisagree: the ranks did not hold the same weights.
            CheckpointProblem: the last checkpoint could not be written, or all there are are damaged.
            Preempted, Interrupted: a signal asked the job to leave, and it has saved.
        """
        if self._run is not None:
            raise UsageError("Trainer.fit was called a second time. Create another Trainer, or ask for more epochs.")
        self._run = Run(self._built, self._evaluations, self._phases, self._actions)
        return self._run.go()

    def evaluate(self, split: str = "test") -> dict[str, float]:
        """`loss` and the task's metrics over all examples of a split, each counted once.

        Raises:
            UsageError: the task has no such split, or it never ends.
        """
        return self._evaluations.evaluate(split, f"after step {self.step}")

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
        return self._evaluations.predict(examples)

    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Take the weights of a checkpoint or of a `.keras` file, and nothing else. Every process calls it alike.

        The chief reads it; no code in the file is run.

        Raises:
            UsageError: there is no such file, or it is one of another model.
            CheckpointProblem: it is damaged.
        """
        place, channel, chief = Path(path), self.session.channel, self.session.is_chief
        if place.suffix == ".keras":
            together(channel, "reading the weights", lambda: self._read_keras(place) if chief else None)
            copy_from_chief(self.session, self._built.named_model())
            return
        read = functools.partial(find, place, self._built.notice)
        checkpoint = together(channel, "reading the checkpoint", lambda: read() if chief else None)
        with ends_the_job(channel, lambda: "while loading weights"):
            restore_weights(
                self.session, checkpoint, self._built.named_model(), self._built.named_averages(), str(place)
            )

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

    def use_averages(self) -> None:
        """Put the averages of the weights (`ema`) in the place of the weights, to use the model with them.

        Raises:
            UsageError: there are none.
        """
        if self.averages is None:
            raise UsageError("there are no averages of the weights. Set ema.")
        for weight, average in self.averages.mapping:
            weight.assign(average.numpy())
