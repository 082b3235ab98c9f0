"""The page of a comparison: one HTML file with everything in it, which needs no network and no scripts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist.evidence.page_parts import Html, facts, figure, safe, section
from tfdist.evidence.page_style import STYLE
from tfdist.evidence.page_tables import against, arms, fits, pairs, predictions, time_split, variables
from tfdist.evidence.picture_look import finite, short
from tfdist.evidence.pictures import pictures

__all__ = ["write_page"]

Result = Mapping[str, Any]

_VERDICTS = {
    "same bits": ("same", "=", "Same bits", "Every arm ends with exactly the same numbers, bit for bit."),
    "rounding": ("rounding", "≈", "Equal up to rounding", "The arms differ by no more than rounding explains."),
    "different": (
        "different",
        "≠",
        "Different",
        "The arms do not train the same numbers: rounding does not explain it.",
    ),
    "not comparable": (
        "unknown",
        "?",
        "Not comparable",
        "These arms cannot give the same numbers, so none are compared.",
    ),
}
"""Class, sign, heading and meaning of each verdict."""


def write_page(result: Result, path: Path) -> None:
    """Write the page of a result.

    Raises:
        EnvironmentProblem: there is no Matplotlib.
    """
    drawn = {picture.name: figure(picture, result) for picture in pictures(result)}
    scaling_picture = drawn.pop("predicted-scaling", Html(""))
    _, _, heading, _ = _VERDICTS[result["verdict"]]
    body = [
        _verdict(result),
        section("Arms", arms(result)),
        section("Do they agree", pairs(result), variables(result)),
        section("Pictures", *drawn.values(), time_split(result)),
        _scaling(result, scaling_picture),
        against(result),
        section("What ran", _settings(result), _commands(result)),
    ]
    title = safe(f"{heading}: {result['task']} · tfdist compare")
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )
    path.write_bytes(page.encode("utf-8", "replace"))  # names of files may hold what is no character


def _verdict(result: Result) -> Html:
    kind, sign, heading, meaning = _VERDICTS[result["verdict"]]
    size = f"{result['steps']} steps of {result['global_batch_size']} examples"
    problems = result.get("problems", ())
    lines = [
        f'<p class="quiet">tfdist compare · {safe(result["task"])} · {safe(size)}</p>',
        f'<h1 id="verdict" class="{kind}"><span aria-hidden="true">{sign}</span> {safe(heading)}</h1>',
        f'<p class="lead">{safe(meaning)}</p>',
        *(f'<p class="lead">{line}</p>' for line in map(_parting, result["pairs"]) if line),
        *(f'<p class="lead">Failed: {safe(problem)}</p>' for problem in problems),
        f'<p class="lead">{_fastest(result)}</p>',
    ]
    return Html("<header>\n" + "\n".join(lines) + "\n</header>")


def _parting(pair: Mapping[str, Any]) -> str:
    """Where an arm that gives other numbers leaves the reference first."""
    if pair["verdict"] != "different":
        return ""
    stage, first = pair["stage"], pair["first"]
    if stage is None and first is None:
        return f"<strong>{safe(pair['b'])}</strong> gives other numbers than {safe(pair['a'])}."
    line = f"<strong>{safe(pair['b'])}</strong> leaves {safe(pair['a'])} at step {(stage or first)['step']}"
    if stage is not None:
        line += f", in the {safe(stage['name'])}" if stage["name"] != "batch" else ", with another batch"
        line += f" on replica {stage['rank']}" if stage["rank"] is not None else ""
    variable = (stage or first)["variable"]
    return line + (f": <code>{safe(variable)}</code>." if variable else ".")


def _fastest(result: Result) -> Html:
    timed = [arm for arm in result["arms"] if arm["examples_per_second"]]
    if not timed:
        return Html('<span class="quiet">Speed was not measured.</span>')
    best = max(timed, key=lambda arm: arm["examples_per_second"]["median"])
    line = f"Fastest: <strong>{safe(best['name'])}</strong>, "
    line += f"{short(best['examples_per_second']['median'])} examples per second"
    if best["name"] == result["reference"] or not best["ratio"]:
        return Html(line + ".")
    low, middle, high = (finite(best["ratio"][key]) for key in ("low", "median", "high"))
    line += f", {middle:.2f} times {safe(result['reference'])} ({low:.2f} to {high:.2f})"
    if result["noise"] and low <= result["noise"]["high"]:
        line += ", which is not clear of the noise"
    return Html(line + ".")


def _scaling(result: Result, picture: Html) -> Html:
    scaling = result["scaling"]
    if not scaling:
        return Html("")
    label = Html(
        '<p><span class="label">Predictions</span> Efficiencies in this section are predicted, not measured.</p>'
    )
    formula = Html(f'<pre>{safe(scaling["formula"])}</pre>\n<p class="quiet">{safe(scaling["source"])}</p>')
    basis = facts(
        {
            "message of one step": f"{scaling['message_bytes']:,} bytes",
            "step without communication": f"{short(1e3 * finite(scaling['step_seconds']))} ms",
        }
    )
    return section("Predicted scaling", label, picture, formula, basis, fits(scaling), predictions(scaling))


def _settings(result: Result) -> Html:
    machine, versions = result["machine"], result["versions"]
    settings = facts(
        {
            "task": " ".join([result["task"], *map(str, result["task_args"])]),
            "steps": result["steps"],
            "global batch size": result["global_batch_size"],
            "accumulate": result["accumulate"],
            "seed": result["seed"],
            "reproducible": "yes" if result["reproducible"] else "no",
            "reference": result["reference"],
            "timed rounds": result["rounds"] or "none",
            "made": result["created"],
        }
    )
    place = facts({"host": machine["host"], "cores": machine["cores"], "GPUs": machine["gpus"], **versions})
    return Html(f"{settings}\n<h3>Machine and versions</h3>\n{place}")


def _commands(result: Result) -> Html:
    lines = [f"<h3>Commands</h3>\n<pre>{safe(result['command'])}</pre>"]
    for arm in result["arms"]:
        lines.append(f'<p class="quiet">{safe(arm["name"])}</p>\n<pre>{safe(arm["command"])}</pre>')
    return Html("\n".join(lines))
