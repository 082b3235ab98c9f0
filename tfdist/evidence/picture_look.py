"""How the pictures of a comparison look: sizes, colours, line styles, and how numbers are written in them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["DASHES", "Look", "finite", "peaks", "short", "shorten", "thin", "widths"]

# Okabe and Ito's colours, which colour-blind people can tell apart; darker or lighter where the ground needs it.
_ON_LIGHT = ("#0072B2", "#D55E00", "#008A64", "#AA4499", "#8A6D00", "#56B4E9", "#5A5A5A")
_ON_DARK = ("#56B4E9", "#FF9E4A", "#2FC79B", "#E39CC4", "#F0E442", "#5A9BD8", "#C8C8C8")

_LEGEND = 46  # letters, which are as many as a phone has room for

DASHES: tuple[Any, ...] = ("-", (0, (5, 2.5)), (0, (1.5, 1.8)), (0, (7, 2, 1.5, 2)), (0, (3, 4)), (0, (9, 3)))
"""Line styles, so that lines differ without colours too."""


@dataclasses.dataclass(frozen=True)
class Look:
    """For which ground and which room a picture is drawn. One inch is 72 CSS pixels, so that font sizes are pixels."""

    dark: bool = False
    narrow: bool = False
    title: str = ""
    """Drawn above the picture; empty where the page says it."""

    @property
    def width(self) -> int:
        """In CSS pixels: a phone's column or a desktop's."""
        return 358 if self.narrow else 860

    @property
    def ground(self) -> str:
        return "#14171c" if self.dark else "#ffffff"

    @property
    def ink(self) -> str:
        return "#e6e8eb" if self.dark else "#1b1f24"

    @property
    def faint(self) -> str:
        return "#59616d" if self.dark else "#b9c0c9"

    def colour(self, index: int) -> str:
        """The colour of the arm with this index, the same in all pictures."""
        colours = _ON_DARK if self.dark else _ON_LIGHT
        return colours[index % len(colours)]

    def settings(self) -> dict[str, Any]:
        """Matplotlib's settings."""
        return {
            "font.size": 12,
            "axes.titlesize": 15,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.titlepad": 12,
            "axes.edgecolor": self.faint,
            "axes.facecolor": "none",
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.labelcolor": self.ink,
            "grid.color": self.faint,
            "grid.alpha": 0.4,
            "grid.linewidth": 0.7,
            "text.color": self.ink,
            "text.parse_math": False,  # a dollar sign in a name is a dollar sign
            "xtick.color": self.ink,
            "ytick.color": self.ink,
            "legend.frameon": False,
            "legend.fontsize": 11 if self.narrow else 12,
            "legend.handlelength": 2.8,
            "hatch.color": self.ground,
            "hatch.linewidth": 1.6,
            "figure.facecolor": "none",
            # Text stays text: small files, and sharp at every size. It is laid out for a wide font, so that any fits.
            "svg.fonttype": "none",
            "svg.hashsalt": "tfdist",
            "path.simplify": True,
        }

    def figure(self, height: int) -> tuple[Figure, Axes]:
        """An empty picture of this look with one pair of axes; `height` in CSS pixels, without the title."""
        import textwrap

        from matplotlib.figure import Figure

        title = textwrap.fill(self.title, 42 if self.narrow else 95)
        height += 22 * (title.count("\n") + 1) if title else 0
        figure = Figure(figsize=(self.width / 72, height / 72), dpi=72, layout="constrained")
        axes = figure.add_subplot()
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=15, fontweight="bold")
        return figure, axes

    def legend(self, figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
        """A legend below the axes, in as many columns as there is room for."""
        labels = [shorten(label, _LEGEND) for label in labels]
        figure.legend(handles, labels, loc="outside lower left", ncols=self._columns(labels))

    def legend_height(self, labels: Sequence[str]) -> int:
        """About how many pixels a legend of these labels takes."""
        return 12 + 19 * math.ceil(len(labels) / self._columns([shorten(label, _LEGEND) for label in labels]))

    def _columns(self, labels: Sequence[str]) -> int:
        room = 7 * max(map(len, labels), default=1) + 62
        return max(1, min(len(labels), (self.width - 20) // room))


def finite(value: Any) -> float:
    """A number, or NaN (which Matplotlib leaves out) for what is none or not finite."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def short(value: float) -> str:
    """A number with three digits or so, as plain text."""
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    if abs(value) >= 1e-3:
        return f"{value:.3g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def shorten(name: str, length: int = 38) -> str:
    """A name that is not longer than a picture can take; its end counts, since there the replicas stand."""
    if len(name) <= length:
        return name
    return f"{name[: length - 14]}…{name[-13:]}"


def widths(count: int, widest: float = 6.5) -> list[float]:
    """Line widths that decrease, so that of lines on each other all are seen."""
    if count == 1:
        return [2.0]
    return [widest - (widest - 1.4) * i / (count - 1) for i in range(count)]


def thin(values: Sequence[float], points: int = 300) -> tuple[list[int], list[float]]:
    """Steps (from 1) and values of a curve, of long ones only the least and the greatest of each stretch."""
    if len(values) <= points:
        return list(range(1, len(values) + 1)), list(values)
    kept: set[int] = {0, len(values) - 1}
    for stretch in _stretches(len(values), points // 2):
        there = [j for j in stretch if not math.isnan(values[j])]
        # A stretch without numbers stays a gap.
        kept |= {min(there, key=values.__getitem__), max(there, key=values.__getitem__)} if there else {stretch[0]}
    steps = sorted(kept)
    return [j + 1 for j in steps], [values[j] for j in steps]


def peaks(values: Sequence[float], points: int = 100) -> tuple[list[int], list[float]]:
    """Steps (from 1) and values of a curve, of long ones only the greatest of each stretch."""
    steps = []
    for stretch in _stretches(len(values), min(points, len(values))):
        there = [j for j in stretch if not math.isnan(values[j])]
        steps.append(max(there, key=values.__getitem__) if there else stretch[0])
    return [j + 1 for j in steps], [values[j] for j in steps]


def _stretches(length: int, count: int) -> list[range]:
    return [range(i * length // count, (i + 1) * length // count) for i in range(count)]
