"""What an all-reduce costs with more replicas or on another network, by the formula of latency and bandwidth.

With α seconds for each message, β for each byte that travels and γ for each byte that is added, over p replicas that
hold n bytes each (R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective Communication Operations in MPICH,
International Journal of High Performance Computing Applications 19(1), 2005):

    ring                    2(p−1)·α + 2n(p−1)/p·β + n(p−1)/p·γ
    recursive doubling      lg p·(α + nβ + nγ), with two steps more where p is no power of two

Times do not tell β and γ apart: at any p, both stand before n. So β here holds γ too: β + γ/2 where a ring is the
cheaper, β + γ under recursive doubling. With a bandwidth from a network's data sheet γ is left out.

A fitted α also holds what a backend costs in itself (its start, Horovod's cycle of half a millisecond), and the formula
counts that again for every message: with more replicas than were measured, predictions of small messages come out too
slow. Four ranks of Horovod took 0.9 ms for 1 KB where the fit of two said 1.4. Replicas of one process (`mirrored` on a
CPU) share no network, but cores: what they cost with more of them, the formula does not know.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import nnls  # type: ignore[import-untyped]

from tfdist.errors import UsageError

__all__ = ["FORMULA", "REPLICAS", "SOURCE", "Fit", "Point", "efficiency", "fit", "parse_network", "predict", "scaling"]

FORMULA = "T(n, p) = min(2(p−1)·α + 2n(p−1)/p·β, lg p·(α + nβ)); efficiency = step / (step + T)"
SOURCE = (
    "R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective Communication Operations in MPICH, "
    "International Journal of High Performance Computing Applications 19(1), 2005"
)
REPLICAS = tuple(1 << n for n in range(1, 13))
"""For which efficiency is predicted: 2, 4, … 4096."""

_MOST_FITS = 50


@dataclasses.dataclass(frozen=True)
class Point:
    """A measured all-reduce."""

    replicas: int
    bytes: int
    """That each replica holds."""
    seconds: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """What measured times say of a backend and of what it runs on."""

    alpha: float
    """Seconds for each message."""
    beta: float
    """Seconds for each byte."""
    error: float
    """Mean of |predicted / measured − 1|."""


def predict(alpha: float, beta: float, size: int, replicas: int) -> float:
    """Seconds of one all-reduce of `size` bytes, by the cheaper of the two algorithms; 0 with one replica."""
    return min(_seconds(ring, alpha, beta, size, replicas) for ring in (True, False))


def efficiency(step_seconds: float, message_bytes: int, replicas: int, alpha: float, beta: float) -> float:
    """Time of a step without communication over that with it, in weak scaling: step / (step + T).

    Each replica keeps its own batch size, so its step takes as long with more of them. The all-reduce begins when all
    gradients are there, and nothing else runs beside it. Waiting for the slowest replica is not in it.

    Args:
        step_seconds: of a step without communication.
        message_bytes: that each replica sends in a step.
    """
    return step_seconds / (step_seconds + predict(alpha, beta, message_bytes, replicas))


def fit(points: Sequence[Point]) -> Fit:
    """The α and β, neither negative, with the least Σ(predicted / measured − 1)² over the points.

    Each point counts as the algorithm that is the cheaper one there, which depends on what is to be found: fits and
    assignments follow each other until nothing changes, once from each algorithm at all points, and the better end is
    taken.

    Raises:
        ValueError: the points are too few to tell latency from bandwidth, or have times that cannot be.
    """
    if any(point.replicas < 2 or not 0 < point.seconds < math.inf for point in points):
        raise ValueError("a point needs two replicas or more, and a finite time above 0")
    if len({point.bytes for point in points}) < 2:
        raise ValueError("latency and bandwidth need all-reduces of two sizes or more")
    fits = [found for ring in (True, False) for found in _fits(points, ring)]
    return min(fits, key=lambda found: sum(_misses(found.alpha, found.beta, points) ** 2))


def _fits(points: Sequence[Point], ring: bool) -> list[Fit]:
    """The fits on the way to assignments that no longer change."""
    rings, fits = [ring] * len(points), []
    for _ in range(_MOST_FITS):  # it may go round in circles
        alpha, beta = _solve(points, rings)
        fits.append(Fit(alpha, beta, float(np.mean(np.abs(_misses(alpha, beta, points))))))
        costs = [[_seconds(ring, alpha, beta, p.bytes, p.replicas) for ring in (True, False)] for p in points]
        before, rings = rings, [ring < doubling for ring, doubling in costs]
        if rings == before:
            break
    return fits


def _solve(points: Sequence[Point], rings: Sequence[bool]) -> tuple[float, float]:
    counts = np.array([_counts(ring, p.bytes, p.replicas) for ring, p in zip(rings, points, strict=True)])
    rows = counts / np.array([[p.seconds] for p in points])
    scales = np.max(rows, axis=0)  # latency and time of a byte are many orders apart
    found, _ = nnls(rows / scales, np.ones(len(points)))
    alpha, beta = found / scales
    return float(alpha), float(beta)


def _misses(alpha: float, beta: float, points: Sequence[Point]) -> np.ndarray:
    return np.array([predict(alpha, beta, p.bytes, p.replicas) / p.seconds - 1 for p in points])


def _seconds(ring: bool, alpha: float, beta: float, size: int, replicas: int) -> float:
    messages, size_sent = _counts(ring, size, replicas)
    return messages * alpha + size_sent * beta


def _counts(ring: bool, size: int, replicas: int) -> tuple[float, float]:
    """Messages and bytes that follow each other, by a ring or by recursive doubling."""
    if ring:
        return 2 * (replicas - 1), 2 * size * (replicas - 1) / replicas
    return _doublings(replicas), size * _doublings(replicas)


def _doublings(replicas: int) -> int:
    """Steps of recursive doubling. Replicas beyond a power of two hand theirs to others first, and get the sum last."""
    whole = replicas.bit_length() - 1
    return whole if replicas == 1 << whole else whole + 2


_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12} | {
    name: 8 * n for name, n in {"kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12}.items()
}
_BITS |= {f"{prefix}bps": _BITS[f"{prefix}bit"] for prefix in "kmgt"}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_WAY_OUT = "Write bandwidth and latency as in 100gbit,2us (gbit, mbit, gbyte or mbyte; us or ms)."


def parse_network(text: str) -> tuple[float, float]:
    """The α (seconds for each message) and β (seconds for each byte) of a network such as `100gbit,2us`.

    Case, spaces, the order of the two and a `/s` do not matter.

    Raises:
        UsageError: it is not a bandwidth above 0 and a latency.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([\d.]+(?:e[+-]?\d+)?)\s*([a-zµμ]+?)(?:/s(?:ec)?)?\s*", part.lower())
        try:
            number = float(match[1]) if match else math.nan
        except ValueError:
            number = math.nan
        if match is None or not math.isfinite(number):
            raise UsageError(f"network={text!r}: {part.strip()!r} is not a number with a unit. {_WAY_OUT}")
        unit = match[2]
        if unit in ("b", "kb", "mb", "gb", "tb"):
            raise UsageError(f"network={text!r}: {part.strip()!r} may mean bits or bytes. {_WAY_OUT}")
        kind = "bandwidth" if unit in _BITS else "latency"
        if unit not in _BITS and unit not in _SECONDS:
            raise UsageError(f"network={text!r}: the unit {unit!r} is unknown. {_WAY_OUT}")
        if kind in found:
            raise UsageError(f"network={text!r} has two values of {kind}. {_WAY_OUT}")
        found[kind] = number * (_BITS[unit] if kind == "bandwidth" else _SECONDS[unit])
    for kind in ("bandwidth", "latency"):
        if kind not in found:
            raise UsageError(f"network={text!r} has no {kind}. {_WAY_OUT}")
    if found["bandwidth"] == 0:
        raise UsageError(f"network={text!r}: the bandwidth must be above 0. {_WAY_OUT}")
    return found["latency"], 8 / found["bandwidth"]


