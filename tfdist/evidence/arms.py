"""The runs that `tfdist compare` starts, each as a user would start it, and what they leave."""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.cluster.mpirun import mpirun
from tfdist.evidence.launched import Launched
from tfdist.strategies.table import BACKENDS

__all__ = ["Arm", "Ran", "Runner"]


@dataclasses.dataclass(frozen=True)
class Arm:
    """A backend at a number of replicas."""

    backend: str
    replicas: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.backend} x {self.replicas}"

    @property
    def asynchronous(self) -> bool:
        """Whether its steps run side by side, so that no two runs of it have the same numbers."""
        return BACKENDS[self.backend].asynchronous

    @property
    def settings(self) -> dict[str, Any]:
        """What it gives to `Settings`."""
        several = BACKENDS[self.backend].devices and not BACKENDS[self.backend].processes
        return {"backend": self.backend} | ({"replicas": self.replicas} if several else {})

    def command(self, words: Sequence[str]) -> list[str]:
        """Start a Python program's words under what the backend needs."""
        own = [sys.executable, *words]
        if not BACKENDS[self.backend].processes:
            return own
        start = mpirun()
        assert start is not None
        # Beside the workers of an asynchronous backend, a chief and a parameter server.
        return [start, "-np", str(self.replicas + 2 * self.asynchronous), *own]


@dataclasses.dataclass(frozen=True)
class Ran:
    """A run that has ended."""

    arm: Arm
    report: dict[str, Any] | None
    """None where it has failed."""
    trace: dict[str, np.ndarray] | None
    problem: str
    """Why it failed, or empty."""


class Runner:
    """Starts runs one after the other, and keeps what they wrote in a folder."""

    def __init__(self, folder: Path, words: Sequence[str], settings: dict[str, Any], timeout: float) -> None:
        """Remember what all runs have in common.

        Args:
            words: of `tfdist train`, for the task and all settings but the backend.
            settings: the same as keyword arguments of `Settings`, with `task` and `task_args`.
            timeout: seconds after which a run is ended.
        """
        self._folder, self._words, self._settings, self._timeout = folder, list(words), settings, timeout
        self._count = 0

    def shown(self, arm: Arm) -> str:
        """The command of an arm as a person types it."""
        flags = [f"--{name} {value}" for name, value in arm.settings.items()]
        command = " ".join(["python", "-m", "tfdist", "train", *flags, *self._words])
        processes = arm.replicas + 2 * arm.asynchronous
        return f"mpirun -np {processes} {command}" if BACKENDS[arm.backend].processes else command

    def train(self, arm: Arm, *, trace: bool, steps: int) -> Ran:
        """Run an arm, with a trace or as it is."""
        report, traced = self._paths()
        flags = [word for name, value in arm.settings.items() for word in (f"--{name}", str(value))]
        words = ["-m", "tfdist", "train", *flags, *self._words, "--steps", str(steps), "--report", str(report)]
        if trace and not arm.asynchronous:
            words += ["--trace", str(traced), "--check-every", "0"]
        return self._run(arm, arm.command(words), report, traced)

    def variant(self, arm: Arm, *, steps: int, perturb: float = 0.0, alone: bool = False) -> Ran:
        """Run a variant of an arm (see `variant.py`)."""
        report, traced = self._paths()
        common = {name: value for name, value in self._settings.items() if name not in ("task", "task_args")}
        settings = {**common, **arm.settings, "steps": steps, "quiet": True}
        if perturb:
            settings["trace"] = str(traced)
        given = {
            "task": self._settings["task"],
            "task_args": self._settings["task_args"],
            "settings": settings,
            "report": str(report),
            "perturb": perturb,
            "alone": alone,
        }
        file = report.with_suffix(".settings.json")
        file.write_text(json.dumps(given))
        return self._run(arm, arm.command(["-m", "tfdist.evidence.variant", str(file)]), report, traced)

    def measure_collectives(self, arm: Arm) -> dict[str, Any] | None:
        """The time of all-reduces of several sizes on an arm; None where that fails."""
        report, traced = self._paths()
        words = ["-m", "tfdist.evidence.allreduce_program", str(report), arm.backend, str(arm.replicas)]
        return self._run(arm, arm.command(words), report, traced).report

    def _paths(self) -> tuple[Path, Path]:
        self._count += 1
        return self._folder / f"{self._count:03d}.json", self._folder / f"{self._count:03d}.npz"

    def _run(self, arm: Arm, command: Sequence[str], report: Path, trace: Path) -> Ran:
        log = report.with_suffix(".log")
        job = Launched(command, f"{self._folder.name}-{secrets.token_hex(4)}", log)
        deadline = time.monotonic() + self._timeout
        try:
            while job.code is None and time.monotonic() < deadline:
                time.sleep(0.05)
            code = job.code
        finally:
            job.close()
        told = json.loads(report.read_text()) if report.exists() else None
        seen = dict(np.load(trace)) if trace.exists() else None
        if code == 0 and told is not None:
            return Ran(arm, told, seen, "")
        end = f"was not done after {self._timeout:.0f} s" if code is None else f"ended with exit code {code}"
        return Ran(arm, None, seen, f"{end}: {_cause(log)}")


def _cause(log: Path) -> str:
    """What a failed run says last of itself."""
    lines = [line.partition(" ")[2].strip() for line in log.read_text(errors="replace").splitlines()]
    told = [line for line in lines if re.match(r"tfdist: |[\w.]*(Error|Exception)\b", line)]
    return told[-1] if told else next((line for line in reversed(lines) if line), "it printed nothing")
