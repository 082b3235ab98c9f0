"""Pictures with curves: losses, their differences, and predicted scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfdist.evidence.picture_look import DASHES, Look, finite, peaks, short, thin, widths

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_differences", "draw_losses", "draw_scaling"]

Result = Mapping[str, Any]
Style = dict[str, Any]

_LONG = 100  # steps, above which wide lines would hide how a curve goes up and down
_POINTS = 1200  # of all curves together, so that pages stay small


def draw_losses(result: Result, look: Look) -> Figure:
    """The losses of all arms on each other: lines get thinner, and dashes show those below."""
    arms = [(i, arm) for i, arm in enumerate(result["arms"]) if arm["losses"]]
    labels = [arm["name"] for _, arm in arms]
    figure, axes = look.figure((250 if look.narrow else 320) + look.legend_height(labels))
    lines = []
    long = max(len(arm["losses"]) for _, arm in arms) > _LONG
    points = max(60, _POINTS // len(arms))
    for (i, arm), width in zip(arms, widths(len(arms), 4.5 if long else 6.5), strict=True):
        steps, losses = thin([finite(loss) for loss in arm["losses"]], points)
        lines += _line(axes, steps, losses, look, i, width)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    _whole_steps(axes)
    look.legend(figure, lines, labels)
    return figure


def draw_differences(result: Result, look: Look) -> Figure:
    """|loss - loss of the reference| for each step on a log scale; equal losses lie on a line below."""
    index = {arm["name"]: i for i, arm in enumerate(result["arms"])}
    pairs = [pair for pair in result["pairs"] if pair["loss_difference"]]
    bounds = _bounds(pairs)
    labels = [pair["b"] for pair in pairs]
    labels += ["bound of rounding" if len(bounds) == 1 else "bounds of rounding, in the arms' colours"] * bool(bounds)
    figure, axes = look.figure((260 if look.narrow else 320) + look.legend_height(labels))
    floor = _floor([value for pair in pairs for value in (*pair["loss_difference"], *(pair["bound"] or ()))])
    lines = []
    for pair, width in zip(pairs, widths(len(pairs), 4.5), strict=True):
        values = [finite(value) for value in pair["loss_difference"]]
        steps, values = peaks([floor if value == 0 else value for value in values])
        lines += _line(axes, steps, values, look, index.get(pair["b"], 0), width)
    for number, (name, bound) in enumerate(bounds.items()):
        colour = look.ink if len(bounds) == 1 else look.colour(index.get(name, 0))
        steps, values = peaks([finite(value) or math.nan for value in bound])
        drawn = axes.plot(steps, values, color=colour, linewidth=1.3, linestyle=(0, (4, 3)), zorder=5)
        lines += drawn if number == 0 else []
    axes.axhline(floor, color=look.ink, linewidth=0.9, zorder=1)
    _, top = axes.get_ylim()
    axes.set_ylim(floor / 3, max(top, floor * 1e3))
    axes.set_yscale("log")
    _powers_of_ten(axes, floor)
    axes.set_xlabel("step")
    axes.set_ylabel("difference of the loss")
    _whole_steps(axes)
    look.legend(figure, lines, labels)
    return figure


def draw_scaling(result: Result, look: Look) -> Figure:
    """Predicted efficiency over replicas; sizes at which messages were timed, and measured efficiencies, are marked."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, NullLocator

    scaling = result["scaling"]
    series = [line for line in scaling["predictions"] if line["efficiency"]]
    networks = list(dict.fromkeys(line["network"] for line in series))
    colours = _colours_of_backends(result, [line["backend"] for line in series])
    timed = {fit["backend"]: {point["replicas"] for point in fit["points"]} for fit in scaling["fits"]}
    measured = [(i, arm) for i, arm in enumerate(result["arms"]) if arm["efficiency"] and arm["replicas"] > 1]
    labels = [_says(line) for line in series]
    dots = any(timed.get(line["backend"]) for line in series if line["network"] == "as measured")
    labels += ["sizes at which messages were timed"] * dots + ["measured in training"] * bool(measured)
    figure, axes = look.figure((270 if look.narrow else 330) + look.legend_height(labels))
    handles: list[Any] = []
    for line, width in zip(series, widths(len(series), 4.0), strict=True):
        at = {point["replicas"]: finite(point["value"]) for point in line["efficiency"]}
        dashes = DASHES[networks.index(line["network"]) % len(DASHES)]
        colour = look.colour(colours[line["backend"]])
        handles += axes.plot(list(at), list(at.values()), color=colour, linewidth=width, linestyle=dashes)
        if line["network"] == "as measured":
            sizes = [size for size in at if size in timed.get(line["backend"], ())]
            axes.plot(sizes, [at[size] for size in sizes], "o", color=colour, markersize=8, zorder=4)
    for i, arm in measured:
        low, middle, high = (finite(arm["efficiency"][key]) for key in ("low", "median", "high"))
        error = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
        style: Style = {
            "color": look.colour(i),
            "markerfacecolor": look.ground,
            "markersize": 8,
            "capsize": 3,
            "zorder": 5,
        }
        axes.errorbar([arm["replicas"]], [middle], yerr=error, fmt="D", **style)
    grey: Style = {"color": look.ink, "linestyle": "none", "markersize": 8}
    handles += [Line2D([], [], marker="o", **grey)] * dots
    handles += [Line2D([], [], marker="D", markerfacecolor=look.ground, **grey)] * bool(measured)
    axes.set_xscale("log", base=2)
    sizes = sorted({point["replicas"] for line in series for point in line["efficiency"]})
    axes.set_xticks(sizes[:: 2 if look.narrow else 1])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
    axes.set_ylim(0, 1.08)
    axes.set_xlabel("replicas")
    axes.set_ylabel("efficiency (predicted)")
    look.legend(figure, handles, labels)
    return figure


