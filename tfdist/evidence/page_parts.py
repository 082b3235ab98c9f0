"""What the page of a comparison is put together from: escaped text, numbers, tables and pictures."""

from __future__ import annotations

import base64
import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfdist.evidence.picture_look import Look, finite, short
from tfdist.evidence.pictures import Picture, as_svg

__all__ = ["Html", "details", "facts", "figure", "interval", "number", "percent", "safe", "section", "table"]

NARROW = 719
"""Up to this width of the window, in CSS pixels, the narrow pictures are shown."""
_FIT_A_PHONE = 4  # columns


class Html(str):
    """Text that is HTML already. Everything else is escaped where it is put in."""

    __slots__ = ()


def safe(value: object) -> Html:
    """A value as HTML."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def number(value: Any, unit: str = "") -> Html:
    """A number with its unit, or a dash where there is none."""
    if value is None:
        return Html("–")
    return safe(f"{short(finite(value))}{unit}")


def interval(values: Mapping[str, Any] | None, unit: str = "", scale: float = 1.0, digits: int | None = None) -> Html:
    """A median, and below it the ends of its interval; with fixed digits after the point if `digits` is given."""
    if values is None:
        return Html("–")
    numbers = [finite(values[key]) * scale for key in ("median", "low", "high")]
    median, low, high = (short(n) if digits is None else f"{n:.{digits}f}" for n in numbers)
    return Html(f"<strong>{safe(median)}{safe(unit)}</strong><br><small>{safe(low)} to {safe(high)}</small>")


def percent(value: Any) -> Html:
    """A share as a percentage."""
    share = finite(value)
    return Html("–") if math.isnan(share) else safe(f"{100 * share:.1f} %")


def table(
    caption: str,
    head: Sequence[object],
    rows: Iterable[Sequence[object]],
    words: Sequence[int] = (),
    *,
    label: str = "",
) -> Html:
    """A table in a box that scrolls sideways by itself; the first column names the row, `words` are columns of text.

    A column in which no row has anything is left out.
    """
    rows = [list(row) for row in rows]
    kept = [i for i in range(len(head)) if i == 0 or any(row[i] not in ("–", "") for row in rows)]
    kind = ["" if i == 0 or i in words else ' class="number"' for i in range(len(head))]
    lines = [
        "<thead><tr>" + "".join(f'<th scope="col"{kind[i]}>{safe(head[i])}</th>' for i in kept) + "</tr></thead>",
        "<tbody>",
    ]
    for row in rows:
        cells = "".join(f"<td{kind[i]}>{safe(row[i])}</td>" for i in kept[1:])
        lines.append(f'<tr><th scope="row">{safe(row[0])}</th>{cells}</tr>')
    lines.append("</tbody>")
    # With a keyboard, a box scrolls only when it can have the focus.
    box = f'<div class="box" role="region" tabindex="0" aria-label="{safe(label or caption)}">'
    above = f'<p class="quiet">{safe(caption)}</p>\n' if caption else ""
    below = '\n<p class="quiet hint">This table scrolls sideways.</p>' if len(kept) > _FIT_A_PHONE else ""
    return Html(f"{above}{box}<table>\n" + "\n".join(lines) + f"\n</table></div>{below}")


def facts(values: Mapping[str, object]) -> Html:
    """Names and values, one below the other."""
    lines = "\n".join(f"<div><dt>{safe(name)}</dt><dd>{safe(value)}</dd></div>" for name, value in values.items())
    return Html(f"<dl>\n{lines}\n</dl>")


def details(summary: object, content: Html, *, opened: bool = False) -> Html:
    """Something that unfolds."""
    return Html(f"<details{' open' if opened else ''}><summary>{safe(summary)}</summary>\n{content}\n</details>")


def section(title: str, *content: Html) -> Html:
    """A section with a heading; nothing where there is no content."""
    there = [part for part in content if part]
    if not there:
        return Html("")
    return Html(f"<section>\n<h2>{safe(title)}</h2>\n" + "\n".join(there) + "\n</section>")


def figure(picture: Picture, result: Mapping[str, Any]) -> Html:
    """A picture in four variants, of which the browser shows one: light or dark, narrow or wide."""
    sources = []
    for narrow in (True, False):
        for dark in (True, False):
            svg = as_svg(picture, result, Look(dark=dark, narrow=narrow))
            conditions = [f"(max-width: {NARROW}px)"] * narrow + ["(prefers-color-scheme: dark)"] * dark
            sources.append((" and ".join(conditions), svg))
    lines = [f'<source media="{media}" srcset="{_data(svg)}"{_size(svg)}>' for media, svg in sources[:-1]]
    shown = sources[-1][1]
    alt = safe(f"{picture.title}. {picture.caption}")
    return Html(
        f"<figure>\n<h3>{safe(picture.title)}</h3>\n<picture>\n"
        + "\n".join(lines)
        + f'\n<img src="{_data(shown)}"{_size(shown)} alt="{alt}">\n</picture>\n'
        + f"<figcaption>{safe(picture.caption)}</figcaption>\n</figure>"
    )


def _data(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode("utf-8", "replace")).decode()


def _size(svg: str) -> str:
    """The picture's size as attributes, so that the page does not jump while it loads."""
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    return f' width="{float(found[1]):.0f}" height="{float(found[2]):.0f}"' if found else ""
