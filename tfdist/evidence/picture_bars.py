"""Pictures with bars: how fast each arm is, and where the time of its steps goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.evidence.picture_look import Look, finite, short, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PARTS", "draw_speed", "draw_split"]

PARTS = {
    "input": "input",
    "compute": "compute",
    "communication": "communication",
    "own": "update and trainer",
}
"""The parts of a step: their names in the result, and for people."""

_COLOURS = {"input": 4, "compute": 0, "communication": 1, "own": 6}
_HATCHES = {"input": "\\\\\\", "compute": "", "communication": "///", "own": ""}

Result = Mapping[str, Any]


def draw_speed(result: Result, look: Look) -> Figure:
    """Examples per second of each arm with its interval, and how far the reference differs from itself."""
    from matplotlib.patches import Patch

    arms = [(i, arm) for i, arm in enumerate(result["arms"]) if arm["examples_per_second"]]
    label = "noise: the reference against itself"
    figure, axes = look.figure(_height(len(arms), look) + look.legend_height([label]))
    for y, (i, arm) in enumerate(arms):
        low, middle, high = (finite(arm["examples_per_second"][key]) for key in ("low", "median", "high"))
        axes.barh(y, middle, height=_thickness(look), color=look.colour(i), zorder=2)
        error = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
        for colour, width in ((look.ground, 4.5), (look.ink, 1.4)):  # an edge, so that it is seen on the bar too
            style: dict[str, Any] = {"elinewidth": width, "capsize": 5, "capthick": width}
            axes.errorbar([middle], [y], xerr=error, color=colour, fmt="none", zorder=4, **style)
        ratio = "" if arm["ratio"] is None else f"  (× {finite(arm['ratio']['median']):.2f})"
        _value(axes, max(middle, high), y, f"{short(middle)}{ratio}")
    _names(axes, [arm["name"] for _, arm in arms], look)
    widest = max(max(finite(arm["examples_per_second"][key]) for key in ("median", "high")) for _, arm in arms)
    axes.set_xlim(0, widest * (1.5 if look.narrow else 1.2))
    reference = next((arm for _, arm in arms if arm["name"] == result["reference"]), None)
    if result["noise"] and reference:
        middle = finite(reference["examples_per_second"]["median"])
        span = [middle * finite(result["noise"][key]) for key in ("low", "high")]
        axes.axvspan(*span, facecolor=look.faint, alpha=0.45, zorder=3, linewidth=0)
        for end in span:
            axes.axvline(end, color=look.ink, linewidth=0.8, linestyle=":", zorder=3)
        patch = Patch(facecolor=look.faint, edgecolor=look.ink, linestyle=":", linewidth=0.8)
        look.legend(figure, [patch], [label])
    axes.set_xlabel("examples per second")
    return figure


def draw_split(result: Result, look: Look) -> Figure:
    """The time of one step of each arm, cut into its parts."""
    from matplotlib.patches import Patch

    arms = [arm for arm in result["arms"] if arm["split_ms"]]
    figure, axes = look.figure(_height(len(arms), look) + look.legend_height(list(PARTS.values())))
    totals = []
    for y, arm in enumerate(arms):
        left = 0.0
        for part in PARTS:
            milliseconds = finite(arm["split_ms"].get(part))
            if math.isnan(milliseconds):
                continue
            axes.barh(y, milliseconds, left=left, height=_thickness(look), zorder=2, **_style(part, look))
            left += milliseconds
        totals.append(left)
        _value(axes, left, y, f"{short(left)} ms")
    _names(axes, [arm["name"] for arm in arms], look)
    axes.set_xlim(0, max(max(totals) * (1.3 if look.narrow else 1.12), 1e-6))
    axes.set_xlabel("milliseconds per step")
    look.legend(figure, [Patch(**_style(part, look)) for part in PARTS], list(PARTS.values()))
    return figure


def _style(part: str, look: Look) -> dict[str, Any]:
    """Colours, hatches for those who do not see them, and edges of the ground's colour between the parts."""
    style = {"facecolor": look.colour(_COLOURS[part]), "hatch": _HATCHES[part]}
    return {**style, "edgecolor": look.ground, "linewidth": 1.0}


def _height(bars: int, look: Look) -> int:
    return 70 + (54 if look.narrow else 46) * bars


def _thickness(look: Look) -> float:
    return 0.42 if look.narrow else 0.62


def _value(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), xytext=(8, 0), textcoords="offset points", va="center", zorder=5)


def _names(axes: Axes, names: Sequence[str], look: Look) -> None:
    """The arms' names: beside the bars, or above them where there is little room."""
    axes.set_ylim(len(names) - 0.5, -0.75 if look.narrow else -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    if not look.narrow:
        axes.set_yticks(range(len(names)), [shorten(name) for name in names])
        return
    axes.set_yticks([])
    for y, name in enumerate(names):
        axes.annotate(shorten(name), (0, y - 0.25), xytext=(1, 2), textcoords="offset points", va="bottom", zorder=5)
