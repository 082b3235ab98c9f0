"""The settings of a run: typed, with their documentation, checked once. Flags and YAML files derive from these."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tfdist.errors import UsageError, closest
from tfdist.strategies.table import check_backend

__all__ = ["Settings", "TrainCommand", "learning_rate"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a task is trained. Keyword arguments of `tfdist.Trainer`, and flags of `tfdist train`."""

    backend: str | None = None
    """horovod, multi_worker_mirrored, mirrored or one_device. Unset: horovod under mpirun; alone, mirrored with
    several GPUs, else one_device."""
    replicas: int | None = None
    """Devices of a single-process backend (logical CPU devices where there is no GPU)."""
    epochs: int | None = None
    """Passes over the training split. Unset: what the task says."""
    steps: int | None = None
    """Training steps in all, instead of epochs."""
    global_batch_size: int | None = None
    """Examples per step over all replicas. Unset: what the task says, whatever the number of replicas."""
    learning_rate: float | None = None
    """Base learning rate. Unset: what the task says."""
    seed: int = 0
    """Seed of the initial weights and of the order of the examples."""
    shuffle_buffer: int = 100_000
    """Examples that shuffling mixes at a time; 0 keeps the dataset's order."""
    steps_per_chunk: int = 10
    """Steps between two moments at which the trainer logs, evaluates and reacts."""
    validate_every: int = 1
    """Evaluate after every so many epochs, and always at the end; 0: only at the end."""
    intra_op_threads: int | None = None
    """Threads of one TensorFlow operation. Unset: usable cores // replicas on this host, at least 1."""

    @classmethod
    def of(cls, **settings: Any) -> Settings:
        """Settings from keyword arguments. Raises UsageError for an unknown name, with the nearest one."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in settings:
            if name not in known:
                raise UsageError(f"{name}={settings[name]!r} is not a setting.{closest(name, known)}")
        return cls(**settings)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(Settings):
            _of_type(field.name, getattr(self, field.name), str(field.type))
        check_backend(self.backend)
        for name in ("replicas", "epochs", "steps", "global_batch_size", "steps_per_chunk", "intra_op_threads"):
            _at_least(name, getattr(self, name), 1)
        limits = {"global_batch_size": 2**31 - 1, "steps_per_chunk": 2**31 - 1, "intra_op_threads": 1024}
        for name, most in limits.items():
            if (getattr(self, name) or 0) > most:
                raise UsageError(f"{name}={getattr(self, name)} must be {most} or less.")
        for name in ("seed", "shuffle_buffer", "validate_every"):
            _at_least(name, getattr(self, name), 0)
        if self.epochs is not None and self.steps is not None:
            raise UsageError(f"epochs={self.epochs} and steps={self.steps} are both set. Leave one of them out.")
        if self.seed >= 2**32:
            raise UsageError(f"seed={self.seed} must be below 2**32.")
        if self.learning_rate is not None:
            learning_rate(self.learning_rate)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainCommand(Settings):
    """The command line of `tfdist train`: what to train, how, and where the report goes."""

    task: str = "digits"
    """A built-in task (digits), or your own as path/to/file.py:ClassName or package.module:ClassName."""
    task_args: tuple[str, ...] = ()
    """Fields of the task to set, as name=value."""
    report: Path | None = None
    """Write what was done and measured to this JSON file."""
    verbose: bool = False
    """Print the resolved cluster and what was set for it."""


def learning_rate(value: Any) -> float:
    """The learning rate, checked. Raises UsageError unless it is a finite number, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise UsageError(f"learning_rate={value!r} must be a finite number, 0 or more.")
    return float(value)


def _of_type(name: str, value: Any, annotation: str) -> None:
    """Check a value against the annotation of its field, such as `int | None`; flags are checked before."""
    kinds = {"int": (int, "a whole number"), "float": (int | float, "a number"), "str": (str, "text")}
    allowed, _, none = annotation.partition(" | ")
    if value is None and none:
        return
    kind, words = kinds[allowed]
    if isinstance(value, bool) or not isinstance(value, kind):
        raise UsageError(f"{name}={value!r} must be {words}.")


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise UsageError(f"{name}={value} must be {least} or more.")
