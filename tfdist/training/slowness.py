"""Which ranks keep the others waiting, and with what: their input, or their computing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["slow_ranks"]

_TIMES = 1.5
_MILLISECONDS = 2.0
_SECONDS = 0.5
_PHASES = {"input_seconds": "waiting for its input", "compute_seconds": "in computing"}


def slow_ranks(ranks: Sequence[Mapping[str, Any]], steps: int) -> list[str]:
    """A line for each rank and phase that takes clearly longer than the others do; none where all are alike.

    Clearly is: 1.5 times the median of the others, and 2 ms a step and half a second in all more than that.

    Args:
        ranks: as `Report.ranks`.
        steps: that these seconds were spent in.
    """
    notes = []
    for mine in ranks if steps and len(ranks) > 1 else []:
        for key, phase in _PHASES.items():
            own = 1e3 * mine[key] / steps
            others = 1e3 * statistics.median(other[key] for other in ranks if other is not mine) / steps
            lost = own - others
            if own > _TIMES * others and lost > _MILLISECONDS and lost * steps > 1e3 * _SECONDS:
                notes.append(
                    f"rank {mine['rank']} (host {mine['host']}) was slow: {own:.1f} ms per step {phase}, where the "
                    f"others need {others:.1f} ms"
                )
    return notes
