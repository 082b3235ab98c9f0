"""The faults that `tfdist chaos` injects: what, to whom, when, and what followed. Knows no processes."""

from __future__ import annotations

import dataclasses
import random
import signal
from collections.abc import Sequence
from typing import Literal

__all__ = ["KINDS", "Fault", "Injected", "Kind", "Phase", "draw"]

Phase = Literal["start-up", "first steps", "during a save", "between saves"]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    signal: signal.Signals
    to: Literal["one", "all", "launcher"]
    says: str
    saves: bool = False
    """Whether the ranks save before they leave, so that no step is lost."""
    in_start_up: bool = True
    """Whether the job ends by itself when it comes before training."""


KINDS: dict[str, Kind] = {
    "kill": Kind(signal.SIGKILL, "one", "SIGKILL of one rank"),
    "kill-all": Kind(signal.SIGKILL, "all", "SIGKILL of all ranks"),
    "launcher": Kind(signal.SIGKILL, "launcher", "SIGKILL of tfdist launch, which is then started again"),
    "term": Kind(signal.SIGTERM, "one", "SIGTERM to one rank", saves=True),
    "usr1": Kind(signal.SIGUSR1, "one", "SIGUSR1 to one rank", saves=True),
    # Nobody watches ranks that have not met yet; what they wait in has its own, longer limits.
    "stop": Kind(signal.SIGSTOP, "one", "SIGSTOP of one rank", in_start_up=False),
}

_WEIGHTS: dict[Phase, float] = {"start-up": 0.15, "first steps": 0.2, "during a save": 0.35, "between saves": 0.3}
_MOST_SAVES = 4
"""So many saves at most lie between the start of training and a fault, since most of the time goes to starting."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault that is to be injected."""

    kind: str
    phase: Phase
    """In which it is to come; it comes later where that has passed before anybody could notice."""
    saves: int
    """How many saves of the present start are waited for."""
    moment: float
    """Where in its phase, from 0 to 1."""
    victim: float
    """Which of the ranks, from 0 to 1."""


@dataclasses.dataclass
class Injected:
    """A fault, and what followed. Seconds count from it."""

    kind: str
    run: int
    rank: int | None
    """Of the victim; None where it was no rank, or all."""
    role: str
    phase: str
    """What the job was doing: start-up, first steps, during a save, between saves, or ending."""
    step: int
    """Steps done by then, as a process told it; else (see step_told) those of the newest save that had begun."""
    step_told: bool = False
    saved: int = 0
    """The newest checkpoint that was visible."""
    seconds: float = 0.0
    """Since the start of the run."""
    ended_after: float | None = None
    """Until all others of the job had ended; where workers are replaced, until the loss was noticed."""
    training_after: float | None = None
    """Until training went on; None where the job was done by then, or the next fault came before."""
    resumed_from: int | None = None
    steps_lost: int | None = None


def draw(count: int, kinds: Sequence[str], seed: int) -> list[Fault]:
    """Faults at random moments; the same ones for the same arguments.

    The kinds come about equally often: each once, in random order, then each once again.
    """
    chance = random.Random(seed)
    faults: list[Fault] = []
    while len(faults) < count:
        for kind in chance.sample(list(kinds), len(kinds)):
            phases = [phase for phase in _WEIGHTS if KINDS[kind].in_start_up or phase != "start-up"]
            phase = chance.choices(phases, [_WEIGHTS[phase] for phase in phases])[0]
            saves = chance.randint(1, _MOST_SAVES)
            faults.append(Fault(kind, phase, saves, chance.random(), chance.random()))
    return faults[:count]
