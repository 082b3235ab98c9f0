"""A comparison in the terminal: a table of the runs, one of the pairs, and the verdict last."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfdist.evidence.screen import say

__all__ = ["show"]

_Column = tuple[str, Callable[[Mapping[str, Any]], str | Text]]
"""Its head, and what it says of a run or a pair."""

_WIDE = 150
_WIDE_PAIRS = 110

_COLOURS = {"same bits": "bold green", "rounding": "green", "not comparable": "yellow", "different": "bold red"}


def show(console: Console, result: Mapping[str, Any], problems: Sequence[str]) -> None:
    """Print it."""
    for table in _arms(result, console.width):
        console.print(table)
    for table in _pairs(result, console.width):
        console.print(table)
    for pair in result["pairs"]:
        for text in (_parting(pair), pair["note"]):
            if text and not any(problem in text for problem in problems):  # which come last
                say(console, f"{pair['a']} and {pair['b']}: {text}")
    _quality(console, result)
    _scaling(console, result["scaling"])
    _against(console, result["against"])
    for problem in problems:
        say(console, f"FAILED {problem}")
    if result["noise"]:
        low, high = result["noise"]["low"], result["noise"]["high"]
        say(console, f"noise: {result['reference']} against itself lies between {low:.3f} and {high:.3f}")
    console.print(Text("verdict: ") + Text(result["verdict"], style=_COLOURS[result["verdict"]]))


def _arms(result: Mapping[str, Any], width: int) -> list[Table]:
    """What each run gave; in several tables where one would be too wide."""
    groups: list[list[_Column]] = [
        [("last loss", _last_loss), ("weights", lambda arm: (arm["weights_sha256"] or "–")[:8])]
    ]
    if any(arm["step_ms"] for arm in result["arms"]):
        groups.append(
            [
                ("examples/s", lambda arm: _interval(arm["examples_per_second"], ".0f")),
                (f"speed over\n{result['reference']}", lambda arm: _interval(arm["ratio"], ".2f")),
                ("efficiency", lambda arm: _interval(arm["efficiency"], ".2f")),
            ]
        )
        groups.append(
            [
                ("input / compute /\ncommunication / own (ms)", _split),
                ("memory\n(MB)", lambda arm: _number(arm["memory_mb"], ".0f")),
                ("start-up\n(s)", lambda arm: _number(arm["startup_seconds"], ".1f")),
            ]
        )
    rows = [(arm["name"], arm) for arm in result["arms"]]
    return _tables("run", groups, rows, whole=width >= _WIDE)


def _tables(
    first: str, groups: list[list[_Column]], rows: Sequence[tuple[str, Mapping[str, Any]]], *, whole: bool
) -> list[Table]:
    """A table for each group of columns, or one for all; `first` heads the names of the rows."""
    tables = []
    for group in [list(itertools.chain(*groups))] if whole else groups:
        table = Table(box=box.SIMPLE, pad_edge=False)
        table.add_column(first, overflow="fold")
        for head, _ in group:
            table.add_column(head, justify="left" if head == "verdict" else "right", no_wrap=True)
        for name, row in rows:
            table.add_row(name, *(told(row) for _, told in group))
        tables.append(table)
    return tables


def _last_loss(arm: Mapping[str, Any]) -> str:
    return _number(arm["losses"][-1] if arm["losses"] else None, ".6g")


def _split(arm: Mapping[str, Any]) -> str:
    return "–" if arm["split_ms"] is None else " / ".join(f"{value:.2f}" for value in arm["split_ms"].values())


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _pairs(result: Mapping[str, Any], width: int) -> list[Table]:
    """How far each two runs are apart; in two tables where one would be too wide."""
    groups: list[list[_Column]] = [
        [
            ("verdict", lambda pair: Text(pair["verdict"], style=_COLOURS[pair["verdict"]])),
            ("largest difference\nof a loss", lambda pair: _largest(pair["loss_difference"], ".2g")),
            ("rounding may\nmake it", lambda pair: _number(pair["bound"][-1] if pair["bound"] else None, ".2g")),
        ],
        [
            ("largest difference\nof a variable", lambda pair: _of_variables(pair, "absolute", ".2g")),
            ("in units of the\nlast place", lambda pair: _of_variables(pair, "ulps", "d")),
        ],
    ]
    rows = [(f"{pair['a']}\n{pair['b']}", pair) for pair in result["pairs"]]
    return _tables("compared", groups, rows, whole=width >= _WIDE_PAIRS)


def _of_variables(pair: Mapping[str, Any], what: str, form: str) -> str:
    return _largest([variable[what] for variable in pair["variables"]], form)


def _largest(values: Sequence[float | None], form: str) -> str:
    return _number(max((value for value in values if value is not None), default=None), form)


def _parting(pair: Mapping[str, Any]) -> str:
    first, stage = pair["first"], pair["stage"]
    parts = []
    if first is not None and pair["verdict"] != "not comparable":
        when = "from the start" if first["step"] == 0 else f"after step {first['step']}"
        parts.append(f"bits part {when}, first in {first['variable']}")
    if stage is not None:
        where = f" of {stage['variable']}" if stage["variable"] else ""
        whom = f" on replica {stage['rank']}" if stage["rank"] is not None else ""
        parts.append(f"what differs first is the {stage['name']}{where}{whom}, at step {stage['step']}")
    return "; ".join(parts)


def _quality(console: Console, result: Mapping[str, Any]) -> None:
    """How well runs end, and how soon, where steps do not compare."""
    if not any(arm["asynchronous"] for arm in result["arms"]):
        return
    for arm in result["arms"]:
        if arm["asynchronous"] or arm["name"] == result["reference"]:
            ends = [f"{s} {n} {v:.4g}" for s, m in arm["metrics"].items() for n, v in m.items() if isinstance(v, float)]
            seconds = arm["seconds_to_quality"]
            soon = f"; at the loss that {result['reference']} ends with after {_number(seconds, '.2g')} s of steps"
            say(console, f"{arm['name']} ends with {', '.join(ends) or 'no metrics'}{soon if result['rounds'] else ''}")


def _scaling(console: Console, scaling: Mapping[str, Any] | None) -> None:
    if scaling is None:
        return
    table = Table(box=box.SIMPLE, pad_edge=False, title="predicted efficiency (not measured)", title_justify="left")
    counts = (2, 8, 64, 512, 4096)
    for head in ("network", "backend", *map(str, counts)):
        table.add_column(head)
    for prediction in scaling["predictions"]:
        values = {point["replicas"]: point["value"] for point in prediction["efficiency"]}
        table.add_row(prediction["network"], prediction["backend"], *(f"{values[count]:.2f}" for count in counts))
    console.print(table)
    for fit in scaling["fits"]:
        speed = "–" if fit["gbit_per_second"] is None else f"{fit['gbit_per_second']:.3g} Gbit/s"
        text = (
            f"{fit['backend']}: {fit['alpha_us']:.3g} µs a message, {speed}; off by {fit['error']:.0%} where measured"
        )
        say(console, text)


def _against(console: Console, against: Mapping[str, Any] | None) -> None:
    if against is None:
        return
    for line in against["numbers"]:
        say(console, f"CHANGED since {against['file']}: {line}")
    for speed in against["speed"]:
        told = _interval(speed["ratio"], ".2f")
        say(console, f"{speed['arm']} is {speed['verdict']} since {against['file']}: {told} of its speed then")
    if not against["numbers"]:
        say(console, f"no number has changed since {against['file']}")


def _interval(value: Mapping[str, float] | None, form: str) -> str:
    if value is None:
        return "–"
    return f"{value['median']:{form}} ({value['low']:{form}}–{value['high']:{form}})"
