"""The pictures of a comparison."""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.comparison_result import NASTY, all_equal, result, without
from tests.jobs import ROOT
from tfdist.errors import EnvironmentProblem
from tfdist.evidence.picture_look import Look, finite, peaks, short, shorten, thin, widths
from tfdist.evidence.pictures import as_svg, pictures, write_pngs

ALL = ["losses", "differences", "speed", "step-time", "predicted-scaling"]


def names(content: dict) -> list[str]:
    return [picture.name for picture in pictures(content)]


def title(content: dict, name: str) -> str:
    return next(picture.title for picture in pictures(content) if picture.name == name)


def test_png_files(tmp_path: Path) -> None:
    paths = write_pngs(result(), tmp_path / "new" / "folder")
    assert [path.name for path in paths] == [f"{name}.png" for name in ALL]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG"), path
        assert path.stat().st_size > 10_000, path


def test_pictures_without_data_are_left_out() -> None:
    assert names(without(result(), "speed")) == ["losses", "differences", "predicted-scaling"]
    assert names(without(result(), "scaling")) == ALL[:-1]
    nothing = without(result(), "speed", "scaling") | {"pairs": []}
    nothing["arms"] = [arm | {"losses": []} for arm in nothing["arms"]]
    assert names(nothing) == []


def test_each_variant_is_svg_with_the_names_as_text() -> None:
    content = result()
    for picture in pictures(content):
        for look in (Look(), Look(dark=True, narrow=True)):
            root = ElementTree.fromstring(as_svg(picture, content, look))
            assert root.get("width") == str(look.width), picture.name
            texts = "".join(root.itertext())
            if picture.name != "predicted-scaling":
                assert shorten(f"{NASTY} x 3") in texts, picture.name
            if look.dark:
                assert Look().ink not in ElementTree.tostring(root, encoding="unicode")


def test_the_same_result_gives_the_same_picture() -> None:
    first = pictures(result())[1]
    assert as_svg(first, result(), Look()) == as_svg(first, result(), Look())


def test_what_is_not_finite_is_a_gap() -> None:
    content = result()
    for hole in (None, math.nan, math.inf):
        content["arms"][1]["losses"][7] = hole
        content["pairs"][0]["loss_difference"][7] = hole
        assert math.isnan(finite(hole))
    for arm in content["arms"]:
        arm["losses"][-1] = None
    for picture in pictures(content)[:2]:
        assert not re.search(r"\b(nan|inf)\b", as_svg(picture, content, Look(narrow=True)), re.IGNORECASE)


def test_titles_say_what_is_seen() -> None:
    assert title(result(), "differences").endswith(" leaves the bound of rounding at step 10")
    assert title(all_equal(result()), "differences") == "The losses are the same bits at every step"
    rounding = result()
    del rounding["pairs"][2]
    assert title(rounding, "differences") == "The losses differ by up to 1.1e-7, within the bound of rounding"
    rounding["pairs"][1]["loss_difference"][3] = None
    assert title(rounding, "differences") == "The losses differ by up to 1.1e-7"
    unbounded = result()
    unbounded["pairs"] = [pair | {"bound": None} for pair in unbounded["pairs"]]
    assert title(unbounded, "differences") == "The losses differ by up to 0.107"
    assert title(result(), "speed") == (
        "Most examples per second: mirrored x 2, 1.14 times the reference (1.08 to 1.20)"
    )
    assert "Predicted, not measured" in title(result(), "predicted-scaling")


def test_one_arm_and_one_step() -> None:
    content = result(steps=1)
    content["arms"] = content["arms"][:1]
    content["pairs"] = []
    assert names(content) == ["losses", "speed", "step-time", "predicted-scaling"]
    for picture in pictures(content):
        assert "<svg" in as_svg(picture, content, Look(narrow=True))


def test_long_curves_keep_their_extremes() -> None:
    values = [0.0] * 10_000
    values[1234], values[5678] = 5.0, -5.0
    steps, kept = thin(values)
    assert len(steps) <= 302 and steps[0] == 1 and steps[-1] == 10_000
    assert {1235, 5679} <= set(steps)
    assert [values[step - 1] for step in steps] == kept
    steps, kept = peaks(values)
    assert len(steps) == 100 and 1235 in steps and 5679 not in steps
    assert [values[step - 1] for step in steps] == kept
    assert peaks([1.0, 3.0, 2.0]) == ([1, 2, 3], [1.0, 3.0, 2.0])
    _, gaps = thin([math.nan] * 1000)
    assert gaps and all(map(math.isnan, gaps))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1234.6, "1,235"), (99.97, "100"), (0.00123, "0.00123"), (1.2e-7, "1.2e-7"), (1e-10, "1e-10")],
)
def test_short_numbers(value: float, text: str) -> None:
    assert short(value) == text


def test_lines_get_thinner_and_names_keep_their_ends() -> None:
    assert widths(4) == sorted(widths(4), reverse=True)
    assert shorten("short") == "short"
    assert len(shorten("x" * 100 + " x 4096")) == 38 and shorten("x" * 100 + " x 4096").endswith(" x 4096")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="need Matplotlib, which is not installed"):
        write_pngs(result(), tmp_path)


def test_matplotlib_is_imported_only_to_draw() -> None:
    program = "import sys, tfdist.evidence.page; sys.exit('matplotlib' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=300, check=True)
