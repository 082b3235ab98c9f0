"""`tfdist check`: the right values on the backends of this machine, as a table of values, right values and verdicts."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from tfdist.commands import CheckCommand
from tfdist.errors import EnvironmentProblem, UsageError, closest
from tfdist.evidence.cases import CASES
from tfdist.evidence.judge import Verdict, judge, plan
from tfdist.evidence.runs import Job, missing, run
from tfdist.evidence.screen import open_console, open_progress, say
from tfdist.strategies.table import BACKENDS

__all__ = ["check"]

_WIDE = 110
_SHORT = {"multi_worker_mirrored": "multi_worker"}
_SECONDS_TO_START, _SECONDS_PER_RESULT = 120, 30


def check(command: CheckCommand) -> bool:
    """Run the cases, print the table, write the JSON file; True where all passed.

    Raises:
        UsageError: there is no such case.
        EnvironmentProblem: a backend that was asked for cannot be checked here.
    """
    console = open_console()
    names = _chosen(command.cases)
    if command.list:
        for name in names:
            console.print(f"{name}: {CASES[name].says}", highlight=False, markup=False, soft_wrap=True)
        return True
    jobs = plan(_backends(command, console), command.replicas, names)
    folder = Path(tempfile.mkdtemp(prefix="tfdist-check-"))
    results, problems = _run(jobs, folder, console)
    verdicts = judge(results, jobs)
    passed = all(verdict.passed for verdict in verdicts) and not problems
    console.print(_table(verdicts, jobs, console.width))
    for line in (*_failures(verdicts), *problems):
        say(console, line)
    count = sum(verdict.passed for verdict in verdicts)
    console.print(f"{count} of {len(verdicts)} values are right (what they are: tfdist check --list)", highlight=False)
    if passed:
        shutil.rmtree(folder)
    if command.json is not None:
        content = {"passed": passed, "problems": problems, "results": [dataclasses.asdict(v) for v in verdicts]}
        command.json.write_text(json.dumps(content, indent=1) + "\n")
    return passed


def _chosen(beginnings: Sequence[str]) -> list[str]:
    for word in beginnings:
        if not any(name.startswith(word) for name in CASES):
            raise UsageError(f"cases={word!r}: no case begins so.{closest(word, CASES)} There are {', '.join(CASES)}.")
    return [name for name in CASES if not beginnings or name.startswith(tuple(beginnings))]


def _backends(command: CheckCommand, console: Console) -> tuple[str, ...]:
    for name in command.backends:
        reason = missing(name)
        if reason:
            raise EnvironmentProblem(f"backend={name!r} cannot be checked: {reason}. Run: make setup")
    if command.backends:
        return command.backends
    for name in BACKENDS:
        reason = missing(name)
        if reason:
            console.print(f"{name} is left out: {reason}", highlight=False, markup=False)
    return tuple(name for name in BACKENDS if not missing(name))


def _run(
    jobs: Sequence[Job], folder: Path, console: Console
) -> tuple[dict[tuple[str, int], list[dict[str, Any]]], list[str]]:
    results: dict[tuple[str, int], list[dict[str, Any]]] = {}
    problems = []
    with open_progress(console) as bar:
        task = bar.add_task("", total=sum(job.results for job in jobs))
        done = 0
        for job in jobs:
            name = f"{job.backend} · {', '.join(map(str, job.replicas))} replica(s)"
            bar.update(task, description=name)
            if not console.is_terminal:
                console.print(f"running {len(job.cases)} cases on {name}", highlight=False)
            seconds = _SECONDS_TO_START + _SECONDS_PER_RESULT * job.results
            show = functools.partial(_advance, bar, task, done)
            values, problem = run(job, folder, timeout=seconds, progress=show)
            done += job.results
            results |= {(job.backend, count): processes for count, processes in values.items()}
            if problem:
                problems.append(f"{name}: {problem}")
    return results, problems


def _advance(bar: Progress, task: TaskID, before: int, done: int) -> None:
    bar.update(task, completed=before + done)


def _table(verdicts: Sequence[Verdict], jobs: Sequence[Job], width: int) -> Table:
    """One row for each case, one column for each backend and number of replicas; with values where there is room."""
    columns = [(job.backend, count) for job in jobs for count in job.replicas]
    wide = width >= _WIDE
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("case", no_wrap=True)
    for backend, count in columns:
        table.add_column(f"{backend} {count}" if wide else f"{_SHORT.get(backend, backend)} {count}", overflow="fold")
    if wide:
        table.add_column("right value", overflow="fold")
    by_place = {(v.case, v.backend, v.replicas): v for v in verdicts}
    for name in dict.fromkeys(v.case for v in verdicts):
        row = [by_place.get((name, backend, count)) for backend, count in columns]
        rights = {_numbers(v.right): None for v in row if v is not None}
        cells = [_cell(verdict, wide) for verdict in row]
        table.add_row(name, *cells, *([" | ".join(rights)] if wide else []))
    return table


def _cell(verdict: Verdict | None, wide: bool) -> Text:
    """Pass or fail, and the value where there is room."""
    if verdict is None:
        return Text("–", style="dim")
    value = "" if not wide else " error" if verdict.error else f" {_numbers(verdict.value)}"
    return Text(f"pass{value}") if verdict.passed else Text(f"FAIL{value}", style="bold red")


def _failures(verdicts: Sequence[Verdict]) -> list[str]:
    lines = []
    for verdict in verdicts:
        if not verdict.passed and verdict.error != "no result":
            where = f"{verdict.case} on {verdict.backend} with {verdict.replicas} replica(s)"
            got = verdict.error or f"got {_numbers(verdict.value)}, right is {_numbers(verdict.right)}"
            lines.append(f"FAIL {where}: {CASES[verdict.case].says}: {got}")
    return lines


def _numbers(value: Any) -> str:
    if not isinstance(value, list):
        return "–"
    texts = [item if isinstance(item, str) else f"{item:.6g}" for item in value]
    return " ".join(texts if len(texts) <= 4 else [*texts[:3], "…"])
