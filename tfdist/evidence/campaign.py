"""A campaign of faults: a job that is left alone, and jobs under faults, which must end as that one does."""

from __future__ import annotations

import collections
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfdist.checkpoints.checkpoint import find
from tfdist.commands import ChaosCommand
from tfdist.errors import EnvironmentProblem, TfdistError
from tfdist.evidence.chaos_run import Outcome, Run, Setup
from tfdist.evidence.faults import Injected, draw
from tfdist.evidence.launched import Launched
from tfdist.strategies.table import BACKENDS

__all__ = ["Campaign"]

_FAULTS_PER_RUN = 3
"""Few, since the launcher waits longer before each further start of a job."""

_MOST_RUNS_WITHOUT_FAULT = 3


class Campaign:
    """Runs of one command."""

    def __init__(self, command: ChaosCommand, folder: Path) -> None:
        """Prepare.

        Args:
            folder: for all that the runs write; of runs in which all was well nothing stays there.
        """
        self._command, self._folder = command, folder
        self._asynchronous = BACKENDS[command.backend].asynchronous
        self._start_seconds = 0.0
        self.injected: list[Injected] = []
        self.outcomes: list[Outcome] = []
        self.reference: dict[str, Any] = {}
        """What the job that is left alone ended with."""

    @property
    def problems(self) -> list[str]:
        """What went wrong, run by run."""
        return [f"run {outcome.run}: {problem}" for outcome in self.outcomes for problem in outcome.problems]

    def run_reference(self) -> None:
        """Run the job that is left alone. It saves nothing, so that saving is seen to change nothing, too.

        Raises:
            EnvironmentProblem: it fails.
        """
        folder = self._folder / "reference"
        folder.mkdir()
        began, trains_at, limit = time.monotonic(), None, self._command.timeout
        job = Launched(self._launch(folder), f"{self._folder.name}-0", folder / "output.txt")
        try:
            while job.code is None and time.monotonic() - began < limit:
                time.sleep(0.02)
                for at, line in job.lines():
                    trains_at = at if trains_at is None and "training on " in line else trains_at
            code = job.code
        finally:
            job.close()
        if code != 0 or trains_at is None:
            how = f"it was not done after timeout={limit:.0f} s" if code is None else f"exit code {code}"
            lines = (folder / "output.txt").read_text(errors="replace").splitlines()[-15:]
            last = "\n".join(line.partition(" ")[2] for line in lines)
            raise EnvironmentProblem(f"the job without faults failed: {how}. Its last lines:\n{last}")
        self.reference = self._facts(folder)
        self._start_seconds = trains_at - began

    def run_faults(self, began: Callable[[int], None], tell: Callable[[Injected], None]) -> None:
        """Run jobs until all faults have been injected.

        Args:
            began: told the number of each run.
            tell: hears of each fault once all is known of it.
        """
        faults = collections.deque(draw(self._command.kills, self._command.faults, self._command.seed))
        idle = 0
        while faults and idle < _MOST_RUNS_WITHOUT_FAULT:
            before = len(faults)
            began(len(self.outcomes) + 1)
            self._run(len(self.outcomes) + 1, faults, tell)
            idle = idle + 1 if len(faults) == before else 0
        if faults:
            self.outcomes[-1].problems.append(
                f"{len(faults)} faults were not injected, since training was over too soon. Raise steps."
            )

    def _run(self, number: int, faults: collections.deque[Any], tell: Callable[[Injected], None]) -> None:
        folder = self._folder / f"run-{number}"
        folder.mkdir()
        setup = Setup(
            command=lambda: self._launch(folder, saves=True),
            steps=self._command.steps,
            save_every=self._command.save_every,
            asynchronous=self._asynchronous,
            start_seconds=self._start_seconds,
            timeout=self._command.timeout,
        )
        run = Run(number, setup, folder, faults, _FAULTS_PER_RUN, tell)
        try:
            run.go()
        finally:
            self.injected += run.injected
            self.outcomes.append(run.outcome)
        if not run.outcome.problems:
            run.outcome.problems += self._differences(folder, run.injected)
        if not run.outcome.problems:
            shutil.rmtree(folder)

    def _differences(self, folder: Path, injected: Sequence[Injected]) -> list[str]:
        """What of a run that ended with 0 is not as it must be."""
        found: list[str] = []
        checkpoints = folder / "checkpoints"
        try:
            newest = find(checkpoints, found.append)
            facts = self._facts(folder)
        except (TfdistError, OSError, ValueError, KeyError) as error:
            return [*found, f"{type(error).__name__}: {error}"]
        if newest.manifest.step != self._command.steps:
            found.append(f"the newest checkpoint is of step {newest.manifest.step}")
        left = [path.name for path in checkpoints.iterdir() if path.name.startswith((".tmp-", ".deleted-"))]
        found += [f"{name} is left in checkpoint_dir" for name in left]
        updates = facts.pop("updates", None)
        for name, value in facts.items():
            if value != self.reference[name]:
                found.append(f"{name} is {value}, and without faults {self.reference[name]}")
        if updates is not None:
            # The step of a worker that dies right after its update is done once more.
            most = facts["steps"] + sum(fault.role == "worker" for fault in injected)
            if not facts["steps"] <= updates <= most:
                found.append(f"{updates} updates in {facts['steps']} steps")
        return found

    def _facts(self, folder: Path) -> dict[str, Any]:
        """What must be equal, from a report."""
        report = json.loads((folder / "report.json").read_text())
        names = ["steps", "examples_seen", "skipped_steps"]
        if self._asynchronous:
            return {name: report[name] for name in names} | {"updates": report["workers"]["updates"]}
        return {name: report[name] for name in [*names, "state_sha256"]}

    def _launch(self, folder: Path, *, saves: bool = False) -> list[str]:
        """The command that starts a job, or goes on with it."""
        command = self._command
        own = ["--processes", str(command.processes or (4 if self._asynchronous else 2))]
        theirs = ["--backend", command.backend, "--steps", str(command.steps), "--validate-every", "0"]
        theirs += ["--report", str(folder / "report.json")]
        if saves:
            own += ["--max-restarts", "1000", *(["--worker-restarts", "1000"] if self._asynchronous else [])]
            theirs += ["--checkpoint-dir", str(folder / "checkpoints"), "--save-every", str(command.save_every)]
        theirs += ["--task", command.task] if command.task is not None else []
        theirs += ["--task-args", *command.task_args] if command.task_args else []
        return [sys.executable, "-m", "tfdist", "launch", *own, "--", *theirs]
