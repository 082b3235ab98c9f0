"""Where the processes of a job are: the place of each in its training, and which of them the others wait for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

__all__ = ["BEFORE", "PHASES", "Place", "Seen", "behind", "named", "table"]

PHASES = ("applying the update", "waiting for input", "computing", "in the collective")
"""Phases of a step. The number of passed marks says which, by its remainder: a step passes one after the other."""

BEFORE = "before the first step"


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a process sees of itself at one moment."""

    step: int
    """Steps that it has completed."""
    marks: int
    """Marks that it has passed inside compiled loops. All processes of a job pass the same ones in the same order."""
    moves: int
    """What it has done besides, as far as it counts that: it has moved on where any of the three numbers has."""
    phase: str
    begun: bool
    """Whether it has come to its first step."""


@dataclasses.dataclass(frozen=True)
class Place:
    """What a process tells the others of itself."""

    step: int = 0
    marks: int = 0
    phase: str = BEFORE
    seconds: float = 0.0
    """Since it last moved on."""
    begun: bool = False

    @property
    def words(self) -> str:
        """As in "after step 17 (waiting for input)"."""
        return f"after step {self.step} ({self.phase})" if self.begun else BEFORE


def behind(places: Mapping[int, Place]) -> list[int]:
    """The ranks that all others wait for: those that have passed the fewest marks."""
    least = min(place.marks for place in places.values())
    return [rank for rank, place in places.items() if place.marks == least]


def named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """As in "rank 1 of 4 (host lab1)"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} of {len(hosts)} (host {hosts[ranks[0]]})"
    shown = ", ".join(f"{rank} (host {hosts[rank]})" for rank in ranks[:8])
    return f"ranks {shown}{', …' if len(ranks) > 8 else ''} of {len(hosts)}"


def table(places: Mapping[int, Place], hosts: Sequence[str]) -> str:
    """All places, a line each, for people."""
    rows = [("rank", "host", "step", "seconds", "phase")]
    for rank, place in sorted(places.items()):
        rows.append((str(rank), hosts[rank], str(place.step), f"{place.seconds:.1f}", place.phase))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows
    )
