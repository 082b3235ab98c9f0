"""`tfdist checkpoints`: which there are, whether they are whole, and what differs between two of them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from tfdist.checkpoints.checkpoint import Checkpoint, all_at, find, name_of, read, step_of
from tfdist.checkpoints.compare import Difference, state_differences, tensor_differences
from tfdist.checkpoints.manifest import encoded
from tfdist.errors import CheckpointProblem, UsageError

__all__ = ["differences", "listing"]


def listing(folder: Path, *, verify: bool, json_file: Path | None = None) -> bool:
    """Print a table of the checkpoints in a folder; True where all are whole, by their sizes or by their checksums.

    Raises:
        UsageError: there are none.
    """
    console = _console()
    rows = [row for row in (_row(path, verify) for path in all_at(folder)) if row is not None]
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("step", "epoch", "created (UTC)", "size", "score", "files", "tfdist"):
        table.add_column(name, justify="right" if name in ("step", "epoch", "size", "score") else "left")
    for row in rows:
        size = "" if row["bytes"] is None else decimal(row["bytes"])
        created = (row["created"] or "").replace("T", " ").removesuffix("+00:00")
        files = Text("damaged", "red") if row["problems"] else "whole"
        values = (row["step"], row["epoch"], created, size, row["score"], files, row["tfdist"])
        table.add_row(*(value if isinstance(value, Text) else Text(_short(value)) for value in values))
    console.print(table)
    for row in rows:
        if row["problems"]:
            _say(console, f"{row['path']} is damaged: {'; '.join(row['problems'])}.")
    damaged = [row for row in rows if row["problems"]]
    if damaged:
        _say(
            console, "Going on from the newest passes over a damaged one. Restore it from a copy, or delete its folder."
        )
    if not verify:
        _say(console, "The sizes of the files were looked at; --verify checks their SHA-256, too.")
    elif not damaged:
        _say(console, f"All files of {len(rows)} checkpoint{'s'[: len(rows) > 1]} have the right SHA-256.")
    _write(json_file, {"folder": str(folder), "verified": verify, "checkpoints": rows})
    return not damaged


def differences(folder: Path, words: Sequence[str], json_file: Path | None = None) -> None:
    """Print what differs between two checkpoints. Reads them whole, with TensorFlow.

    Args:
        folder: Where checkpoints are that are given by their steps.
        words: Two steps or paths.
        json_file: Where all of it is written to.

    Raises:
        UsageError: there is no such checkpoint.
        CheckpointProblem: one is damaged.
    """
    console = _console()
    a, b = (find(_path(folder, word), lambda line: _say(console, line)) for word in words)
    found = tensor_differences(a.tensors(), b.tensors())
    states = state_differences(a.manifest.state, b.manifest.state)
    for letter, side in (("A", a), ("B", b)):
        _say(console, f"{letter} is {side.path}")
    if found:
        console.print(_variables(found))
    equal = len({*a.manifest.tensors} & {*b.manifest.tensors} - {difference.name for difference in found})
    _say(console, f"{len(found)} variables differ, {equal} are equal in all bits.")
    if states:
        table = Table("state", "A", "B", box=box.SIMPLE, pad_edge=False)
        for where, pair in states.items():
            table.add_row(Text(where), *(Text(_short(value)) for value in pair))
        console.print(table)
    else:
        _say(console, "The states are equal.")
    variables = [vars(difference) for difference in found]
    pairs = {where: list(pair) for where, pair in states.items()}
    _write(json_file, {"a": str(a.path), "b": str(b.path), "variables": variables, "equal": equal, "state": pairs})


def _row(path: Path, verify: bool) -> dict[str, Any] | None:
    """What is said of a checkpoint; None where it has just been deleted."""
    row = dict.fromkeys(("epoch", "created", "bytes", "score", "tfdist"))
    row |= {"path": str(path), "step": step_of(path)}
    try:
        checkpoint = read(path)
    except CheckpointProblem as error:
        return {**row, "problems": [str(error)]} if path.exists() else None
    problems = checkpoint.problems(quick=not verify)
    if problems and not path.exists():
        return None
    return {**row, **_facts(checkpoint), "problems": problems}


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    about = checkpoint.manifest
    return {
        "step": about.step,
        "epoch": about.state.get("epoch"),
        "created": about.created,
        "bytes": checkpoint.bytes,
        "score": about.score,
        "tfdist": about.tfdist,
    }


def _path(folder: Path, word: str) -> Path:
    """What a step or a path means."""
    if not word.isascii() or not word.isdigit():
        return Path(word) if Path(word).exists() or not (folder / word).exists() else folder / word
    path = folder / name_of(int(word))
    if not path.exists():
        steps = ", ".join(str(step_of(known)) for known in all_at(folder))
        raise UsageError(f"diff={word}: {str(folder)!r} holds no checkpoint of step {int(word)}, but of {steps}.")
    return path


def _variables(found: Sequence[Difference]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("variable", overflow="fold")
    table.add_column("what differs", overflow="fold")
    table.add_column("largest difference", justify="right")
    for difference in found:
        largest = "" if difference.largest is None else f"{difference.largest:.3g}"
        table.add_row(Text(difference.name), Text(difference.what), largest)
    return table


def _console() -> Console:
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=150)


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _short(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _write(path: Path | None, value: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(encoded(value), indent=1, allow_nan=False) + "\n")
