"""The learning rate of a step, as a pure function of the number of updates before it.

    factor   f     1, R or √R, for R replicas                            (lr_scaling none, linear, sqrt)
    warm-up  m(s)  1 + (f − 1)·min(1, (s + 1)/W), or f·min(1, (s + 1)/W) from zero; f without a warm-up
    decay    d(s)  1, 1 − t or ½(1 + cos πt), with t = (s − W)/(T − W)   (lr_schedule constant, linear, cosine)
    rate     base(s)·m(s)·d(s)·p                                         (p: what plateaus have brought it down to)

s counts updates from 0, W is the length of the warm-up in steps, T the number of steps of the run. base is the
optimizer's own learning rate, a number or a schedule. Linear scaling and its warm-up: Goyal et al., Accurate, Large
Minibatch SGD (2017); cosine: Loshchilov and Hutter, SGDR (2017).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.config import Settings
from tfdist.errors import UsageError
from tfdist.training.private_keras import own_schedule

__all__ = ["LearningRate", "Plateau", "schedule"]


class Plateau:
    """The factor that plateaus of the monitored value have brought the learning rate down to."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self.factor = tf.Variable(1.0, trainable=False, name="plateau_factor")

    def reduce(self, by: float) -> None:
        """Multiply the learning rate of all further steps."""
        self.factor.assign(self.factor * by)


class LearningRate(keras.optimizers.schedules.LearningRateSchedule):
    """The schedule that the trainer puts into an optimizer."""

    def __init__(
        self, base: float | Callable[[Any], Any], settings: Settings, *, replicas: int, warmup: int, steps: int
    ) -> None:
        self.base = base
        self._factor = {"none": 1.0, "linear": float(replicas), "sqrt": math.sqrt(replicas)}[settings.lr_scaling]
        self._warmup = warmup
        self._from_zero = settings.warmup_from_zero
        self._decay = settings.lr_schedule
        self._steps = steps
        self.plateau: Plateau | None = None

    def __call__(self, step: Any) -> tf.Tensor:
        """The rate of the update that `step` others come before, a float32 scalar."""
        rate = tf.cast(self.base(step) if callable(self.base) else self.base, tf.float32)
        s = tf.cast(step, tf.float32)
        if self._warmup:
            way = tf.minimum(1.0, (s + 1.0) / self._warmup)
            rate *= self._factor * way if self._from_zero else 1.0 + (self._factor - 1.0) * way
        elif self._factor != 1.0:
            rate *= self._factor
        if self._decay != "constant":
            t = tf.clip_by_value((s - self._warmup) / max(1, self._steps - self._warmup), 0.0, 1.0)
            rate *= 1.0 - t if self._decay == "linear" else 0.5 * (1.0 + tf.cos(math.pi * t))
        return rate if self.plateau is None else rate * self.plateau.factor

    def get_config(self) -> dict[str, Any]:
        """What Keras writes when the optimizer is saved: the base."""
        base = self.base
        return {"base": keras.saving.serialize_keras_object(base) if callable(base) else base}

    @classmethod
    def of(
        cls, optimizer: keras.optimizers.Optimizer, settings: Settings, *, replicas: int, warmup: int, steps: int
    ) -> LearningRate:
        """Take over an optimizer's learning rate.

        Raises:
            UsageError: it has a schedule of its own and the settings another, or its first or last rate is not a
                finite number, 0 or more.
        """
        schedule = own_schedule(optimizer)
        base = float(optimizer.learning_rate.numpy()) if schedule is None else schedule
        if schedule is not None and settings.lr_schedule != "constant":
            raise UsageError(
                f"lr_schedule={settings.lr_schedule!r} is set, but the optimizer {type(optimizer).__name__} has a "
                f"schedule of its own ({type(schedule).__name__}). Leave one of them out."
            )
        rate = cls(base, settings, replicas=replicas, warmup=warmup, steps=steps)
        for step in (0, steps - 1):
            value = float(rate(tf.constant(step, tf.int64)))
            if not 0 <= value < math.inf:
                raise UsageError(
                    f"the learning rate of step {step + 1} is {value}: the schedule of the optimizer "
                    f"{type(optimizer).__name__} must give finite numbers, 0 or more."
                )
        optimizer.learning_rate = rate
        return rate


def schedule(
    optimizers: Iterable[keras.optimizers.Optimizer],
    settings: Settings,
    *,
    replicas: int,
    steps: int,
    steps_per_epoch: int | None,
    notice: Callable[[str], None],
) -> Plateau | None:
    """Put the learning rate of a run of `steps` steps into its optimizers.

    Args:
        steps_per_epoch: None where epochs cannot be counted.
        notice: told what is set without effect.

    Returns:
        What lowers the rate at plateaus, where the settings ask for it.

    Raises:
        UsageError: as `LearningRate.of`, or a warm-up is given in epochs that cannot be counted.
    """
    warmup = settings.warmup_steps or 0
    if settings.warmup_epochs:
        if steps_per_epoch is None:
            raise UsageError(
                f"warmup_epochs={settings.warmup_epochs}, but the training dataset never ends, so epochs cannot be "
                "counted. Set warmup_steps."
            )
        warmup = settings.warmup_epochs * steps_per_epoch
    if warmup and settings.lr_scaling == "none" and not settings.warmup_from_zero:
        notice(f"a warm-up of {warmup} steps changes nothing with lr_scaling='none': see warmup_from_zero")
    rates = [LearningRate.of(o, settings, replicas=replicas, warmup=warmup, steps=steps) for o in optimizers]
    plateau = Plateau() if settings.plateau_patience is not None else None
    for rate in rates:
        rate.plateau = plateau
    base, given = rates[0].base, settings.learning_rate
    if given is not None and not callable(base) and not math.isclose(base, given):
        notice(
            f"learning_rate={given} is set, but build_optimizer has made an optimizer with {base:.6g}, which is used"
        )
    return plateau
