"""Build a task's model and optimizer, and check on every rank that they can be trained together."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from tfdist.cluster.variables import unnumbered
from tfdist.errors import UsageError
from tfdist.training.task import Task

__all__ = ["build_model", "build_optimizer", "check_task", "digest", "structure"]


def check_task(task: Task) -> None:
    """Raises UsageError where the task's class would not do what it seems to say."""
    cls = type(task)
    fields = {field.name for field in dataclasses.fields(task)}
    for base in cls.__mro__[: cls.__mro__.index(Task)]:
        ignored = fields & set(vars(base)) if "__dataclass_fields__" not in vars(base) else set()
        if ignored:
            raise UsageError(
                f"the task {base.__name__} sets {', '.join(sorted(ignored))} without being a dataclass, so that it has "
                "no effect. Write @dataclasses.dataclass(kw_only=True) above the class."
            )
    splits = task.evaluation_splits()
    if not isinstance(splits, tuple | list) or not all(isinstance(split, str) for split in splits):
        raise UsageError(f"{cls.__name__}.evaluation_splits returned {splits!r}. Return a tuple of names.")


def build_model(task: Task) -> keras.Model:
    """Call the task's recipe. Inside the strategy's scope.

    Raises:
        UsageError: it gave no Keras model, or one without variables to train.
    """
    model = task.build_model()
    if not isinstance(model, keras.Model):
        raise UsageError(f"{type(task).__name__}.build_model returned a {type(model).__name__}. Return a keras.Model.")
    if not model.built or not model.trainable_variables:
        raise UsageError(
            f"the model {model.name!r} has no trainable variables yet. Build it in build_model: start it with a "
            "keras.Input, or call it once on an example."
        )
    return model


def build_optimizer(task: Task, model: keras.Model, learning_rate: float) -> keras.optimizers.Optimizer:
    """Call the task's recipe and make all slots, so that they exist before the first step. Inside the scope.

    Raises:
        UsageError: the optimizer does things by itself that would go wrong with several replicas.
    """
    optimizer = task.build_optimizer(learning_rate)
    name = type(optimizer).__name__
    if _wrapped_by_horovod(optimizer):
        raise UsageError(
            f"the optimizer {name} is wrapped by Horovod (DistributedOptimizer). With Keras 3 that wrapper silently "
            "does not average, and tfdist reduces the gradients itself. Return the plain Keras optimizer."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"{type(task).__name__}.build_optimizer returned a {name} from {type(optimizer).__module__}. "
            "Return a keras.optimizers.Optimizer."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise UsageError(
            f"the optimizer is a {name}: it sees an overflow on the first replica only. Return the inner optimizer."
        )
    if optimizer.gradient_accumulation_steps:
        raise UsageError(
            f"the optimizer {name} has gradient_accumulation_steps={optimizer.gradient_accumulation_steps}, which "
            "fails inside a tf.distribute replica. Leave it out and use a larger global_batch_size."
        )
    if optimizer.ema_overwrite_frequency:
        raise UsageError(
            f"the optimizer {name} has ema_overwrite_frequency={optimizer.ema_overwrite_frequency}, which fails "
            "inside a tf.distribute replica. Leave it out."
        )
    optimizer.build(model.trainable_variables)
    return optimizer


def structure(variables: Iterable[keras.Variable]) -> list[list[Any]]:
    """Path, shape, dtype and whether it is trained, of each variable; what all ranks must agree on."""
    return [[unnumbered(v.path), list(v.shape), v.dtype, bool(v.trainable)] for v in variables]


def digest(variables: Iterable[keras.Variable]) -> str:
    """SHA-256 over the bytes of the variables in their order."""
    total = hashlib.sha256()
    for variable in variables:
        total.update(np.ascontiguousarray(variable.numpy()).tobytes())
    return total.hexdigest()


def _wrapped_by_horovod(optimizer: Any) -> bool:
    # Horovod makes a subclass on the fly with the name of the optimizer's own class; only its methods tell.
    for cls in type(optimizer).__mro__:
        for member in (cls, *vars(cls).values()):
            if str(getattr(member, "__module__", "")).split(".")[0] == "horovod":
                return True
    return False
