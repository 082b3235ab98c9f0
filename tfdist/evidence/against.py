"""A comparison beside an earlier one: what of the numbers has changed, and what has become slower."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist.errors import UsageError

__all__ = ["is_worse", "judge", "read", "require_alike"]

_SAME = ("task", "task_args", "steps", "global_batch_size", "accumulate", "seed", "reproducible")


def read(path: Path) -> dict[str, Any]:
    """An earlier comparison. Raises UsageError where the file is none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"against={str(path)!r} cannot be read: {error}. Give what tfdist compare --json wrote."
        ) from None
    if not isinstance(content, dict) or content.get("schema") != 1 or not _is_whole(content):
        raise UsageError(f"against={str(path)!r} is no comparison. Give what tfdist compare --json wrote.")
    return content


def _is_whole(content: Mapping[str, Any]) -> bool:
    """Whether all is there that a later comparison asks for."""
    arms = content.get("arms")
    names = ("name", "state_sha256", "weights_sha256", "losses", "metrics", "ratio")
    whole = isinstance(arms, list) and all(isinstance(arm, dict) and all(n in arm for n in names) for arm in arms)
    return whole and all(name in content for name in (*_SAME, "reference", "noise"))


def require_alike(path: Path | None, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UsageError where an earlier comparison trained something else, as far as is known of the one now."""
    for name in _SAME:
        if name in now and before.get(name) != now[name]:
            raise UsageError(
                f"{name}={now[name]!r}, but {str(path)!r} was made with {name}={before.get(name)!r}: the two do not "
                "compare. Use the same, or another file."
            )


def judge(path: Path | None, before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The object `against` of the report.

    Speeds compare as ratios to the reference of their own run, since machines and their load differ; the interval of a
    ratio of ratios is the widest that both allow, and what lies inside of the noise of either run counts for nothing.

    Raises:
        UsageError: the two did not train the same.
    """
    require_alike(path, before, now)
    arms = {arm["name"]: arm for arm in before["arms"]}
    changed, speeds = [], []
    for arm in now["arms"]:
        was = arms.get(arm["name"])
        if was is None or arm["asynchronous"]:
            continue
        for name in ("state_sha256", "weights_sha256", "losses", "metrics"):
            if was[name] != arm[name]:
                changed.append(f"{arm['name']}: {_change(name, was[name], arm[name])}")
        if arm["ratio"] and was["ratio"] and before["reference"] == now["reference"]:
            speeds.append(_speed(arm, was, before["noise"], now["noise"]))
    return {"file": str(path), "numbers": changed, "speed": speeds}


def is_worse(judged: Mapping[str, Any]) -> bool:
    """Whether numbers have changed, or an arm has become slower."""
    return bool(judged["numbers"]) or any(speed["verdict"] == "slower" for speed in judged["speed"])


def _change(name: str, was: Any, now: Any) -> str:
    if name == "losses" and len(was) == len(now):
        step = next(i for i, (a, b) in enumerate(zip(was, now, strict=True)) if a != b)
        return f"the loss of step {step + 1} was {was[step]}, and is {now[step]}"
    if name.endswith("sha256") and was and now:
        return f"{name} was {was[:12]}…, and is {now[:12]}…"
    return f"{name}: {was} before, {now} now"


def _speed(arm: Mapping[str, Any], was: Mapping[str, Any], *noises: Mapping[str, float] | None) -> dict[str, Any]:
    now, before = arm["ratio"], was["ratio"]
    ratio = {
        "median": now["median"] / before["median"],
        "low": now["low"] / before["high"],
        "high": now["high"] / before["low"],
    }
    low = min((noise["low"] for noise in noises if noise), default=1.0)
    high = max((noise["high"] for noise in noises if noise), default=1.0)
    verdict = "slower" if ratio["high"] < low else "faster" if ratio["low"] > high else "as before"
    return {"arm": arm["name"], "ratio": ratio, "verdict": verdict}
