"""A result as `tfdist compare` writes it, for the tests of its pictures and its page."""

from __future__ import annotations

import hashlib
import math
from typing import Any

BACKENDS = {"horovod x 2": "horovod", "multi_worker_mirrored x 2": "multi_worker_mirrored", "mirrored x 2": "mirrored"}
NASTY = "<b>weights & \"biases\"</b> 'x' $y$"
"""A name that must come out as it is."""


def result(steps: int = 50) -> dict[str, Any]:
    """Four arms: two with the reference's bits, one that differs by rounding, one with other numbers."""
    losses = [2.3 * math.exp(-step / 20) + 0.1 * math.sin(step) ** 2 for step in range(steps)]
    names = [*BACKENDS, f"{NASTY} x 3"]
    differences = [
        [0.0] * steps,
        [0.0 if step < 5 else 1e-9 * 1.1 ** min(step, 50) for step in range(steps)],
        [0.0 if step < 9 else 1e-3 * 1.1 ** min(step, 50) for step in range(steps)],
    ]
    curves = [losses, *([loss + d for loss, d in zip(losses, line, strict=True)] for line in differences)]
    return {
        "schema": 1,
        "created": "2026-12-01T00:30:00+00:00",
        "command": "tfdist compare --backends horovod,mirrored --task 'my.py:Task' && echo <done>",
        "verdict": "different",
        "task": "digits",
        "task_args": ["--width", NASTY],
        "steps": steps,
        "global_batch_size": 32,
        "accumulate": 1,
        "seed": 0,
        "reproducible": False,
        "machine": {"host": "node<1>", "cores": 2, "gpus": 0},
        "versions": {"tensorflow": "2.21.0", "keras": "3.15.1", "horovod": "0.28.1", "python": "3.11.2"},
        "rounds": 3,
        "reference": "horovod x 2",
        "noise": {"low": 0.97, "high": 1.03},
        "arms": [_arm(i, name, curve) for i, (name, curve) in enumerate(zip(names, curves, strict=True))],
        "pairs": [_pair(i, name, line) for i, (name, line) in enumerate(zip(names[1:], differences, strict=True))],
        "scaling": _scaling(),
        "against": {
            "file": "old & new.json",
            "numbers": ["horovod x 2: state_sha256 was 0123abcd"],
            "speed": [{"arm": "horovod x 2", "ratio": _interval(0.91, 0.03), "verdict": "slower"}],
        },
    }


def without(content: dict[str, Any], *parts: str) -> dict[str, Any]:
    """The same result without "speed", "scaling" or "against"."""
    if "speed" in parts:
        content |= {"rounds": 0, "noise": None}
        measured = ("step_ms", "examples_per_second", "ratio", "efficiency", "split_ms", "memory_mb", "startup_seconds")
        content["arms"] = [arm | dict.fromkeys(measured) for arm in content["arms"]]
    return content | {part: None for part in parts if part != "speed"}


def all_equal(content: dict[str, Any]) -> dict[str, Any]:
    """The same result, had all arms given the same bits."""
    first = content["arms"][0]
    for arm in content["arms"]:
        arm |= {key: first[key] for key in ("losses", "state_sha256", "weights_sha256", "metrics")}
    for pair in content["pairs"]:
        pair |= {"verdict": "same bits", "loss_difference": [0.0] * content["steps"], "first": None, "stage": None}
        pair["variables"] = [line | {"absolute": 0.0, "relative": 0.0, "ulps": 0} for line in pair["variables"]]
    return content | {"verdict": "same bits"}


def _interval(median: float, share: float) -> dict[str, float]:
    return {"median": median, "low": median * (1 - share), "high": median * (1 + share)}


def _arm(number: int, name: str, losses: list[float]) -> dict[str, Any]:
    milliseconds = [9.0, 10.7, 7.9, 12.4][number]
    return {
        "name": name,
        "backend": BACKENDS.get(name, "horovod"),
        "replicas": int(name[-1]),
        "command": f"mpirun -np 2 tfdist train --backend {BACKENDS.get(name, NASTY)} --report {number}.json",
        "asynchronous": False,
        "state_sha256": hashlib.sha256(str(max(0, number - 1)).encode()).hexdigest(),
        "weights_sha256": hashlib.sha256(f"w{max(0, number - 1)}".encode()).hexdigest(),
        "metrics": {"test": {"loss": 0.55, "accuracy": 0.8611}},
        "losses": losses,
        "step_ms": _interval(milliseconds, 0.04),
        "examples_per_second": _interval(32e3 / milliseconds, 0.04),
        "ratio": _interval(9.0 / milliseconds, 0.05),
        "efficiency": _interval(0.9 - 0.07 * number, 0.03),
        "split_ms": {"input": 0.3, "compute": 6.0, "communication": milliseconds - 7.5, "own": 1.2},
        "memory_mb": 900.0 + 31 * number,
        "startup_seconds": 7.5 + number,
        "seconds_to_quality": None,
    }


def _pair(number: int, name: str, differences: list[float]) -> dict[str, Any]:
    kernel, stage = "model/dense_layer_with_a_long_name/kernel", None
    if number == 2:
        stage = {"name": "reduced gradients", "step": 10, "variable": kernel, "rank": 1}
    return {
        "a": "horovod x 2",
        "b": name,
        "verdict": ["same bits", "rounding", "different"][number],
        "loss_difference": differences,
        "bound": [1e-7 * (1 + step) for step in range(len(differences))],
        "variables": [
            {"name": f"{kernel}:{i}", "absolute": number * 1e-6 / i, "relative": number * 2e-7 / i, "ulps": number * i}
            for i in range(1, 13)
        ],
        "first": {"step": 6, "variable": kernel} if number else None,
        "stage": stage,
        "note": "the ranks read other rows <here>" if stage else "",
    }


def _scaling() -> dict[str, Any]:
    def efficiency(message_ms: float) -> list[dict[str, float]]:
        return [{"replicas": 2**k, "value": 6.1 / (6.1 + message_ms * k**0.8)} for k in range(1, 13)]

    points = [
        {
            "replicas": n,
            "bytes": size,
            "measured_us": 30 + 9.5 * n + size / 1500,
            "fitted_us": 33 + 9.0 * n + size / 1480,
        }
        for n in (2, 4)
        for size in (4096, 65536, 1 << 20)
    ]
    fits = [("horovod", 12.0, 14.2, 0.11), ("multi_worker_mirrored", 18.0, 9.1, 0.18)]
    return {
        "formula": "T(n, p) = 2 (p - 1) α + 2 (p - 1) / p · n / B",
        "source": "ring all-reduce: Thakur & others, 2005",
        "message_bytes": 412000,
        "step_seconds": 0.0061,
        "fits": [
            {"backend": name, "alpha_us": alpha, "gbit_per_second": bits, "error": error, "points": points}
            for name, alpha, bits, error in fits
        ],
        "predictions": [
            {"network": "as measured", "backend": "horovod", "efficiency": efficiency(0.5)},
            {"network": "as measured", "backend": "multi_worker_mirrored", "efficiency": efficiency(0.9)},
            {"network": "100gbit,2us", "backend": "horovod", "efficiency": efficiency(0.1)},
            {"network": "100gbit,2us", "backend": "multi_worker_mirrored", "efficiency": efficiency(0.2)},
        ],
    }
