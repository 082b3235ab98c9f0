"""The page of a comparison."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path

import pytest

from tests.comparison_result import NASTY, all_equal, result, without
from tfdist.evidence.page import write_page

VOID = {"meta", "br", "img", "source"}


class Checked(html.parser.HTMLParser):
    """Checks that elements are closed in their order, and collects text and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.text: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.source = page
        self.feed(page)
        self.close()
        assert self.opened == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), (tag, attrs)
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.opened.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.opened and self.opened[-1] != "style":
            self.text.append(data)

    def find(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def written(content: dict, folder: Path) -> tuple[Checked, str]:
    path = folder / "page.html"
    write_page(content, path)
    page = Checked(path.read_text())
    return page, " ".join("".join(page.text).split())


def test_a_full_page(tmp_path: Path) -> None:
    page, text = written(result(), tmp_path)
    assert (tmp_path / "page.html").stat().st_size < 1_000_000
    assert text.index("≠ Different") < text.index("Arms") < text.index("Predicted scaling") < text.index("What ran")
    assert f"{NASTY} x 3 leaves horovod x 2 at step 10, in the reduced gradients on replica 1" in text
    assert "Fastest: mirrored x 2, 4,051 examples per second, 1.14 times horovod x 2 (1.08 to 1.20)." in text
    assert "Efficiencies in this section are predicted, not measured." in text
    for content in (
        "the ranks read other rows <here>",
        "ring all-reduce: Thakur & others, 2005",
        "Against old & new.json",
        "horovod x 2: state_sha256 was 0123abcd",
        "test accuracy 0.8611",
        "tfdist compare --backends horovod,mirrored --task 'my.py:Task' && echo <done>",
        f"mpirun -np 2 tfdist train --backend {NASTY} --report 3.json",
        "node<1>",
        "multi_worker_mirrored x 2: all variables are the same at the end.",
        "model/dense_layer_with_a_long_name/kernel:10",
        "18.0 %",
    ):
        assert content in text, content
    assert "kernel:10<" in page.source and "kernel:11<" not in page.source
    assert "<br>" not in text and "&lt;" not in text, "something was escaped twice"
    assert len(page.find("img")) == 5 and len(page.find("source")) == 15
    for image in page.find("img"):
        assert image["alt"] and image["width"] == "860"


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    page, _ = written(without(result(), "speed"), tmp_path)
    addresses = [tag.get(name) for _, tag in page.tags for name in ("src", "srcset", "href") if tag.get(name)]
    assert len(addresses) == 12
    assert all(address and address.startswith("data:image/svg+xml;base64,") for address in addresses)
    assert not page.find("script") and not page.find("link")
    assert not re.search(r"url\(|@import|https?:", re.sub(r'"data:[^"]*"', "", page.source))


def test_without_speed_scaling_and_an_earlier_run(tmp_path: Path) -> None:
    page, text = written(all_equal(without(result(), "speed", "scaling", "against")), tmp_path)
    assert "= Same bits" in text
    assert "Speed was not measured." in text
    assert len(page.find("img")) == 2
    for absent in ("examples/s", "noise", "redicted", "Against", "Fastest", "leaves", "in numbers", "nan", "None"):
        assert absent not in text, absent


def test_losses_that_are_not_finite(tmp_path: Path) -> None:
    content = without(result(), "scaling", "speed")
    for arm in content["arms"]:
        arm["losses"][30:] = [None] * 20
    content["pairs"][2]["loss_difference"] = [None] * 50
    _, text = written(content, tmp_path)
    assert "None" not in text and "inf" not in text


def test_arms_that_cannot_be_compared(tmp_path: Path) -> None:
    content = without(result(), "against") | {"verdict": "not comparable"}
    content["arms"][1] |= {"asynchronous": True, "seconds_to_quality": 0.4, "metrics": {}}
    empty = {"loss_difference": [], "bound": None, "variables": [], "first": None, "stage": None}
    content["pairs"] = [
        pair | empty | {"verdict": "not comparable", "note": "asynchronous"} for pair in content["pairs"]
    ]
    _, text = written(content, tmp_path)
    assert "? Not comparable" in text
    assert "seconds to quality" in text and "0.4" in text


def test_a_difference_of_which_no_stage_is_known(tmp_path: Path) -> None:
    content = without(result(), "scaling", "speed")
    content["pairs"][2]["stage"] = None
    assert f"{NASTY} x 3 leaves horovod x 2 at step 6: model/dense_layer" in written(content, tmp_path)[1]
    content["pairs"][2]["first"] = None
    assert f"{NASTY} x 3 gives other numbers than horovod x 2." in written(content, tmp_path)[1]


def test_speed_that_is_not_clear_of_the_noise(tmp_path: Path) -> None:
    content = without(result(), "scaling") | {"noise": {"low": 0.85, "high": 1.15}, "pairs": []}
    assert "which is not clear of the noise" in written(content, tmp_path)[1]


def test_variables_are_sorted_by_how_far_they_are_apart(tmp_path: Path) -> None:
    content = without(result(), "speed", "scaling", "against")
    lines = [
        ("small", 9.0, 0.001, 5),
        ("equal", 0.0, 0.0, 0),
        ("farther", 1e-9, 0.5, 2),
        ("other shape", None, None, None),
    ]
    kinds = ("name", "absolute", "relative", "ulps")
    content["pairs"][2] |= {"a": "mirrored x 2", "variables": [dict(zip(kinds, line, strict=True)) for line in lines]}
    text = written(content, tmp_path)[1]
    text = text[text.index(f"mirrored x 2 – {NASTY} x 3: variables with the largest differences") :]
    assert text.index("other shape") < text.index("farther") < text.index("small")
    assert "equal" not in text


@pytest.mark.filterwarnings("error")
def test_pictures_of_equal_and_of_single_steps_warn_of_nothing(tmp_path: Path) -> None:
    written(all_equal(result()), tmp_path)
    one = all_equal(result(steps=1))
    for pair in one["pairs"]:
        pair["bound"] = None
    written(one, tmp_path)
