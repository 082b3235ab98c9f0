"""The tables of the page of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tfdist.evidence.page_parts import Html, details, interval, number, percent, safe, section, table
from tfdist.evidence.picture_bars import PARTS
from tfdist.evidence.picture_look import finite, short

__all__ = ["against", "arms", "fits", "pairs", "predictions", "time_split", "variables"]

Result = Mapping[str, Any]

_WORDS = (9, 10, 11)  # columns of the table of arms that hold no numbers
_MOST_VARIABLES = 10
_KINDS = {"same bits": "same", "rounding": "rounding", "different": "different", "not comparable": "unknown"}


def arms(result: Result) -> Html:
    """What was measured of each arm."""
    head = [
        "arm",
        "examples/s",
        "ratio",
        "step, ms",
        "efficiency",
        "memory, MB",
        "start-up, s",
        "seconds to quality",
        "last loss",
        "metrics",
        "state",
        "weights",
    ]
    rows = [
        [
            _name(arm, result),
            interval(arm["examples_per_second"]),
            interval(arm["ratio"], digits=2),
            interval(arm["step_ms"]),
            interval(arm["efficiency"], " %", 100, 1),
            number(arm["memory_mb"]),
            number(arm["startup_seconds"]),
            number(arm["seconds_to_quality"]),
            _loss(arm["losses"]),
            Html("<br>".join(f'<span class="line">{safe(line)}</span>' for line in _flat(arm["metrics"]))),
            _hash(arm["state_sha256"]),
            _hash(arm["weights_sha256"]),
        ]
        for arm in result["arms"]
    ]
    noise = ""
    if result["noise"]:
        low, high = (finite(result["noise"][key]) for key in ("low", "high"))
        noise = f" The reference against itself: {low:.2f} to {high:.2f} (noise)."
    says = "Medians with 95 % intervals; ratio: speed over that of the reference, above 1 is faster." + noise
    return table(says if result["rounds"] else "", head, rows, words=_WORDS, label="Arms")


def pairs(result: Result) -> Html:
    """The verdict of each pair of arms."""
    head = ["compared", "verdict", "largest difference of a loss", "bits part first", "stage", "note"]
    rows = []
    for pair in result["pairs"]:
        verdict = Html(f'<strong class="{_KINDS[pair["verdict"]]}">{safe(pair["verdict"])}</strong>')
        known = [value for value in map(finite, pair["loss_difference"]) if value == value]
        rows.append(
            [
                f"{pair['a']} – {pair['b']}",
                verdict,
                number(max(known)) if known else Html("–"),
                _place(pair["first"]),
                _stage(pair["stage"]),
                pair["note"],
            ]
        )
    return table("", head, rows, words=(1, 3, 4, 5), label="Pairs") if rows else Html("")


def variables(result: Result) -> Html:
    """The variables of each pair that differ most at the end."""
    parts = []
    worst = next((pair["b"] for pair in result["pairs"] if pair["verdict"] == "different"), None)
    for pair in result["pairs"]:
        if not pair["variables"]:
            continue
        name = pair["b"] if pair["a"] == result["reference"] else f"{pair['a']} – {pair['b']}"
        apart = [line for line in pair["variables"] if line["absolute"] is None or line["absolute"] or line["ulps"]]
        lines = sorted(apart, key=_size, reverse=True)[:_MOST_VARIABLES]
        if not lines:
            parts.append(Html(f'<p class="quiet">{safe(name)}: all variables are the same at the end.</p>'))
            continue
        rows = [
            [line["name"], number(line["absolute"]), number(line["relative"]), _whole(line["ulps"])] for line in lines
        ]
        content = table("", ["variable", "absolute", "relative", "ulps"], rows, label=f"Variables of {name}")
        summary = f"{name}: variables with the largest differences at the end"
        parts.append(details(summary, content, opened=pair["b"] == worst))
    return Html("\n".join(parts))


def _size(line: Mapping[str, Any]) -> float:
    """The relative difference; those that cannot be taken come first."""
    return math.inf if line["relative"] is None else float(line["relative"])


def time_split(result: Result) -> Html:
    """The numbers of the picture of a step's time."""
    rows = [
        [arm["name"], *(number(arm["split_ms"].get(part)) for part in PARTS)]
        for arm in result["arms"]
        if arm["split_ms"]
    ]
    if not rows:
        return Html("")
    head = ["arm", *(f"{says}, ms" for says in PARTS.values())]
    return details("A step's time in numbers", table("", head, rows, label="A step's time"))