def scaling(
    step_seconds: float, message_bytes: int, measured: Mapping[str, Sequence[Point]], networks: Sequence[str] = ()
) -> dict[str, Any]:
    """The object `scaling` of the report: what was fitted, and efficiencies for 2, 4, … 4096 replicas.

    A network's own α and β take the place of those measured, so it has one prediction, of backend `any`: that of a
    backend which costs nothing itself.

    Args:
        step_seconds: of a step without communication.
        message_bytes: that each replica sends in a step.
        measured: by backend.
        networks: as `parse_network` reads them.

    Raises:
        UsageError: a network cannot be read.
    """
    fits = {backend: fit(points) for backend, points in measured.items()}
    costs = [("as measured", backend, (found.alpha, found.beta)) for backend, found in fits.items()]
    costs += [(network, "any", parse_network(network)) for network in networks]
    return {
        "formula": FORMULA,
        "source": SOURCE,
        "message_bytes": message_bytes,
        "step_seconds": step_seconds,
        "fits": [_shown(backend, found, measured[backend]) for backend, found in fits.items()],
        "predictions": [
            {
                "network": network,
                "backend": backend,
                "efficiency": [
                    {"replicas": p, "value": efficiency(step_seconds, message_bytes, p, *cost)} for p in REPLICAS
                ],
            }
            for network, backend, cost in costs
        ],
    }


def _shown(backend: str, found: Fit, points: Sequence[Point]) -> dict[str, Any]:
    return {
        "backend": backend,
        "alpha_us": found.alpha * 1e6,
        "gbit_per_second": 8e-9 / found.beta if found.beta else None,
        "error": found.error,
        "points": [
            {
                "replicas": p.replicas,
                "bytes": p.bytes,
                "measured_us": p.seconds * 1e6,
                "fitted_us": predict(found.alpha, found.beta, p.bytes, p.replicas) * 1e6,
            }
            for p in points
        ],
    }
