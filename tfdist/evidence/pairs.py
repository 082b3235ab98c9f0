"""Which runs of `tfdist compare` are compared with which, and the verdict on each pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist.commands import TrainCommand
from tfdist.evidence.agreement import Bound, agree, gamma
from tfdist.evidence.arms import Arm, Ran, Runner
from tfdist.evidence.screen import RunBar

__all__ = ["judge", "pairs_of", "worst"]

_ORDER = ("same bits", "not comparable", "rounding", "different")


def pairs_of(arms: Sequence[Arm]) -> list[tuple[Arm, Arm]]:
    """Which runs to compare: the first of each number of replicas with the first of all, the others with it."""
    found = []
    for arm in arms:
        leader = next(other for other in arms if other.replicas == arm.replicas)
        if arm != arms[0]:
            found.append((arms[0] if arm == leader else leader, arm))
    return found


def worst(verdicts: Sequence[str]) -> str:
    """The verdict on all pairs."""
    return max(verdicts, key=_ORDER.index, default="same bits")


def judge(runner: Runner, ran: dict[Arm, Ran], train: TrainCommand, bar: RunBar) -> list[dict[str, Any]]:
    """The pairs of the report."""
    arms = list(ran)
    bound: Bound | None = None
    found = []
    shadow_done = False
    for a, b in pairs_of(arms):
        pair = _pair(ran[a], ran[b], None, train)
        traced = ran[a].trace is not None and ran[b].trace is not None
        if pair["verdict"] == "different" and traced and not shadow_done:
            shadow_done = True
            reference = ran[arms[0]]
            if reference.trace is not None:
                bar.begin(f"what rounding does to {arms[0].name}")
                perturb = gamma(int(reference.trace["addends"]))
                assert train.steps is not None
                shadow = runner.variant(arms[0], steps=train.steps, perturb=perturb)
                bound = None if shadow.trace is None else Bound.of(reference.trace, shadow.trace)
        if pair["verdict"] == "different" and bound is not None:
            pair = _pair(ran[a], ran[b], bound, train)
        found.append(pair)
    if not shadow_done:
        bar.begin("")
    return found


def _pair(a: Ran, b: Ran, bound: Bound | None, train: TrainCommand) -> dict[str, Any]:
    names = {"a": a.arm.name, "b": b.arm.name}
    nothing: dict[str, Any] = {"loss_difference": [], "bound": None, "variables": [], "first": None, "stage": None}
    if a.arm.asynchronous or b.arm.asynchronous:
        note = "asynchronous: no two runs take the same steps, so what counts is how well they end, and how soon"
        return {**names, **nothing, "verdict": "not comparable", "note": note}
    if a.trace is None or b.trace is None:
        failed = next(run for run in (a, b) if run.trace is None)
        note = f"{failed.arm.name} {failed.problem}"
        return {**names, **nothing, "verdict": "different", "note": note}
    told = agree(a.trace, b.trace, bound)
    note = "; ".join(f"{run.arm.name} {run.problem}" for run in (a, b) if run.problem)
    if told["verdict"] == "different" and a.arm.replicas != b.arm.replicas and not train.reproducible:
        reason = _depends_on_replicas(a.trace["variables"].tolist())
        if reason:
            told |= {"verdict": "not comparable", "stage": None}
            note = f"{reason}; with --reproducible they agree bit for bit"
    return {**names, **told, "note": note}


def _depends_on_replicas(variables: Sequence[str]) -> str:
    """Why training is another one with another number of replicas, if it is."""
    if any(name.endswith("seed_generator_state") for name in variables):
        return "random layers draw other numbers on each replica"
    if any(name.endswith(("moving_mean", "moving_variance")) for name in variables):
        return "BatchNormalization takes the statistics of each replica's rows"
    return ""
