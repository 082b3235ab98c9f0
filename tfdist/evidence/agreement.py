"""Whether two runs agree, from what their steps have seen (`training/trace.py`), and where they part. Pure.

The verdict is `same bits`, `rounding` or `different`. What rounding may do is not guessed. A sum of n addends in
float32 comes out with a relative error of at most

    γ̃ₙ = exp(λ√n·u + n·u²/(1−u)) − 1,    u = 2⁻²⁴,

except with probability 2n·exp(−λ²(1−u)²/2), which λ makes one in a million (N. Higham and T. Mary: A New Approach to
Probabilistic Rounding Error Analysis, SIAM Journal on Scientific Computing 41(5), 2019). n is that of the longest sum
of a step, over examples and places. What training then makes of an error of that size depends on the model; so the run
is repeated with each weight changed by γ̃ₙ of itself (the shadow), and its distance Dₜ from the run as it was is taken.
Errors come anew in each step, and each grows no more than one that was there from the start: after t steps two runs may
be D₁ + … + Dₜ apart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["Bound", "Stage", "agree", "gamma", "variable_differences"]

Trace = Mapping[str, np.ndarray]

_UNIT = 2.0**-24
_STAGES = {"local": "local gradients", "reduced": "reduced gradients", "after": "update"}


def gamma(addends: int, risk: float = 1e-6) -> float:
    """The relative error of a sum of so many addends in float32, except with this probability."""
    spread = math.sqrt(2 * math.log(2 * addends / risk))
    return math.expm1(spread * math.sqrt(addends) * _UNIT + addends * _UNIT**2 / (1 - _UNIT))


@dataclasses.dataclass(frozen=True)
class Bound:
    """How far rounding may drive two runs apart."""

    relative: float
    """Error of one step's sums."""
    losses: np.ndarray
    """After each step."""
    variables: dict[str, float]
    """Largest difference of an element at the end."""
    growth: dict[str, np.ndarray]
    """By stage: after each step, relative to the sizes of what is summed."""

    @classmethod
    def of(cls, reference: Trace, shadow: Trace) -> Bound:
        """From a run and its shadow."""
        relative = gamma(int(reference["addends"]))
        losses = _so_far(np.abs(reference["losses"] - shadow["losses"])) + 2 * relative * np.abs(reference["losses"])
        steps = len(reference["losses"])
        variables = {
            name: steps * float(np.max(np.abs(_wide(reference, name) - _wide(shadow, name)), initial=0.0))
            for name in reference["variables"].tolist()
        }
        growth = {}
        for stage in _STAGES:
            distance = np.abs(_total(reference, stage, "sums") - _total(shadow, stage, "sums"))
            size = _total(reference, stage, "sizes")
            share = np.divide(distance, size, out=np.zeros_like(distance), where=size > 0)
            growth[stage] = _so_far(share.max(axis=1, initial=0.0)) + 2 * relative
        return cls(relative, losses, variables, growth)


@dataclasses.dataclass(frozen=True)
class Stage:
    """What two runs do differently first."""

    name: str
    """initial weights, batch, local gradients, reduced gradients or update."""
    step: int
    variable: str | None = None
    rank: int | None = None
    """The replica whose part is the other one, where it is one alone."""


def agree(a: Trace, b: Trace, bound: Bound | None) -> dict[str, Any]:
    """The verdict on two runs, and what it rests on; an object of `pairs` without the names.

    Args:
        bound: of rounding; None where only equal bits will do, or as long as it is not known.
    """
    differences = np.abs(a["losses"] - b["losses"]) if a["losses"].shape == b["losses"].shape else None
    variables = variable_differences(a, b)
    first = _first(a, b)
    same = differences is not None and a["losses"].tobytes() == b["losses"].tobytes() and first is None
    same = same and all(v["ulps"] == 0 for v in variables)
    stage = None
    if same:
        verdict = "same bits"
    elif (
        _same_variables(a, b)
        and _of_one_mind(a)
        and _of_one_mind(b)
        and bound is not None
        and differences is not None
        and _within(differences, variables, bound)
    ):
        verdict = "rounding"
    else:
        verdict = "different"
        stage = find_stage(a, b, bound)
    return {
        "verdict": verdict,
        "loss_difference": [] if differences is None else differences.tolist(),
        "bound": None if bound is None else bound.losses.tolist(),
        "variables": variables,
        "first": first,
        "stage": None if stage is None else dataclasses.asdict(stage),
    }


