"""From what cases gave to what is right and what is wrong."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from tfdist.evidence.cases import CASES, Case
from tfdist.evidence.runs import Job
from tfdist.strategies.table import BACKENDS

__all__ = ["REFERENCE", "Results", "Verdict", "judge", "plan"]

REFERENCE = "one_device"
"""The backend of one replica, which cases without a right value of their own are compared with."""

Results: TypeAlias = Mapping[tuple[str, int], list[dict[str, Any]]]
"""By backend and number of replicas: what each process wrote, by rank."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What one case gave on one backend at one number of replicas."""

    case: str
    backend: str
    replicas: int
    value: Any
    """Of the first process that is wrong, else of the first."""
    right: Any
    passed: bool
    error: str | None = None


def plan(backends: Sequence[str], replicas: Sequence[int], names: Sequence[str]) -> list[Job]:
    """The jobs to start: the reference first, and one job for each number of processes; none without a case."""
    counts = tuple(sorted(set(replicas)))
    jobs = [Job(REFERENCE, (1,), tuple(names))]
    for backend in backends:
        if backend != REFERENCE:
            starts = [(n,) for n in counts] if BACKENDS[backend].processes else [counts]
            jobs += [Job(backend, start, tuple(names)) for start in starts]
    return [job for job in jobs if any(CASES[name].applies(job.backend, n) for name in names for n in job.replicas)]


def judge(results: Results, jobs: Sequence[Job]) -> list[Verdict]:
    """A verdict for each case of each job at each number of replicas, case by case."""
    verdicts = []
    for name in dict.fromkeys(name for job in jobs for name in job.cases):
        first: dict[int, Any] = {}  # what the first backend gave at a number of replicas
        for job in jobs:
            for count in (n for n in job.replicas if name in job.cases and CASES[name].applies(job.backend, n)):
                processes = [process.get(name, {}) for process in results.get((job.backend, count), [{}])]
                right = _right(CASES[name], count, results, first)
                verdict = _verdict(CASES[name], job.backend, count, processes, right)
                if verdict.passed:
                    first.setdefault(count, verdict.value)
                verdicts.append(verdict)
    return verdicts


def _right(case: Case, count: int, results: Results, first: Mapping[int, Any]) -> Any:
    if callable(case.right):
        return case.right(count)
    if case.right == "one device":
        return results.get((REFERENCE, 1), [{}])[0].get(case.name, {}).get("value")
    return first.get(count)


def _verdict(case: Case, backend: str, count: int, processes: list[dict[str, Any]], right: Any) -> Verdict:
    values = [process.get("value") for process in processes]
    errors = [process.get("error", "no result") for process in processes if "value" not in process]
    right = values[0] if right is None and case.right == "equal" else right
    wrong = [value for value in values if not _equal(value, right, case.tolerance)]
    value = wrong[0] if wrong else values[0]
    return Verdict(case.name, backend, count, value, right, not wrong and not errors, errors[0] if errors else None)


def _equal(value: Any, right: Any, tolerance: float) -> bool:
    """Whether values agree, number by number, within the tolerance (of the number, where it is above 1)."""
    if not isinstance(value, list) or not isinstance(right, list) or len(value) != len(right):
        return False
    for mine, other in zip(value, right, strict=True):
        if isinstance(mine, str) or isinstance(other, str):
            if mine != other:
                return False
        elif not abs(mine - other) <= tolerance * max(1.0, abs(other)) or math.isnan(mine):
            return False
    return True
