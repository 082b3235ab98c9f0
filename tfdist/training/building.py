"""Build a task's model and optimizer, and check on every rank that they can be trained together."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import re
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.cluster.variables import unnumbered
from tfdist.config import Settings
from tfdist.errors import UsageError
from tfdist.training.private_keras import normalizations
from tfdist.training.replica import ONLY
from tfdist.training.task import Task

__all__ = ["build_model", "build_optimizers", "check_task", "digest", "source_digest", "structure"]


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
    needed = ("build_model", "dataset", *(() if cls.train_step is not Task.train_step else ("losses",)))
    missing = [name for name in needed if getattr(cls, name) is getattr(Task, name)]
    if missing:
        raise UsageError(f"the task {cls.__name__} has no {missing[0]}. Write that method; see tfdist.Task.")
    splits = task.evaluation_splits()
    if not isinstance(splits, tuple | list) or not all(isinstance(split, str) for split in splits):
        raise UsageError(f"{cls.__name__}.evaluation_splits returned {splits!r}. Return a tuple of names.")


def build_model(task: Task, settings: Settings) -> keras.Model:
    """Call the task's recipe, in the precision of the settings. Inside the strategy's scope.

    Raises:
        UsageError: it gave no Keras model, or one without variables to train.
    """
    before = keras.mixed_precision.dtype_policy()
    if settings.precision != "float32":
        keras.mixed_precision.set_dtype_policy(f"mixed_{settings.precision}")
    try:
        model = task.build_model()
    finally:
        keras.mixed_precision.set_dtype_policy(before)
    if not isinstance(model, keras.Model):
        raise UsageError(f"{type(task).__name__}.build_model returned a {type(model).__name__}. Return a keras.Model.")
    if not model.built or not model.trainable_variables:
        raise UsageError(
            f"the model {model.name!r} has no trainable variables yet. Build it in build_model: start it with a "
            "keras.Input, or call it once on an example."
        )
    if settings.batch_norm != "model":
        for layer in normalizations(model):
            layer.synchronized = settings.batch_norm == "sync"
    return model


def build_optimizers(
    task: Task, model: keras.Model, learning_rate: float, settings: Settings
) -> dict[str, keras.optimizers.Optimizer]:
    """Call the task's recipe and make all slots, so that they exist before the first step. Inside the scope.

    Returns:
        The optimizers by name; a single one is called `replica.ONLY`.

    Raises:
        UsageError: an optimizer does things by itself that would go wrong with several replicas.
    """
    made = task.build_optimizer(learning_rate)
    if isinstance(made, dict) and (not made or not all(isinstance(name, str) and name for name in made)):
        raise UsageError(f"build_optimizer returned the dict {made!r}. Return optimizers by name.")
    optimizers = made if isinstance(made, dict) else {ONLY: made}
    if len({id(optimizer) for optimizer in optimizers.values()}) < len(optimizers):
        raise UsageError("build_optimizer gave one optimizer two names. Make one for each.")
    for optimizer in optimizers.values():
        _check_optimizer(task, optimizer, settings)
        if settings.weight_decay is not None:
            optimizer.weight_decay = settings.weight_decay
            words = [re.escape(word) for word in settings.weight_decay_exclude]
            excluded = [v for v in model.trainable_variables if words and re.search("|".join(words), v.path)]
            if words and not excluded:
                raise UsageError(
                    f"weight_decay_exclude={settings.weight_decay_exclude!r} matches no weight, such as "
                    f"{', '.join(v.path for v in model.trainable_variables[:5])}."
                )
            if excluded:  # without any, what the task has left out stays
                optimizer.exclude_from_weight_decay(var_list=excluded)
        optimizer.build(model.trainable_variables)
    return optimizers


def _check_optimizer(task: Task, optimizer: Any, settings: Settings) -> None:
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
            f"the optimizer is a {name}: it sees an overflow on the first replica only. Return the inner optimizer, "
            "and set precision='float16'."
        )
    given = {key: getattr(optimizer, key, None) for key in ("clipvalue", "clipnorm", "global_clipnorm")}
    own = [f"{key}={value}" for key, value in given.items() if value is not None]
    chosen = [n for n in ("clip_value", "clip_norm", "clip_global_norm") if getattr(settings, n) is not None]
    if own and chosen:
        raise UsageError(
            f"{chosen[0]}={getattr(settings, chosen[0])} is set, and the optimizer {name} clips by itself "
            f"({', '.join(own)}). Leave one of them out."
        )
    for attribute, instead in (
        ("gradient_accumulation_steps", "accumulate={}"),
        ("loss_scale_factor", "precision='float16'"),
    ):
        if getattr(optimizer, attribute, None):
            value = getattr(optimizer, attribute)
            raise UsageError(
                f"the optimizer {name} has {attribute}={value}, which goes wrong inside a tf.distribute replica. "
                f"Leave it out, and set {instead.format(value)}."
            )
    if optimizer.use_ema:
        raise UsageError(
            f"the optimizer {name} has use_ema=True, whose average nobody would use. Leave it out, and set "
            f"ema={optimizer.ema_momentum}."
        )


def structure(variables: Iterable[keras.Variable]) -> list[list[Any]]:
    """Path, shape, dtype and whether it is trained, of each variable; what all ranks must agree on."""
    return [[unnumbered(v.path), list(v.shape), v.dtype, bool(v.trainable)] for v in variables]


def source_digest(cls: type) -> str:
    """SHA-256 over the source code of a task's class and of its bases, as far as there is some."""
    total = hashlib.sha256()
    for base in cls.__mro__:
        with contextlib.suppress(OSError, TypeError):  # built in, or typed at a prompt
            total.update(inspect.getsource(base).encode())
    return total.hexdigest()


def digest(variables: Iterable[keras.Variable | tf.Variable]) -> str:
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
