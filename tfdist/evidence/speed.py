"""From timed runs to the speed that `tfdist compare` reports: intervals, efficiency, the parts of a step, scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.evidence import scaling as model
from tfdist.evidence.arms import Arm, Ran
from tfdist.evidence.scaling import Point
from tfdist.evidence.statistics import Interval, interval, ratio

__all__ = ["Timed", "noise", "numbers", "scaling", "time_to_quality"]


@dataclasses.dataclass
class Timed:
    """A round: each arm's report `as it is` and `alone` (without communication); the first one's `again`."""

    runs: dict[tuple[Arm, str], dict[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def first(self) -> Arm | None:
        """The arm that others are compared with: the one that ran twice."""
        return next((arm for arm, kind in self.runs if kind == "again"), None)


def _steps(report: Mapping[str, Any]) -> np.ndarray:
    """Seconds of each step but the first, which warms up."""
    return np.maximum(np.array(report["step_seconds"][1:]), 1e-9)


def _groups(timed: Sequence[Timed], *keys: tuple[Arm, str]) -> list[list[np.ndarray]]:
    """For each key its rounds, of those in which all of them ran."""
    whole = [round_.runs for round_ in timed if all(key in round_.runs for key in keys)]
    return [[_steps(runs[key]) for runs in whole] for key in keys]


def noise(timed: Sequence[Timed]) -> dict[str, float] | None:
    """Between what the ratio of an arm to itself lies: no smaller difference means anything."""
    first = next((round_.first for round_ in timed if round_.first is not None), None)
    if first is None:
        return None
    own, again = _groups(timed, (first, "as it is"), (first, "again"))
    if not own:
        return None
    found = ratio(own, again)
    width = max(found.high, 1 / found.low)
    return {"low": 1 / width, "high": width}


def numbers(timed: Sequence[Timed], arm: Arm) -> dict[str, Any]:
    """What an arm's timed runs tell; nothing where there are none."""
    (own,) = _groups(timed, (arm, "as it is"))
    if not own:
        names = ("step_ms", "examples_per_second", "ratio", "efficiency", "split_ms", "memory_mb", "startup_seconds")
        return dict.fromkeys(names)
    reports = [round_.runs[arm, "as it is"] for round_ in timed if (arm, "as it is") in round_.runs]
    seconds = interval(own)
    rows = reports[0]["global_batch_size"] * reports[0]["accumulate"]
    first = next((round_.first for round_ in timed if round_.first is not None), None)
    reference = [] if first is None else _groups(timed, (first, "as it is"), (arm, "as it is"))
    alone = _groups(timed, (arm, "alone"), (arm, "as it is"))
    ranks = [rank for report in reports for rank in report["ranks"]]
    starts = [rank["startup_seconds"] for rank in ranks if rank["startup_seconds"] is not None]
    return {
        "step_ms": _told(seconds, 1e3),
        "examples_per_second": _told(Interval(1 / seconds.median, 1 / seconds.high, 1 / seconds.low), rows),
        "ratio": _told(ratio(reference[0], reference[1])) if reference and reference[0] else None,
        # Never above 1 but by noise.
        "efficiency": _told(ratio(alone[0], alone[1])) if alone[0] else None,
        "split_ms": _split(reports),
        "memory_mb": max((rank["peak_memory_mb"] for rank in ranks), default=None),
        "startup_seconds": float(np.median(starts)) if starts else None,
    }


def _told(found: Interval, factor: float = 1.0) -> dict[str, float]:
    return {name: value * factor for name, value in dataclasses.asdict(found).items()}


def _split(reports: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Milliseconds of a step, mean over steps and ranks: what is not input, computing or communication is own."""
    parts = {"input": "input_seconds", "compute": "compute_seconds", "communication": "collective_seconds"}
    if not reports[0]["ranks"]:
        return None
    told = []
    for report in reports:
        steps, ranks = _steps(report), report["ranks"]
        split = {part: float(np.mean([rank[name] for rank in ranks])) / len(steps) for part, name in parts.items()}
        told.append({**split, "own": max(0.0, float(steps.mean()) - sum(split.values()))})
    return {name: 1e3 * float(np.median([split[name] for split in told])) for name in told[0]}


def scaling(
    timed: Sequence[Timed],
    measured: Mapping[Arm, dict[str, Any] | None],
    ran: Mapping[Arm, Ran],
    networks: Sequence[str],
) -> dict[str, Any] | None:
    """Efficiency with more replicas, predicted from a step without communication and from measured all-reduces.

    Of backends that span processes; one process has no network.
    """
    points: dict[str, list[Point]] = {}
    for arm, found in measured.items():
        for point in (found or {}).get("points", []):
            points.setdefault(arm.backend, []).append(Point(arm.replicas, point["bytes"], point["seconds"]))
    # Without communication, where there is such a run: then a replica does its share of the batch.
    steps = [group for kind in ("alone", "as it is") for arm in ran for group in _groups(timed, (arm, kind)) if group]
    sizes = [_message_bytes(run) for run in ran.values() if run.trace is not None]
    if not points or not steps or not sizes:
        return None
    return model.scaling(interval(steps[0]).median, sizes[0], points, networks)


def _message_bytes(run: Ran) -> int:
    """What a replica sends in a step: its gradients in float32."""
    assert run.trace is not None
    return sum(4 * int(run.trace[f"value/{name}"].size) for name in run.trace["trained"].tolist())


def time_to_quality(result: dict[str, Any], timed: Sequence[Timed]) -> None:
    """Add how long asynchronous arms and the reference take until the loss is what the reference ends with."""
    for arm in result["arms"]:
        arm["seconds_to_quality"] = None
    first = next((round_.first for round_ in timed if round_.first is not None), None)
    if first is None or not any(arm["asynchronous"] for arm in result["arms"]):
        return
    ends = [_smooth(round_.runs[first, "as it is"])[-1] for round_ in timed if (first, "as it is") in round_.runs]
    for arm in result["arms"]:
        if not arm["asynchronous"] and arm["name"] != first.name:
            continue
        key = Arm(arm["backend"], arm["replicas"]), "as it is"
        reports = [round_.runs[key] for round_ in timed if key in round_.runs]
        times = [_seconds_until(report, float(np.median(ends))) for report in reports]
        reached = [seconds for seconds in times if seconds is not None]
        arm["seconds_to_quality"] = float(np.median(reached)) if len(reached) > len(times) / 2 else None


def _smooth(report: Mapping[str, Any]) -> np.ndarray:
    """The mean loss of the last ten steps, at each step."""
    losses = np.array([np.nan if loss is None else loss for loss in report["losses"]])
    sums = np.cumsum(losses)
    before = np.concatenate([np.zeros(min(10, len(sums))), sums[:-10]])
    return np.asarray((sums - before) / np.minimum(np.arange(len(sums)) + 1, 10))


def _seconds_until(report: Mapping[str, Any], loss: float) -> float | None:
    reached = np.flatnonzero(_smooth(report) <= loss)
    return float(np.sum(report["step_seconds"][: reached[0] + 1])) if len(reached) else None
