"""From a checkpoint back to a run: which one, whether it fits, and its values in the variables of all processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.checkpoints.checkpoint import Checkpoint, all_in, find
from tfdist.checkpoints.compare import compare
from tfdist.checkpoints.manifest import TensorInfo
from tfdist.checkpoints.store import Store
from tfdist.cluster.channel import together
from tfdist.cluster.variables import unnumbered
from tfdist.config import Settings
from tfdist.errors import CheckpointProblem, UsageError
from tfdist.strategies.session import Session
from tfdist.training.broadcast import from_chief
from tfdist.training.saving import AVERAGES

__all__ = [
    "BEST",
    "Resumed",
    "choose",
    "copy_from_chief",
    "require_same_course",
    "restore",
    "restore_weights",
]

BEST = "best/"
"""What the names of arrays begin with that hold the best evaluation's values."""

_NAMES = "names"

_OF_ITS_OWN = {
    "backend",
    "replicas",
    "epochs",
    "steps",
    "checkpoint_dir",
    "save_every",
    "keep",
    "keep_best",
    "resume",
    "init_from",
    "stop_after_steps",
    "check_every",
    "stall_timeout",
    "quiet",
    "trace",
    "steps_per_chunk",
    "validate_every",
    "intra_op_threads",
    "gpu_memory",
    "collectives",
    "parameter_servers",
    "max_in_flight",
}
"""Settings that may differ after a resume without a word."""


@dataclasses.dataclass
class Resumed:
    """A checkpoint that a run goes on from; the same on every process, but for its file, which the chief has."""

    step: int
    state: dict[str, Any]
    tensors: dict[str, TensorInfo]
    path: str
    here: bool
    """Whether it lies in checkpoint_dir."""
    checkpoint: Checkpoint | None


def choose(settings: Settings, store: Store | None, session: Session, tell: Callable[[str], None]) -> Resumed | None:
    """The checkpoint to go on from, chosen by the chief; None to begin anew. Every process calls it alike.

    Raises:
        UsageError, CheckpointProblem: there is none where one was asked for, or it would be lost; on the chief.
    """
    checkpoint = _chosen(settings, store, tell) if session.is_chief else None
    told = None
    if checkpoint is not None:
        here = settings.checkpoint_dir is not None and checkpoint.path.parent.samefile(settings.checkpoint_dir)
        told = [*_told(checkpoint), str(checkpoint.path), here]
    told = session.channel.exchange("the checkpoint to go on from", told)[0]
    if told is None:
        return None
    return Resumed(*_heard(told[:3]), path=told[3], here=told[4], checkpoint=checkpoint)


def _chosen(settings: Settings, store: Store | None, tell: Callable[[str], None]) -> Checkpoint | None:
    newest = None if store is None else store.newest(tell)
    if store is not None and newest is None and all_in(Path(settings.checkpoint_dir or "")):
        raise CheckpointProblem(
            f"all checkpoints in checkpoint_dir={settings.checkpoint_dir!r} are damaged. Restore one from a copy, or "
            "begin anew in another folder."
        )
    if settings.resume == "never":
        if newest is not None:
            raise UsageError(
                f"resume='never', but checkpoint_dir={settings.checkpoint_dir!r} holds checkpoints, up to step "
                f"{newest.manifest.step}. Give an empty folder, or leave resume out to go on from them."
            )
        return None
    if settings.resume == "auto":
        return newest
    checkpoint = find(Path(settings.resume), tell)
    if newest is not None and newest.manifest.step > checkpoint.manifest.step:
        raise UsageError(
            f"resume={settings.resume!r} is a checkpoint of step {checkpoint.manifest.step}, but "
            f"checkpoint_dir={settings.checkpoint_dir!r} has one of step {newest.manifest.step}, which the next start "
            "would take. Give another checkpoint_dir."
        )
    return checkpoint


def require_same_course(resumed: Resumed, course: Mapping[str, Any], tell: Callable[[str], None]) -> None:
    """Check that the run would take the same examples in the same order. Every process calls it alike.

    Args:
        course: what decides that, by name; `settings` among it.
        tell: told of other settings that differ.

    Raises:
        UsageError: names what differs.
    """
    before = resumed.state["course"]
    for name, value in course.items():
        if name != "settings" and before.get(name) != value:
            raise UsageError(
                f"{name}={value}, but the checkpoint {resumed.path} was made with {name}={before.get(name)}: the "
                "examples after it would be others. Use the same; or take its weights alone, with init_from and "
                "another checkpoint_dir."
            )
    best, was = course["settings"]["keep_best"], before["settings"].get("keep_best")
    if resumed.here and best != was and None not in (best, was):
        raise UsageError(
            f"keep_best={best!r}, but the checkpoints in this checkpoint_dir were kept by {was!r}, and their scores do "
            "not compare. Use the same, or another checkpoint_dir."
        )
    for name, value in course["settings"].items():
        was = before["settings"].get(name, value)
        if was != value and name not in course and name not in _OF_ITS_OWN:
            tell(f"resuming with {name}={value}; the checkpoint was made with {name}={was}")