def _line(axes: Axes, steps: list[int], values: list[float], look: Look, index: int, width: float) -> list[Any]:
    # A number between two gaps has no line, so it needs a dot.
    alone = len(values) - sum(map(math.isnan, values)) < 3 or any(map(math.isnan, values))
    marker: Style = {"marker": "o", "markersize": width + 2} if alone else {}
    style: Style = {"color": look.colour(index), "linewidth": width, "linestyle": DASHES[index % len(DASHES)]}
    return axes.plot(steps, values, dash_capstyle="butt", zorder=2 + 0.1 * index, **style, **marker)


def _says(line: Mapping[str, Any]) -> str:
    network = "this network" if line["network"] == "as measured" else line["network"]
    return f"predicted: {line['backend']}, {network}"


def _bounds(pairs: list[Any]) -> dict[str, list[float]]:
    """The bounds by the arm that they are for; one only where all are the same."""
    bounds = {pair["b"]: pair["bound"] for pair in pairs if pair["bound"]}
    if len({tuple(bound) for bound in bounds.values()}) == 1:
        return dict([next(iter(bounds.items()))])
    return bounds


def _floor(values: list[Any]) -> float:
    """Where equal losses lie: a power of ten below all that differ."""
    positive = [value for value in map(finite, values) if value > 0]
    return 10.0 ** (math.floor(math.log10(min(positive, default=1e-8))) - 1)


def _powers_of_ten(axes: Axes, floor: float) -> None:
    from matplotlib.ticker import NullLocator

    low, high = round(math.log10(floor)), math.floor(math.log10(axes.get_ylim()[1]))
    powers = range(low + 1, high + 1, max(1, (high - low) // 6))
    axes.set_yticks([floor, *(10.0**power for power in powers)], ["same\nbits", *(f"1e{power}" for power in powers)])
    axes.yaxis.set_minor_locator(NullLocator())


def _whole_steps(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def _colours_of_backends(result: Result, backends: list[str]) -> dict[str, int]:
    """A backend has the colour of its first arm, and one that has no arm a colour of its own."""
    colours: dict[str, int] = {}
    for i, arm in enumerate(result["arms"]):
        colours.setdefault(arm["backend"], i)
    for backend in backends:
        colours.setdefault(backend, len(result["arms"]) + len(colours))
    return colours
