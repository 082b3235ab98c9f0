"""The pictures of a comparison, from what `tfdist compare` found: as PNG files, and as SVG for its page.

Matplotlib is imported only while something is drawn.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.errors import EnvironmentProblem
from tfdist.evidence.picture_bars import draw_speed, draw_split
from tfdist.evidence.picture_curves import draw_differences, draw_losses, draw_scaling
from tfdist.evidence.picture_look import Look, finite, short, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Picture", "as_svg", "pictures", "require_matplotlib", "write_pngs"]

Result = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Picture:
    """One picture of a result."""

    name: str
    """Its file's name, without the ending."""
    title: str
    """What is seen."""
    caption: str
    """How to read it."""
    draw: Callable[[Result, Look], Figure]


def pictures(result: Result) -> list[Picture]:
    """The pictures for which the result has data."""
    arms = result["arms"]
    found = []
    if any(not math.isnan(finite(loss)) for arm in arms for loss in arm["losses"]):
        caption = (
            "The loss of each step. Lines are drawn thinner one after another, so that all are seen where they lie "
            "on each other; a gap is a loss that is not finite."
        )
        found.append(Picture("losses", _title_of_losses(result), caption, draw_losses))
    if any(pair["loss_difference"] for pair in result["pairs"]):
        caption = (
            "How far the loss of each step is from that of the run it is compared with, on a logarithmic scale. "
            "Steps with the same loss lie on the line at the bottom. Of long runs each stretch shows its largest."
        )
        found.append(Picture("differences", _title_of_differences(result), caption, draw_differences))
    if any(arm["examples_per_second"] for arm in arms):
        caption = "Medians with 95 % intervals. Where differences are within the shaded noise, there is no difference."
        found.append(Picture("speed", _title_of_speed(result), caption, draw_speed))
    if any(arm["split_ms"] for arm in arms):
        caption = "The mean over ranks. Update and trainer is what remains beside the other three."
        found.append(Picture("step-time", "Where the time of a step goes", caption, draw_split))
    if result["scaling"] and any(line["efficiency"] for line in result["scaling"]["predictions"]):
        most = max(p["replicas"] for line in result["scaling"]["predictions"] for p in line["efficiency"])
        caption = (
            "Lines are predictions of the formula, from messages that were timed at the sizes with round marks; "
            "all other sizes are extrapolated. Efficiency is a step's time without communication over its time with it."
        )
        title = f"Predicted, not measured: efficiency up to {most} replicas"
        found.append(Picture("predicted-scaling", title, caption, draw_scaling))
    return found


def write_pngs(result: Result, folder: Path) -> list[Path]:
    """Write the pictures as PNG files, light and wide, and return their paths.

    Raises:
        EnvironmentProblem: there is no Matplotlib.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for picture in pictures(result):
        look = Look(title=picture.title)
        path = folder / f"{picture.name}.png"
        with _settings(look):
            picture.draw(result, look).savefig(path, dpi=144, facecolor=look.ground)
        paths.append(path)
    return paths


def as_svg(picture: Picture, result: Result, look: Look) -> str:
    """A picture as SVG with a transparent ground; its width and height are CSS pixels.

    Raises:
        EnvironmentProblem: there is no Matplotlib.
    """
    written = io.StringIO()
    with _settings(look):
        picture.draw(result, look).savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*? (?:width|height)="[\d.]+)pt"', r'\1"', svg)
    svg = re.sub(r'(<svg[^>]*? height="[\d.]+)pt"', r'\1"', svg)
    # A hundredth of a pixel is enough, and halves the file.
    return re.sub(r"(\d+\.\d\d)\d+", r"\1", svg)


def require_matplotlib() -> None:
    """Raises EnvironmentProblem where there is no Matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise EnvironmentProblem("the pictures need Matplotlib, which is not installed. Run: pip install matplotlib")


@contextmanager
def _settings(look: Look) -> Iterator[None]:
    """Matplotlib with the look's settings, whatever a user's own are."""
    require_matplotlib()
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(look.settings())
        yield


def _title_of_losses(result: Result) -> str:
    many = [arm for arm in result["arms"] if arm["losses"]]
    steps = max(len(arm["losses"]) for arm in many)
    arms = "one arm" if len(many) == 1 else f"{len(many)} arms"
    return f"Loss of {arms} over {steps} steps"


def _title_of_differences(result: Result) -> str:
    pairs = [pair for pair in result["pairs"] if pair["loss_difference"]]
    values = [finite(value) for pair in pairs for value in pair["loss_difference"]]
    if all(value == 0 for value in values):
        return "The losses are the same bits at every step"
    outside = [(step, pair["b"]) for pair in pairs if (step := _leaves_bound(pair))]
    if outside:
        step, name = min(outside)
        return f"{shorten(name)} leaves the bound of rounding at step {step}"
    known = [value for value in values if not math.isnan(value)]
    most = f"The losses differ by up to {short(max(known))}" if known else "The losses cannot be compared"
    bounded = len(known) == len(values) and all(pair["bound"] for pair in pairs if any(pair["loss_difference"]))
    return f"{most}, within the bound of rounding" if bounded else most


def _leaves_bound(pair: Mapping[str, Any]) -> int:
    """The first step at which the difference is above the bound; 0 where there is none."""
    both = zip(pair["loss_difference"], pair["bound"] or (), strict=False)
    return next((step for step, (value, bound) in enumerate(both, 1) if finite(value) > finite(bound)), 0)


def _title_of_speed(result: Result) -> str:
    timed = [arm for arm in result["arms"] if arm["examples_per_second"]]
    fastest = max(timed, key=lambda arm: arm["examples_per_second"]["median"])
    title = f"Most examples per second: {shorten(fastest['name'])}"
    if fastest["name"] == result["reference"] or not fastest["ratio"]:
        return title
    low, middle, high = (finite(fastest["ratio"][key]) for key in ("low", "median", "high"))
    return f"{title}, {middle:.2f} times the reference ({low:.2f} to {high:.2f})"
