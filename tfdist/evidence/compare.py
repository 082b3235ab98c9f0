"""`tfdist compare`: the same task on several backends. Do the numbers agree, which is faster, and why."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tfdist.commands import CompareCommand, TrainCommand
from tfdist.config import Settings
from tfdist.errors import EnvironmentProblem, UsageError
from tfdist.evidence import against, compare_table, speed
from tfdist.evidence.arms import Arm, Ran, Runner
from tfdist.evidence.page import write_page
from tfdist.evidence.pairs import judge, worst
from tfdist.evidence.pictures import require_matplotlib, write_pngs
from tfdist.evidence.runs import missing
from tfdist.evidence.scaling import parse_network
from tfdist.evidence.screen import RunBar, open_console, say
from tfdist.evidence.speed import Timed
from tfdist.strategies.table import BACKENDS
from tfdist.training.report import check_writable, versions, without_nan

__all__ = ["compare", "plan"]

_LEAST_TIMED_STEPS = 100


def compare(command: CompareCommand, train: TrainCommand, words: Sequence[str], line: str) -> bool:
    """Run, judge, print a table and write the files; True unless numbers differ, or got worse than those before.

    Args:
        train: what all runs have in common.
        words: the same as flags of `tfdist train`, without backend, replicas and steps.
        line: the whole command, for the report.

    Raises:
        UsageError, EnvironmentProblem: the runs cannot be compared, or a backend does not work here.
    """
    before = None if command.against is None else against.read(command.against)
    if before is not None:
        known = {name: getattr(train, name) for name in ("task", "steps", "seed", "reproducible")}
        against.require_alike(command.against, before, known | {"task_args": list(train.task_args)})
    for network in command.network:
        parse_network(network)
    if command.html is not None or command.png is not None:
        require_matplotlib()
    if command.png is not None:
        check_writable(command.png / "losses.png" if command.png.is_dir() else command.png, "png")
    console = open_console()
    arms = plan(command.chosen_backends or _working(console), command.counts)
    _require_working(arms)
    _require_settings(arms, train)
    folder = Path(tempfile.mkdtemp(prefix="tfdist-compare-"))
    keep = True
    try:
        runner = Runner(folder, words, _settings(train), command.timeout)
        with RunBar(console) as bar:
            result, problems = _run(command, train, runner, arms, bar)
        keep = bool(problems)
    finally:
        if not keep:
            shutil.rmtree(folder)
        else:
            say(console, f"all that these runs have written is kept in {folder}")
    result |= {"created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "command": line}
    if before is not None:
        result["against"] = against.judge(command.against, before, result)
    result = without_nan(result)
    compare_table.show(console, result, problems)
    _write(command, result)
    worse = result["against"] is not None and against.is_worse(result["against"])
    return result["verdict"] != "different" and not problems and not worse


def plan(backends: Sequence[str], counts: Sequence[int]) -> list[Arm]:
    """The runs to compare: each backend at each number of replicas; one_device, which has one, comes first.

    Asynchronous backends come last: no run can be compared with theirs number by number.
    """
    backends = sorted(backends, key=lambda name: BACKENDS[name].asynchronous)
    alone = [Arm(name, 1) for name in backends if not BACKENDS[name].processes and not BACKENDS[name].devices]
    others = [name for name in backends if BACKENDS[name].processes or BACKENDS[name].devices]
    return list(dict.fromkeys([*alone, *(Arm(name, count) for count in counts for name in others)]))


def _run(
    command: CompareCommand, train: TrainCommand, runner: Runner, arms: Sequence[Arm], bar: RunBar
) -> tuple[dict[str, Any], list[str]]:
    timed_arms = 2 * len(arms) + 1
    spanning = [arm for arm in arms if BACKENDS[arm.backend].processes and not arm.asynchronous and arm.replicas > 1]
    collectives = spanning if command.rounds else []
    bar.total(len(arms) + 1 + command.rounds * timed_arms + len(collectives))
    assert train.steps is not None
    ran: dict[Arm, Ran] = {}
    for arm in arms:
        bar.begin(f"the numbers of {arm.name}")
        ran[arm] = runner.train(arm, trace=True, steps=train.steps)
    problems = [f"{arm.name} {run.problem}" for arm, run in ran.items() if run.problem]
    _require_equal_batches(list(ran.values()))
    pairs = judge(runner, ran, train, bar)
    steps = max(train.steps, _LEAST_TIMED_STEPS)
    timed = _time(command, runner, [arm for arm in arms if not ran[arm].problem], steps, bar, problems)
    measured = {}
    for arm in collectives:
        bar.begin(f"all-reduces of {arm.name}")
        measured[arm] = runner.measure_collectives(arm)
    first = next((run.report for run in ran.values() if run.report is not None), None)
    if first is None:
        raise EnvironmentProblem(f"no run came to its end: {problems[0]}")
    result: dict[str, Any] = {
        "schema": 1,
        "verdict": worst([pair["verdict"] for pair in pairs]),
        "problems": problems,
        "task": train.task,
        "task_args": list(train.task_args),
        "steps": train.steps,
        "global_batch_size": first["global_batch_size"],
        "accumulate": first["accumulate"],
        "seed": first["seed"],
        "reproducible": train.reproducible,
        "machine": {"host": socket.gethostname(), "cores": len(os.sched_getaffinity(0)), "gpus": _gpus()},
        "versions": versions(),
        "rounds": command.rounds,
        "timed_steps": steps if command.rounds else None,
        "reference": arms[0].name,
        "noise": speed.noise(timed),
        "arms": [_told(runner, ran[arm], speed.numbers(timed, arm)) for arm in arms],
        "pairs": pairs,
        "scaling": speed.scaling(timed, measured, ran, command.network),
        "against": None,
    }
    speed.time_to_quality(result, timed)
    return result, problems


def _time(
    command: CompareCommand, runner: Runner, arms: Sequence[Arm], steps: int, bar: RunBar, problems: list[str]
) -> list[Timed]:
    """Rounds in which each arm runs once as it is and once without communication, in an order that is drawn."""
    drawn = random.Random(command.seed)
    found = []
    for number in range(command.rounds):
        round_ = Timed()
        kinds = [(arm, kind) for arm in arms for kind in ("as it is", "alone")] + [(arm, "again") for arm in arms[:1]]
        drawn.shuffle(kinds)
        for arm, kind in kinds:
            if kind == "alone" and (arm.replicas == 1 or arm.asynchronous):
                bar.begin("")
                continue
            extra = " without communication" if kind == "alone" else ""
            bar.begin(f"round {number + 1} of {command.rounds}: {arm.name}{extra}")
            ran = (
                runner.variant(arm, steps=steps, alone=True)
                if kind == "alone"
                else runner.train(arm, trace=False, steps=steps)
            )
            if ran.report is None:
                problems.append(f"{arm.name}{extra} {ran.problem}")
            else:
                round_.runs[arm, kind] = ran.report
        found.append(round_)
    return found


def _told(runner: Runner, ran: Ran, numbers: dict[str, Any]) -> dict[str, Any]:
    report = ran.report or {}
    return {
        "name": ran.arm.name,
        "backend": ran.arm.backend,
        "replicas": ran.arm.replicas,
        "command": runner.shown(ran.arm),
        "asynchronous": ran.arm.asynchronous,
        "state_sha256": report.get("state_sha256"),
        "weights_sha256": report.get("weights_sha256"),
        "metrics": report.get("metrics", {}),
        "losses": report.get("losses", []),
        **numbers,
    }


def _settings(train: TrainCommand) -> dict[str, Any]:
    """What was given to `tfdist train`, as keyword arguments."""
    given = {
        f.name: getattr(train, f.name) for f in dataclasses.fields(Settings) if getattr(train, f.name) != f.default
    }
    return {"task": train.task, "task_args": list(train.task_args), **given}


def _require_equal_batches(ran: Sequence[Ran]) -> None:
    sizes = {run.arm.name: run.report["global_batch_size"] * run.report["accumulate"] for run in ran if run.report}
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{size} on {name}" for name, size in sizes.items())
        raise UsageError(
            f"the global batch size differs: {told}. Runs compare only with equal global batches: set "
            "--global-batch-size, or make the task's independent of the number of replicas."
        )


def _working(console: Console) -> tuple[str, ...]:
    names = [name for name, kind in BACKENDS.items() if not kind.asynchronous and not kind.one_copy]
    for name in names:
        if missing(name):
            say(console, f"{name} is left out: {missing(name)}")
    return tuple(name for name in names if not missing(name))


def _require_working(arms: Sequence[Arm]) -> None:
    for name in dict.fromkeys(arm.backend for arm in arms):
        reason = missing(name)
        if reason:
            raise EnvironmentProblem(f"backend={name!r} cannot be compared: {reason}. Run: make setup")
    if len(arms) < 2:
        raise UsageError(f"only {arms[0].name} is left to compare. Name two backends, or two numbers of replicas.")


def _require_settings(arms: Sequence[Arm], train: TrainCommand) -> None:
    """Raises UsageError where an arm does not go with what all have in common."""
    common = {name: value for name, value in _settings(train).items() if name not in ("task", "task_args")}
    for arm in arms:
        Settings.of(**{**common, **arm.settings}, trace=None if arm.asynchronous else "trace.npz")


def _gpus() -> int:
    """NVIDIA's devices on this machine; TensorFlow, which would tell, is not there in this process."""
    return sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))


def _write(command: CompareCommand, result: dict[str, Any]) -> None:
    if command.json is not None:
        command.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    if command.html is not None:
        write_page(result, command.html)
    if command.png is not None:
        write_pngs(result, command.png)