def fits(scaling: Mapping[str, Any]) -> Html:
    """What the formula takes from the messages that were timed, and how far it is off."""
    if not scaling["fits"]:
        return Html("")
    rows = [
        [fit["backend"], number(fit["alpha_us"]), number(fit["gbit_per_second"]), percent(fit["error"])]
        for fit in scaling["fits"]
    ]
    says = "Fitted to messages that were timed here."
    parts = [table(says, ["backend", "α, µs", "Gbit/s", "error of the fit"], rows, label="Fits")]
    head = ["replicas", "bytes", "measured, µs", "fitted, µs"]
    for fit in scaling["fits"]:
        points = [
            [p["replicas"], f"{p['bytes']:,}", number(p["measured_us"]), number(p["fitted_us"])] for p in fit["points"]
        ]
        summary = f"{fit['backend']}: measured and fitted times"
        parts.append(details(summary, table("", head, points, label=summary)))
    return Html("\n".join(parts))


def predictions(scaling: Mapping[str, Any]) -> Html:
    """The numbers of the picture of predicted scaling."""
    series = [line for line in scaling["predictions"] if line["efficiency"]]
    if not series:
        return Html("")
    by_size = [{point["replicas"]: point["value"] for point in line["efficiency"]} for line in series]
    sizes = sorted({size for values in by_size for size in values})
    head = ["replicas", *(f"{line['backend']}, {line['network']}" for line in series)]
    rows = [[size, *(percent(values.get(size)) for values in by_size)] for size in sizes]
    content = table("Predicted, not measured.", head, rows, label="Predicted efficiency")
    return details("Predicted efficiency in numbers", content)


def against(result: Result) -> Html:
    """What changed since an earlier comparison."""
    then = result["against"]
    if not then:
        return Html("")
    if then["numbers"]:
        lines = "".join(f"<li>{safe(line)}</li>" for line in then["numbers"])
        numbers = Html(f"<p>Numbers that are not as they were:</p>\n<ul>{lines}</ul>")
    else:
        numbers = Html("<p>All numbers are as they were.</p>")
    rows = [[line["arm"], interval(line["ratio"], digits=2), line["verdict"]] for line in then["speed"]]
    says = "Speed now over speed then; above 1 is faster now."
    speed = table(says, ["arm", "ratio", "verdict"], rows, words=(2,), label="Speed then and now") if rows else Html("")
    return section(f"Against {then['file']}", numbers, speed)


def _name(arm: Mapping[str, Any], result: Result) -> Html:
    notes = ["reference"] * (arm["name"] == result["reference"]) + ["asynchronous"] * bool(arm["asynchronous"])
    return Html(safe(arm["name"]) + (f"<br><small>{', '.join(notes)}</small>" if notes else ""))


def _loss(losses: list[Any]) -> Html:
    return safe(f"{finite(losses[-1]):.6g}") if losses else Html("–")


def _hash(value: str | None) -> Html:
    return Html(f'<code title="{safe(value)}">{safe(value[:10])}</code>') if value else Html("–")


def _flat(values: Any, name: str = "") -> list[str]:
    """Nested metrics as lines such as "test accuracy 0.86"."""
    if isinstance(values, Mapping):
        return [line for key, value in values.items() for line in _flat(value, f"{name} {key}")]
    return [f"{name} {values:.4g}".strip()] if isinstance(values, int | float) else []


def _place(first: Mapping[str, Any] | None) -> Html:
    if first is None:
        return Html("–")
    variable = f"<br><code>{safe(first['variable'])}</code>" if first["variable"] else ""
    return Html(f"step {safe(first['step'])}{variable}")


def _stage(stage: Mapping[str, Any] | None) -> Html:
    if stage is None:
        return Html("–")
    rank = "" if stage["rank"] is None else f" on replica {stage['rank']}"
    return Html(f"{safe(stage['name'])}<br><small>step {safe(stage['step'])}{safe(rank)}</small>")


def _whole(value: Any) -> Html:
    return Html("–") if value is None else safe(f"{value:,}" if isinstance(value, int) else short(finite(value)))
