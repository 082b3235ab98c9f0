"""What a trainer has built before it trains or evaluates: model, optimizers, averages, and what they depend on."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras

from tfdist.config import Settings, learning_rate
from tfdist.errors import UsageError
from tfdist.strategies.session import Session
from tfdist.training.averages import Averages
from tfdist.training.building import build_model, build_optimizers
from tfdist.training.saving import AVERAGES, named
from tfdist.training.task import Task

__all__ = ["Built", "build", "whole"]


@dataclasses.dataclass(frozen=True)
class Built:
    """The same on every process."""

    task: Task
    settings: Settings
    session: Session
    global_batch_size: int
    learning_rate: float
    """Base learning rate."""
    model: keras.Model
    optimizers: dict[str, keras.optimizers.Optimizer]
    averages: Averages | None

    @property
    def variables(self) -> list[keras.Variable]:
        """All variables of model and optimizers."""
        return [*self.model.variables, *(v for optimizer in self.optimizers.values() for v in optimizer.variables)]

    def named_model(self) -> dict[str, keras.Variable]:
        """The variables of the model, by their names in a checkpoint."""
        return named([("model", [(v.path, v) for v in self.model.variables])])

    def named_averages(self) -> dict[str, keras.Variable]:
        """The averages of the weights, likewise."""
        mapping = [] if self.averages is None else self.averages.mapping
        return named([(AVERAGES.rstrip("/"), [(weight.path, average) for weight, average in mapping])])

    @property
    def speaks(self) -> bool:
        """Whether this process prints for the job."""
        return self.session.is_chief and not self.settings.quiet

    def notice(self, message: str) -> None:
        """Say something to the user, once for the job."""
        if self.speaks:
            print(f"tfdist: {message}", flush=True)


def build(task: Task, settings: Settings, session: Session) -> Built:
    """Call the task's recipes, inside the strategy's scope.

    Raises:
        UsageError: what they give cannot be used.
    """
    batch = whole("global_batch_size", settings.global_batch_size, task.global_batch_size)
    rate = learning_rate(task.learning_rate if settings.learning_rate is None else settings.learning_rate)
    keras.utils.set_random_seed(settings.seed)
    with session.strategy.scope():
        model = build_model(task, settings)
        optimizers = build_optimizers(task, model, rate, settings)
        averages = None if settings.ema is None else Averages(model, settings.ema)
    return Built(task, settings, session, batch, rate, model, optimizers, averages)


def whole(name: str, given: int | None, default: Any) -> int:
    """A setting, or what the task says in its place. Raises UsageError unless that is a whole number, 1 or more."""
    if given is not None:
        return given
    if not isinstance(default, int) or default < 1:
        raise UsageError(f"the task's {name}={default!r} must be a whole number, 1 or more.")
    return default