def _of_one_mind(run: Trace) -> bool:
    """Whether its replicas hold the same bits after each step. Rounding does not drive replicas of one run apart."""
    return bool((run["after checksums"] == run["after checksums"][:, :1]).all())


def _same_variables(a: Trace, b: Trace) -> bool:
    return all(a[kind].tolist() == b[kind].tolist() for kind in ("variables", "trained"))


def _within(differences: np.ndarray, variables: list[dict[str, Any]], bound: Bound) -> bool:
    if not (differences <= bound.losses).all():  # a NaN is not
        return False
    return all(v["absolute"] is not None and v["absolute"] <= bound.variables.get(v["name"], 0.0) for v in variables)


def _first(a: Trace, b: Trace) -> dict[str, Any] | None:
    """The first step after which a variable has other bits, on whichever replica; 0 is the start."""
    names = a["variables"].tolist()
    if names != b["variables"].tolist():
        other = next(n for n in [*names, *b["variables"].tolist()] if (n in names) != (n in b["variables"].tolist()))
        return {"step": 0, "variable": other}
    usual = a["initial"][0]
    for row in (*a["initial"], *b["initial"]):
        if (row != usual).any():
            return {"step": 0, "variable": names[int(np.argmax(row != usual))]}
    steps = min(len(a["losses"]), len(b["losses"]))
    mine, theirs = a["after checksums"][:steps], b["after checksums"][:steps]
    off = (mine != mine[:, :1]).any(axis=1) | (theirs != mine[:, :1]).any(axis=1)
    if not off.any():
        return None
    step = int(np.argmax(off.any(axis=1)))
    return {"step": step + 1, "variable": names[int(np.argmax(off[step]))]}


def find_stage(a: Trace, b: Trace, bound: Bound | None) -> Stage | None:
    """What is not the same first, beyond rounding: initial weights, batch, local or reduced gradients, or update."""
    names, trained = a["variables"].tolist(), a["trained"].tolist()
    if not _same_variables(a, b):
        return Stage("initial weights", 0, (_first(a, b) or {}).get("variable"))
    usual, replicas = a["initial"][0], max(int(run["replicas"]) for run in (a, b))
    for run in (a, b):
        off = run["initial"] != usual
        if off.any():
            who = _alone(off.any(axis=1), len(off))
            return Stage("initial weights", 0, names[int(np.argmax(off.any(axis=0)))], who)
    for step in range(min(len(a["losses"]), len(b["losses"]))):
        if a["batch"][step].sum() != b["batch"][step].sum():  # modulo 2^64
            return Stage("batch", step + 1)
        for stage, name in _STAGES.items():
            off = _apart(a, b, stage, step, bound)
            if off.any():
                column = int(np.argmax(off.any(axis=0)))
                variable = (names if stage == "after" else trained)[column]
                return Stage(name, step + 1, variable, _alone(off[:, column], replicas))
    return None