def infos(variables: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Shapes and dtypes of variables, by name."""
    return {name: TensorInfo(tuple(v.shape), _dtype(v)) for name, v in variables.items()}


def restore(session: Session, resumed: Resumed, variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Write a checkpoint's values to all variables, on every process alike, outside of a strategy's scope.

    Returns:
        The arrays that were saved beside the variables, by `BEST` and the variable's name.

    Raises:
        UsageError: the variables are not those of the checkpoint; names what is missing, extra or of another shape.
    """
    own = {name: info for name, info in resumed.tensors.items() if not name.startswith(BEST)}
    places = matched(infos(variables), own, resumed.state.get(_NAMES), resumed.path)
    best = {BEST + name: BEST + place for name, place in places.items() if BEST + place in resumed.tensors}
    values = _values(session, resumed.checkpoint, [*places.values(), *best.values()], resumed.tensors)
    for variable, value in zip(variables.values(), values, strict=False):
        variable.assign(value)
    return dict(zip(best, values[len(places) :], strict=True))


def restore_weights(
    session: Session,
    checkpoint: Checkpoint | None,
    variables: Mapping[str, Any],
    averages: Mapping[str, Any],
    path: str,
) -> None:
    """Write the model's variables of a checkpoint, and nothing else of it. Every process calls it alike.

    Args:
        checkpoint: on the chief.
        variables: of the model, by their names in a checkpoint.
        averages: of the weights, likewise; left alone where the checkpoint has none.

    Raises:
        UsageError: the variables are not those of the checkpoint.
    """
    told = None if checkpoint is None else _told(checkpoint)
    _, state, tensors = _heard(session.channel.exchange("the checkpoint's variables", told)[0])
    wanted = dict(variables)
    if any(name.startswith(AVERAGES) for name in tensors):
        wanted |= averages
    groups = tuple({f"{name.split('/')[0]}/" for name in wanted})
    own = {name: info for name, info in tensors.items() if name.startswith(groups)}
    names = [name for name in state.get(_NAMES, own) if name.startswith(groups)]
    places = matched(infos(wanted), own, names, path)
    values = _values(session, checkpoint, list(places.values()), tensors)
    for variable, value in zip(wanted.values(), values, strict=True):
        variable.assign(value)


def copy_from_chief(session: Session, variables: Mapping[str, Any]) -> None:
    """Give all processes the chief's values of some variables."""
    if session.channel.size == 1:
        return
    held = [v.numpy() for v in variables.values()]
    like = [(value.shape, value.dtype) for value in held]
    values = from_chief(session.strategy, held if session.is_chief else None, like)
    for variable, value in zip(variables.values(), values, strict=True):
        variable.assign(value)


def _told(checkpoint: Checkpoint) -> list[Any]:
    manifest = checkpoint.manifest
    shapes = {name: [list(info.shape), info.dtype] for name, info in manifest.tensors.items()}
    return [manifest.step, manifest.state, shapes]


def _heard(told: list[Any]) -> tuple[int, dict[str, Any], dict[str, TensorInfo]]:
    step, state, shapes = told
    return step, state, {name: TensorInfo(tuple(shape), dtype) for name, (shape, dtype) in shapes.items()}


def matched(
    want: Mapping[str, TensorInfo], have: Mapping[str, TensorInfo], names: list[str] | None, path: str
) -> dict[str, str]:
    """For each variable the name of its value in a checkpoint.

    Keras numbers unnamed layers through all models of a process, so names may differ where the order tells.

    Args:
        names: those of the checkpoint in the order in which they were saved.

    Raises:
        UsageError: they do not fit together.
    """
    ordered = names if names is not None and set(names) == set(have) else list(have)
    places = {name: name for name in want}
    if set(want) != set(have):
        there = dict(zip(_unnumbered(ordered), ordered, strict=True))
        places = {name: there.get(key, name) for name, key in zip(want, _unnumbered(want), strict=True)}
    problems = compare({places[name]: info for name, info in want.items()}, have)
    if problems:
        raise UsageError(
            f"the checkpoint {path} does not fit the model:\n  "
            + "\n  ".join(problems)
            + "\nUse the model that it was "
            "made with, or another checkpoint_dir."
        )
    return places


def _unnumbered(names: Iterable[str]) -> list[tuple[str, int]]:
    """Names without Keras's numbers, each with how many such came before it."""
    plain = [unnumbered(name) for name in names]
    return [(name, plain[:i].count(name)) for i, name in enumerate(plain)]


def _values(
    session: Session, checkpoint: Checkpoint | None, names: list[str], tensors: Mapping[str, TensorInfo]
) -> list[np.ndarray]:
    """The chief's values of some tensors, on every process."""

    def read() -> list[np.ndarray] | None:
        if checkpoint is None:
            return None
        held = checkpoint.tensors()
        return [held[name] for name in names]

    values = together(session.channel, "reading the checkpoint", read)
    if session.channel.size == 1:
        assert values is not None
        return values
    return from_chief(
        session.strategy, values, [(tensors[name].shape, numpy_dtype(tensors[name].dtype)) for name in names]
    )


def _dtype(variable: Any) -> str:
    dtype = variable.dtype
    return dtype if isinstance(dtype, str) else str(dtype.name)


def numpy_dtype(name: str) -> Any:
    """The NumPy dtype of a TensorFlow dtype's name, bfloat16 among them."""
    import tensorflow as tf

    return tf.as_dtype(name).as_numpy_dtype
