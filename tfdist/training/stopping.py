"""Decisions from evaluations: stop early, lower the learning rate, remember the best. Made once, for all ranks."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from tfdist.cluster.channel import Channel
from tfdist.config import Settings
from tfdist.errors import UsageError

__all__ = ["Best", "Decision", "Decisions", "less_is_better"]

_LESS = ("loss", "error", "divergence", "entropy", "crossentropy", "perplexity", "mse", "mae", "rmse", "inaccuracy")
_MORE = ("accuracy", "acc", "auc", "precision", "recall", "f1", "iou", "similarity", "r2")
"""How the words of a metric's name may end."""


@dataclasses.dataclass(frozen=True)
class Best:
    """The best evaluation so far."""

    monitor: str
    value: float
    step: int
    epoch: int | None


@dataclasses.dataclass(frozen=True)
class Decision:
    """What follows from an evaluation."""

    improved: bool
    reduce_learning_rate: bool = False
    stop: str | None = None
    """Why training ends here."""


class Decisions:
    """Watches one metric. Every rank gives it the same evaluations; rank 0's numbers decide."""

    def __init__(self, settings: Settings, channel: Channel, splits: tuple[str, ...]) -> None:
        self._settings = settings
        self._channel = channel
        self._splits = splits
        self._waits = {"patience": 0, "plateau_patience": 0}
        self.best: Best | None = None
        self.active = bool(
            settings.patience or settings.plateau_patience or settings.restore_best or settings.monitor is not None
        )
        """Whether there is anything to decide."""
        if self.active and not splits:
            raise UsageError(
                "patience, plateau_patience, restore_best and monitor look at evaluations, and the task evaluates "
                "nothing (Task.evaluation_splits). Leave them out."
            )

    def state(self) -> dict[str, Any]:
        """What a run must keep to go on deciding, as JSON."""
        return {"best": None if self.best is None else dataclasses.asdict(self.best), "waits": dict(self._waits)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        self.best = None if state["best"] is None else Best(**state["best"])
        self._waits |= state["waits"]

    def after(self, step: int, epoch: int | None, metrics: dict[str, dict[str, float]]) -> Decision:
        """Decide after an evaluation of all splits; `metrics` by split. Every rank calls it alike.

        Raises:
            UsageError: the monitored metric is not there, or nobody knows whether less of it is better.
        """
        monitor, value = self._monitored(metrics)
        value = float(self._channel.exchange("the monitored value", value)[0])
        sign = 1.0 if less_is_better(monitor, self._settings.monitor_mode) else -1.0
        improved = not math.isnan(value) and (
            self.best is None or sign * value < sign * self.best.value - self._settings.min_delta
        )
        if improved:
            self.best = Best(monitor, value, step, epoch)
        reached = {}
        for name in self._waits:
            limit = getattr(self._settings, name)
            self._waits[name] = 0 if improved else self._waits[name] + 1
            reached[name] = limit is not None and self._waits[name] >= limit
        if reached["plateau_patience"]:
            self._waits["plateau_patience"] = 0
        stop = None
        if reached["patience"]:
            was = "was never a number" if self.best is None else f"was best at step {self.best.step}"
            stop = f"{monitor} {was} and has not been better in {self._settings.patience} evaluation(s) since"
        return Decision(improved, reached["plateau_patience"], stop)

    def check(self, results: dict[str, dict[str, Any]]) -> None:
        """Raises UsageError, before training, where the metric will not do; `results` of nothing, by split."""
        if self.active:
            less_is_better(self._monitored(results)[0], self._settings.monitor_mode)
        self.score(results)

    def score(self, metrics: dict[str, dict[str, float]]) -> float | None:
        """The value that keep_best looks at; None where there is none."""
        if self._settings.keep_best is None:
            return None
        value = float(_monitored(self._settings.keep_best, metrics, "keep_best")[1])
        return None if math.isnan(value) else value

    def _monitored(self, metrics: dict[str, dict[str, float]]) -> tuple[str, float]:
        return _monitored(self._settings.monitor or f"{self._splits[0]}/loss", metrics, "monitor")


def less_is_better(monitor: str, mode: str) -> bool:
    """Whether less of a metric is better, by the settings or by its name.

    Raises:
        UsageError: nobody knows.
    """
    if mode != "auto":
        return mode == "min"
    words = re.split(r"[^a-z0-9]+", monitor.rpartition("/")[2].lower())
    if any(word.endswith(_LESS) for word in words):
        return True
    if any(word.endswith(_MORE) for word in words):
        return False
    raise UsageError(f"monitor={monitor!r} does not tell whether less is better. Set monitor_mode to min or max.")


def _monitored(given: str, metrics: dict[str, dict[str, float]], setting: str) -> tuple[str, float]:
    split, _, name = given.partition("/")
    value = metrics.get(split, {}).get(name)
    if not isinstance(value, float | int):
        known = [f"{s}/{n}" for s, values in metrics.items() for n in values]
        raise UsageError(
            f"{setting}={given!r} is not a number that is evaluated. There are {', '.join(known) or 'none'}."
        )
    return given, value