def _apart(a: Trace, b: Trace, stage: str, step: int, bound: Bound | None) -> np.ndarray:
    """For each piece and variable, whether the runs are further apart than rounding drives them."""
    sums, sizes, bits = ([run[f"{stage} {what}"][step] for run in (a, b)] for what in ("sums", "sizes", "checksums"))
    together = stage != "local"  # the same on all replicas, whatever their number
    if together:
        sums, sizes, bits = ([x[0][:1], np.concatenate(x)] for x in (sums, sizes, bits))
    elif sums[0].shape != sums[1].shape:
        sums, sizes = ([x.sum(axis=0, keepdims=True) for x in both] for both in (sums, sizes))
        bits = [np.zeros(1), np.ones(1)]
    equal = bits[0] == bits[1]
    if bound is None:
        return ~np.broadcast_to(equal, np.broadcast_shapes(sums[0].shape, sums[1].shape))
    allowed = bound.growth[stage][step] * np.maximum(*np.broadcast_arrays(*sizes))
    with np.errstate(invalid="ignore"):
        apart = ~(np.abs(sums[0] - sums[1]) <= allowed) & ~equal
    if not together:
        return apart
    # Of both runs' replicas: those of the one that is itself of one mind are not to blame.
    pieces = len(a[f"{stage} sums"][step])
    return apart[pieces:] if apart[pieces:].any() else apart[:pieces]


def _alone(off: np.ndarray, replicas: int) -> int | None:
    """The number of the replica that is off, if it is one of several; each may have several pieces."""
    if len(off) % replicas == 0:
        off = np.any(off.reshape(replicas, -1), axis=1)
    return int(np.argmax(off)) if len(off) > 1 and off.sum() == 1 else None


def variable_differences(a: Trace, b: Trace) -> list[dict[str, Any]]:
    """The largest differences of each variable at the end: absolute, relative, and in units in the last place."""
    found = []
    for name in a["variables"].tolist():
        if name not in b["variables"].tolist():
            continue
        x, y = a[f"value/{name}"], b[f"value/{name}"]
        if x.shape != y.shape or x.dtype != y.dtype:
            found.append({"name": name, "absolute": None, "relative": None, "ulps": None})
            continue
        wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            absolute = np.where(wide_x == wide_y, 0.0, np.abs(wide_x - wide_y))
            size = np.maximum(np.abs(wide_x), np.abs(wide_y))
            relative = np.where(absolute == 0, 0.0, absolute / size)
        both_nan = np.isnan(wide_x) & np.isnan(wide_y)
        absolute, relative = np.where(both_nan, 0.0, absolute), np.where(both_nan, 0.0, relative)
        finite = bool(np.isfinite(absolute).all())
        found.append(
            {
                "name": name,
                "absolute": float(absolute.max(initial=0.0)) if finite else None,
                "relative": float(relative.max(initial=0.0)) if finite else None,
                "ulps": _ulps(x, y) if finite else None,
            }
        )
    return found


def _ulps(x: np.ndarray, y: np.ndarray) -> int:
    """The most numbers of the type that lie between two elements; for whole numbers their difference."""
    kinds = {2: np.int16, 4: np.int32, 8: np.int64}
    if x.dtype.kind != "f":
        return max((abs(int(p) - int(q)) for p, q in zip(x.ravel(), y.ravel(), strict=True)), default=0)
    places = []
    for value in (x, y):
        bits = value.view(kinds[value.dtype.itemsize]).astype(object if value.dtype.itemsize == 8 else np.int64)
        most = 1 << (8 * value.dtype.itemsize - 1)
        places.append(np.where(bits < 0, -most - bits, bits))  # from sign and size to a line of numbers
    return int(np.max(np.abs(places[0] - places[1]), initial=0))


def _so_far(distances: np.ndarray) -> np.ndarray:
    """D₁ + … + Dₜ, where each is taken for the largest until then."""
    return np.cumsum(np.maximum.accumulate(np.nan_to_num(distances, nan=np.inf)))


def _total(trace: Trace, stage: str, what: str) -> np.ndarray:
    """Of all pieces, where each has its own; else of one."""
    values = trace[f"{stage} {what}"]
    return np.asarray(values.sum(axis=1) if stage == "local" else values[:, 0])


def _wide(trace: Trace, name: str) -> np.ndarray:
    return np.asarray(trace[f"value/{name}"], np.float64)
