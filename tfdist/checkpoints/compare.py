"""What is different between the variables of two sides. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdist.checkpoints.manifest import TensorInfo

__all__ = ["Difference", "compare", "state_differences", "tensor_differences"]

_MOST_LINES = 10


def compare(want: Mapping[str, TensorInfo], have: Mapping[str, TensorInfo]) -> list[str]:
    """Why the variables of a checkpoint (`have`) do not fit those of a model (`want`), one line each; nothing: they do.

    The first ten lines, and how many more there are.
    """
    missing = [name for name in want if name not in have]
    extra = [name for name in have if name not in want]
    lines = []
    for name in missing:
        # Layers that are numbered on by another model have other names and the same shapes.
        alike = [other for other in extra if have[other] == want[name]]
        twins = [other for other in missing if want[other] == want[name]]
        hint = f" (renamed from {alike[0]}?)" if len(alike) == len(twins) == 1 else ""
        lines.append(f"missing in the checkpoint: {name} {_say(want[name])}{hint}")
    lines += [f"extra: {name} {_say(have[name])}" for name in extra]
    for name in want:
        if name in have and have[name].shape != want[name].shape:
            lines.append(f"shape: {name} is {have[name].shape} in the checkpoint and {want[name].shape} in the model")
        elif name in have and have[name].dtype != want[name].dtype:
            lines.append(f"type: {name} is {have[name].dtype} in the checkpoint and {want[name].dtype} in the model")
    more = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], f"and {more} more"] if more > 0 else lines


@dataclasses.dataclass(frozen=True)
class Difference:
    """A variable that is not the same in A and B."""

    name: str
    what: str
    largest: float | None = None
    """Largest absolute difference; None where it cannot be taken, NaN where a NaN faces a number."""


def tensor_differences(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> list[Difference]:
    """The variables whose bits are not equal, by name."""
    found = []
    for name in sorted({*a, *b}):
        if name not in b:
            found.append(Difference(name, f"only in A: {_say(TensorInfo.of(a[name]))}"))
        elif name not in a:
            found.append(Difference(name, f"only in B: {_say(TensorInfo.of(b[name]))}"))
        elif TensorInfo.of(a[name]) != TensorInfo.of(b[name]):
            found.append(Difference(name, f"{_say(TensorInfo.of(a[name]))} in A, {_say(TensorInfo.of(b[name]))} in B"))
        elif a[name].tobytes() != b[name].tobytes():
            largest = _largest(a[name], b[name])
            what = "other bits of equal values" if largest == 0 else "other values"
            found.append(Difference(name, what, largest))
    return found


def state_differences(a: Any, b: Any, where: str = "state") -> dict[str, tuple[Any, Any]]:
    """Where two states differ: the two values by their path; None stands for what is not there."""
    if isinstance(a, dict) and isinstance(b, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in sorted({*a, *b}):
            found |= state_differences(a.get(key), b.get(key), f"{where}.{key}")
        return found
    return {} if repr(a) == repr(b) else {where: (a, b)}  # repr, since NaN is not equal to itself


def _largest(a: np.ndarray, b: np.ndarray) -> float:
    if a.dtype.kind in "biu":
        # Whole numbers are subtracted as Python's, which do not overflow.
        return float(np.abs(a[a != b].astype(object) - b[a != b].astype(object)).max())
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    first, second = a.astype(wide), b.astype(wide)
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    with np.errstate(invalid="ignore"):
        return float(np.max(np.where(same, 0.0, np.abs(first - second)), initial=0.0))


def _say(info: TensorInfo) -> str:
    return f"{info.shape} {info.dtype}"
