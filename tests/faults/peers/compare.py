"""The same faults on tfdist and on loops that are written by hand, each restarted as its users do it.

    python -m tests.faults.peers.compare --repeats 3 --seed 1 --json out.json [--systems …] [--faults …]

A fault comes once per job, at a random moment after the first save. The verdicts:

- passes: the job ended with 0 within its restarts, with the bits of the same system's job without faults
- other bits: it ended with 0, and the weights are others
- fails safe: it ended with an error; all of its processes had ended by themselves
- ignores it: training went on to its end as if nothing had been asked
- hangs: `LIMIT` seconds after the fault some processes were still there
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.peers.data import KEEP, SAVE_EVERY
from tests.jobs import ROOT, free_ports, mpirun
from tfdist.evidence.chaos import quantiles
from tfdist.evidence.launched import Launched
from tfdist.evidence.marked import Process

LIMIT = 60.0
"""Seconds after a fault; what is still there then hangs."""

STEPS = 400
STARTS = 4
WHOLE = 400.0
"""Seconds for a job with all of its starts."""

HERE = Path(__file__).parent
FAULTS = (
    "kill of rank 1",
    "kill of the chief",
    "kill of all ranks",
    "SIGTERM to rank 1",
    "SIGSTOP of rank 1",
    "exception on rank 1",
    "kill of the chief during a save",
    "newest checkpoint truncated",
)
SYSTEMS = ("tfdist horovod", "horovod loop", "tfdist multi_worker_mirrored", "MultiWorkerMirrored loop")
_TRAINS = re.compile(r"training on ")
_DONE = re.compile(r"resumed from .*: (\d+) of \d+ steps are done")
_STEP = re.compile(r"\bstep (\d+)[/ ]|after step (\d+)")


@dataclasses.dataclass
class Trial:
    """One job with one fault."""

    system: str
    fault: str
    verdict: str = ""
    ended_after: float | None = None
    """Seconds from the fault until all processes of that start had ended."""
    training_after: float | None = None
    at_step: int = 0
    """The last step that had been printed or saved by then; at least so many were done."""
    resumed_from: int | None = None
    during_save: bool = False
    code: int | None = None
    starts: int = 1
    last_words: str = ""
    """Of a job that failed."""


def command(system: str, folder: Path) -> list[str]:
    """Starts a job, and starts it again when it fails."""
    if system.startswith("tfdist"):
        own = ["--processes", "2", "--max-restarts", str(STARTS - 1)]
        theirs = ["--backend", system.split()[1], "--task", f"{HERE / 'data.py'}:Raising"]
        theirs += ["--task-args", f"raise_when={folder / 'raise'}", "--steps", str(STEPS), "--validate-every", "0"]
        theirs += ["--checkpoint-dir", str(folder / "checkpoints"), "--save-every", str(SAVE_EVERY)]
        theirs += ["--keep", str(KEEP), "--report", str(folder / "report.json")]
        return [sys.executable, "-m", "tfdist", "launch", *own, "--", *theirs]
    loop = [sys.executable, "-m", f"tests.faults.peers.{'horovod' if 'horovod' in system else 'mwms'}_loop"]
    loop += [str(folder), str(STEPS)]
    if "horovod" in system:
        return [str(HERE / "horovod_restart.sh"), str(STARTS), mpirun(), *loop]
    return [str(HERE / "mwms_restart.sh"), str(STARTS), *map(str, free_ports(2)), *loop]


def facts(system: str, folder: Path) -> tuple[int, str]:
    """Steps and digest that a job ended with."""
    if system.startswith("tfdist"):
        report = json.loads((folder / "report.json").read_text())
        return report["steps"], report["state_sha256"]
    result = json.loads((folder / "result.json").read_text())
    return result["steps"], result["sha256"]


def saves(folder: Path) -> dict[int, Path]:
    """Visible checkpoints, by their numbers; what is being written is left out."""
    found: dict[int, Path] = {}
    if (folder / "checkpoints").exists():
        for path in (folder / "checkpoints").iterdir():
            if match := re.fullmatch(r"step-(\d+)", path.name):
                found[int(match[1])] = path / "variables.data-00000-of-00001"
            elif match := re.fullmatch(r"ckpt-(\d+)\.index", path.name):
                found[int(match[1])] = path.with_name(f"ckpt-{match[1]}.data-00000-of-00001")
    return found


def is_saving(folder: Path) -> bool:
    """Whether files are there that a save makes and renames or removes."""
    try:
        names = os.listdir(folder / "checkpoints")
    except FileNotFoundError:
        return False
    return any(name.startswith(".tmp-") or "temp" in name for name in names)


class Job:
    """A job of a system, what it prints, and the fault."""

    def __init__(self, system: str, fault: str, folder: Path, chance: random.Random) -> None:
        self.trial = Trial(system, fault)
        self._folder, self._chance = folder, chance
        self._job = Launched(command(system, folder), f"{folder.parent.name}-{folder.name}", folder / "output.txt")
        self._trains = 0
        self._trains_at = 0.0
        self._printed = 0
        self._done: int | None = None

    def run(self, right: tuple[int, str] | None) -> tuple[int, str] | None:
        """Run it with its fault; `right` is what it must end with. Without it, run it without a fault."""
        deadline = time.monotonic() + WHOLE
        try:
            if right is not None:
                self._wait_for_the_moment(deadline)
                if not self._inject():
                    self.trial.verdict = "hangs"
                    return None
            while self._job.code is None and time.monotonic() < deadline:
                self._poll()
            self._poll()
            self.trial.code = self._job.code
            if self._job.code is None:
                self.trial.verdict = "hangs"
                return None
            if self._job.code != 0:
                self.trial.verdict = "fails safe" if not self._job.left(10.0) else "leaves processes"
                return None
            result = facts(self.trial.system, self._folder)
            ignored = "SIGTERM" in self.trial.fault and self._trains == 1
            self.trial.verdict = "ignores it" if ignored else "passes" if right in (None, result) else "other bits"
            return result
        finally:
            self._job.close()
            if self.trial.verdict not in ("passes", "ignores it", ""):
                lines = (self._folder / "output.txt").read_text(errors="replace").splitlines()
                self.trial.last_words = "\n".join(line.partition(" ")[2][:300] for line in lines[-6:])

    def _poll(self, pause: float = 0.005) -> None:
        time.sleep(pause)
        for at, line in self._job.lines():
            if _TRAINS.search(line):
                self._trains, self._trains_at = self._trains + 1, at
            if found := _DONE.search(line):
                self._done = int(found[1])
            for step in _STEP.findall(line):
                self._printed = max(self._printed, *(int(number) for number in step if number))

    def _wait_for_the_moment(self, deadline: float) -> None:
        wanted, seen = self._chance.randint(2, 5), 0
        while self._job.code is None and time.monotonic() < deadline and seen < wanted:
            self._poll()
            seen = max(saves(self._folder), default=0) // (SAVE_EVERY if "tfdist" in self.trial.system else 1)
        if "during a save" in self.trial.fault:
            until = time.monotonic() + 20
            while not is_saving(self._folder) and time.monotonic() < until and self._job.code is None:
                self._poll(0.0005)
        else:
            until = time.monotonic() + self._chance.uniform(0, 0.3)
            while time.monotonic() < until:
                self._poll()

    def _inject(self) -> bool:
        """True where all processes of this start ended in time."""
        trial, present = self.trial, self._job.ranks()
        if len(present) < 2:
            raise AssertionError(f"{trial.system}: {len(present)} ranks are there, and the output is {self._folder}")
        trial.during_save = is_saving(self._folder)
        by_rank = {process.rank: process for process in present}
        number = {"SIGT": signal.SIGTERM, "SIGS": signal.SIGSTOP}.get(trial.fault[:4], signal.SIGKILL)
        victims: Sequence[Process] = present if "all" in trial.fault or "truncated" in trial.fault else ()
        if not victims:
            victims = [by_rank[0 if "chief" in trial.fault else 1]]
        trains, began = self._trains, time.monotonic()
        if "exception" in trial.fault:
            (self._folder / "raise").touch()
        else:
            for victim in victims:
                victim.send(number)
        last = max(saves(self._folder), default=0) * (1 if "tfdist" in trial.system else SAVE_EVERY)
        while any(process.alive for process in present):
            self._poll()
            if time.monotonic() - began > LIMIT:
                return False
        trial.ended_after = round(time.monotonic() - began, 3)
        trial.at_step = max(last, self._printed)
        if "truncated" in trial.fault:
            os.truncate(newest := saves(self._folder)[max(saves(self._folder))], newest.stat().st_size // 2)
        self._done = None
        while self._job.code is None and self._done is None and time.monotonic() - began < WHOLE:
            self._poll()
        if self._trains > trains:
            trial.training_after = round(self._trains_at - began, 3)
            trial.resumed_from = self._done
            trial.starts = self._trains
        return True


def table(trials: Sequence[Trial]) -> str:
    """Markdown: a row for each fault, a column for each system."""
    by_place: dict[tuple[str, str], list[Trial]] = collections.defaultdict(list)
    for trial in trials:
        by_place[trial.fault, trial.system].append(trial)
    systems = [system for system in SYSTEMS if any(trial.system == system for trial in trials)]
    lines = [f"| fault | {' | '.join(systems)} |", f"|---|{'---|' * len(systems)}"]
    for fault in FAULTS:
        cells = [_cell(by_place[fault, system]) for system in systems]
        if any(cells):
            lines.append(f"| {fault} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(trials: Sequence[Trial]) -> str:
    if not trials:
        return ""
    verdicts = collections.Counter(trial.verdict for trial in trials)
    words = ", ".join(f"{verdict} {count}/{len(trials)}" for verdict, count in verdicts.items())
    ended = quantiles(trial.ended_after for trial in trials)
    lost = quantiles(t.at_step - t.resumed_from for t in trials if t.resumed_from is not None)
    if ended:
        words += f"; ended after {ended['p50']:.1f} / {ended['p95']:.1f} / {ended['max']:.1f} s"
    return words + (f"; lost {max(0, lost['max']):.0f} steps at most" if lost else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    chance, trials = random.Random(options.seed), []
    folder = Path(tempfile.mkdtemp(prefix="tfdist-peers-"))
    references: dict[str, Any] = {}
    for system in options.systems:
        (place := folder / "reference").mkdir()
        references[system] = Job(system, "none", place, chance).run(None)
        if references[system] is None:
            raise SystemExit(f"{system} fails without faults; its output is in {place}")
        shutil.rmtree(place)
        print(f"{system}: {references[system]} without faults", flush=True)
    for repeat in range(options.repeats):
        for fault in options.faults:
            for system in options.systems:
                (place := folder / f"{len(trials)}").mkdir()
                job = Job(system, fault, place, chance)
                job.run(references[system])
                trials.append(job.trial)
                print(f"{repeat + 1}: {json.dumps(dataclasses.asdict(job.trial))}", flush=True)
                shutil.rmtree(place)
                if options.json is not None:
                    content = {"references": references, "trials": [dataclasses.asdict(trial) for trial in trials]}
                    options.json.write_text(json.dumps(content, indent=1) + "\n")
    shutil.rmtree(folder)
    print(table(trials))


if __name__ == "__main__":
    main()
