"""`tfdist chaos`: jobs that are killed at random moments must end with the same bits as one that is left alone."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tfdist.commands import ChaosCommand
from tfdist.errors import EnvironmentProblem
from tfdist.evidence.campaign import Campaign
from tfdist.evidence.faults import KINDS, Injected
from tfdist.evidence.runs import missing
from tfdist.evidence.screen import open_console, open_progress, say
from tfdist.training.report import versions

__all__ = ["chaos", "quantiles"]


def chaos(command: ChaosCommand) -> bool:
    """Run jobs under faults, print a table, write the JSON file; True where no run was lost.

    Raises:
        EnvironmentProblem: the backend does not work here, or the job fails without faults.
    """
    reason = missing(command.backend) if command.backend == "horovod" else None
    if reason:
        raise EnvironmentProblem(f"backend={command.backend!r} cannot be run: {reason}. Run: make setup")
    console = open_console()
    folder = Path(tempfile.mkdtemp(prefix="tfdist-chaos-"))
    began = time.monotonic()
    campaign = Campaign(command, folder)
    keep = True
    try:
        _run(campaign, command.kills, console)
        keep = bool(campaign.problems)
    finally:
        if not keep:
            shutil.rmtree(folder)
        else:
            say(console, f"all that these jobs have written is kept in {folder}")
    seconds = time.monotonic() - began
    console.print(_table(campaign.injected))
    for line in campaign.problems:
        say(console, f"LOST {line}")
    lost = sum(bool(outcome.problems) for outcome in campaign.outcomes)
    end = f"{lost} lost" if lost else "none lost, and each ended as the job without faults did"
    say(console, f"{len(campaign.injected)} faults in {len(campaign.outcomes)} jobs ({seconds:.0f} s): {end}")
    if command.json is not None:
        content = {
            "passed": not campaign.problems,
            "problems": campaign.problems,
            "command": {**dataclasses.asdict(command), "json": str(command.json)},
            "seconds": round(seconds, 1),
            "processors": len(os.sched_getaffinity(0)),
            "versions": versions(),
            "reference": campaign.reference,
            "summary": [_summary(kind, phase, faults) for kind, phase, faults in _grouped(campaign.injected)],
            "runs": [dataclasses.asdict(outcome) for outcome in campaign.outcomes],
            "faults": [dataclasses.asdict(fault) for fault in campaign.injected],
        }
        command.json.write_text(json.dumps(content, indent=1) + "\n")
    return not campaign.problems


def _run(campaign: Campaign, count: int, console: Console) -> None:
    with open_progress(console) as bar:
        shown = bar.add_task("the job without faults", total=count)
        if not console.is_terminal:
            say(console, "the job without faults")
        campaign.run_reference()

        def began(number: int) -> None:
            bar.update(shown, description=f"job {number}")

        def tell(fault: Injected) -> None:
            bar.advance(shown)
            say(console, f"job {fault.run}: {_words(fault)}")

        campaign.run_faults(began, tell)


def quantiles(values: Iterable[float | None]) -> dict[str, float] | None:
    """p50, p95 and the largest of those values that there are; each is one of them."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    return {name: known[min(len(known) - 1, int(q * len(known)))] for name, q in (("p50", 0.5), ("p95", 0.95))} | {
        "max": known[-1]
    }


def _grouped(faults: Sequence[Injected]) -> list[tuple[str, str, list[Injected]]]:
    """By kind, over all phases and in each."""
    groups: dict[tuple[str, str], list[Injected]] = collections.defaultdict(list)
    for fault in faults:
        groups[fault.kind, "all"].append(fault)
        groups[fault.kind, fault.phase].append(fault)
    phases = ["all", "start-up", "first steps", "during a save", "between saves", "ending"]
    order = sorted(groups, key=lambda key: (list(KINDS).index(key[0]), phases.index(key[1])))
    return [(*key, groups[key]) for key in order]


def _summary(kind: str, phase: str, faults: Sequence[Injected]) -> dict[str, Any]:
    return {
        "kind": kind,
        "phase": phase,
        "faults": len(faults),
        "of_the_chief": sum(fault.rank == 0 for fault in faults),
        "ended_after": quantiles(fault.ended_after for fault in faults),
        "training_after": quantiles(fault.training_after for fault in faults),
        "steps_lost": quantiles(fault.steps_lost for fault in faults if fault.step_told),
        "steps_told": sum(fault.step_told for fault in faults),
    }


def _table(faults: Sequence[Injected]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("fault", overflow="fold")
    table.add_column("when")
    table.add_column("count", justify="right")
    for name in ("all ended after (s)", "training again after (s)", "steps lost"):
        table.add_column(f"{name}\np50 / p95 / max", justify="right")
    for kind, phase, group in _grouped(faults):
        row = _summary(kind, phase, group)
        cells = (_cell(row["ended_after"]), _cell(row["training_after"]), _cell(row["steps_lost"]))
        table.add_row(KINDS[kind].says if phase == "all" else "", phase, str(len(group)), *cells)
    return table


def _cell(values: dict[str, float] | None) -> str:
    return "–" if values is None else " / ".join(f"{value:.3g}" for value in values.values())


def _words(fault: Injected) -> str:
    whom = f" of rank {fault.rank}" if fault.rank is not None else ""
    about = "" if fault.step_told or fault.phase == "start-up" else "at least "
    parts = [f"{fault.kind}{whom}, {fault.phase}, step {about}{fault.step}"]
    if fault.ended_after is not None:
        parts.append(f"all ended after {fault.ended_after:.2f} s")
    if fault.training_after is not None:
        parts.append(f"training again after {fault.training_after:.1f} s")
    if fault.resumed_from is not None:
        parts.append(f"from step {fault.resumed_from}")
    return "; ".join(parts)
