"""The page of a comparison in a real browser: nothing runs out of the window, pictures load."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.comparison_result import all_equal, result, without
from tests.jobs import Job, environment
from tfdist.evidence.page import write_page

LIMIT = 120.0
"""Seconds for one start of the browser, which takes one or two on an idle machine."""

MEASURE = """
<script>
addEventListener("load", () => {
  const heading = document.getElementById("verdict"), box = heading.getBoundingClientRect();
  const there = document.elementFromPoint(box.left + 5, box.top + box.height / 2);
  const scrolling = [...document.querySelectorAll(".box")].filter((box) => box.scrollWidth > box.clientWidth);
  const measured = {
    window: innerWidth,
    content: document.documentElement.scrollWidth,
    pictures: [...document.images].map((image) => image.naturalWidth),
    shown: [...document.images].map((image) => Math.round(image.getBoundingClientRect().width)),
    verdict: heading.innerText,
    seen: heading.contains(there) && box.bottom < innerHeight,
    scrolling: scrolling.length,
    ground: getComputedStyle(document.body).backgroundColor,
  };
  parent.postMessage(JSON.stringify(measured), "*");
});
</script>
"""

# Chromium has no windows that are as narrow as a phone's, so the page is in a frame.
FRAME = """<!DOCTYPE html>
<html style="color-scheme: light dark"><body><pre id="measured"></pre>
<script>
addEventListener("message", (event) => { document.getElementById("measured").textContent = event.data; });
</script>
<iframe src="measured.html" style="border: 0; width: WIDTHpx; height: 800px"></iframe>
</body></html>
"""


def open_page(page: Path, width: int, *flags: str) -> dict[str, Any]:
    """What a browser measures where the page has this width."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("no chromium here: see scripts/test_tools.sh")
    page.with_name("measured.html").write_text(page.read_text().replace("</body>", MEASURE + "</body>"))
    frame = page.with_name("frame.html")
    frame.write_text(FRAME.replace("WIDTH", str(width)))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    command += [f"--user-data-dir={page.parent / 'profile'}", "--hide-scrollbars", *flags]
    # Virtual time goes on only while nothing loads, so the message has come before it is over.
    command += ["--window-size=1400,1000", "--virtual-time-budget=5000", "--dump-dom", frame.as_uri()]
    ended = Job(command, environment(None)).finish(LIMIT).check()
    found = re.search(r'<pre id="measured">(.+?)</pre>', ended.output)
    assert found, ended.output[-3000:]
    measured = json.loads(html.unescape(found[1]))
    assert isinstance(measured, dict)
    return measured


@pytest.fixture(scope="module")
def full_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp("full") / "page.html"
    write_page(result(), page)
    return page


@pytest.mark.parametrize(("width", "picture"), [(390, 358), (1280, 860)], ids=["phone", "desktop"])
def test_a_full_page(full_page: Path, width: int, picture: int) -> None:
    measured = open_page(full_page, width)
    assert measured["window"] == width
    assert measured["content"] <= width
    assert measured["pictures"] == measured["shown"] == [picture] * 5
    assert "Different" in measured["verdict"] and measured["seen"]
    assert measured["ground"] == "rgb(255, 255, 255)"
    if width == 390:
        assert measured["scrolling"] > 0, "wide tables scroll in their boxes"


def test_a_page_without_speed_in_the_dark(tmp_path: Path) -> None:
    content = all_equal(without(result(), "speed", "scaling", "against"))
    write_page(content, tmp_path / "page.html")
    measured = open_page(tmp_path / "page.html", 390, "--blink-settings=preferredColorScheme=0")
    assert measured["content"] <= 390
    assert measured["pictures"] == [358] * 2
    assert "Same bits" in measured["verdict"] and measured["seen"]
    assert measured["ground"] == "rgb(20, 23, 28)"
