"""One job under `tfdist launch` that faults are injected into, from its first start to its end."""

from __future__ import annotations

import collections
import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tfdist.checkpoints.checkpoint import all_in, step_of
from tfdist.evidence.faults import KINDS, Fault, Injected
from tfdist.evidence.launched import Launched
from tfdist.evidence.marked import Process

__all__ = ["Lost", "Outcome", "Run", "Setup"]

_POLL_SECONDS = 0.005
_LOOK_SECONDS = 0.5
_TRAINS = re.compile(r"training on \w+, \d+ (?:replica|worker)")
_RESUMED = re.compile(r"resumed from .*: (\d+) of \d+ steps are done")
_AGAIN = "All start again in"
_REPLACED = re.compile(r"worker \d+ \(rank (\d+), .*It is started again in")
_TOLD_STEP = re.compile(r"\b(after|at) step (\d+)")
_UNDER_WAY = re.compile(r"\.tmp-step-(\d+)-")


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all runs of a campaign have in common."""

    command: Callable[[], Sequence[str]]
    """Starts the job, or goes on with it."""
    steps: int
    save_every: int
    asynchronous: bool
    """Whether workers are replaced one by one."""
    start_seconds: float
    """How long a start took without faults, until training began."""
    timeout: float


class Lost(Exception):
    """What must not happen has happened."""


@dataclasses.dataclass
class Outcome:
    """How a run has ended."""

    run: int
    seconds: float = 0.0
    starts: int = 1
    problems: list[str] = dataclasses.field(default_factory=list)


class Run:
    """A run. Takes faults from a queue until its job is done; those that it has no more time for stay there."""

    def __init__(
        self,
        number: int,
        setup: Setup,
        folder: Path,
        faults: collections.deque[Fault],
        most: int,
        tell: Callable[[Injected], None],
    ) -> None:
        """Prepare.

        Args:
            folder: for its checkpoints (in `checkpoints`), its report and its output.
            most: faults to inject at most.
            tell: hears of each fault once all is known of it.
        """
        self._number, self._setup, self._folder, self._faults = number, setup, folder, faults
        self._most, self._tell = most, tell
        self.injected: list[Injected] = []
        self.outcome = Outcome(number)
        self._job: Launched
        self._began = self._start_began = 0.0
        self._training_at: float | None = None
        self._ignores = False  # lines of a start that is ending
        self._fails = False  # whether its end is to be expected
        self._saved_before = 0
        self._noticed: set[int] = set()
        self._visible = 0
        self._under_way: int | None = None
        self._seen_saves: set[int] = set()
        self._untold: Injected | None = None

    def go(self) -> None:
        """Run to the end. What goes wrong is in `outcome.problems`."""
        self._began = time.monotonic()
        self._launch()
        try:
            while self._job.code is None:
                self._poll()
                if len(self.injected) < self._most and self._faults and self._is_due(self._faults[0]):
                    self._inject(self._faults[0])
                if time.monotonic() - max(self._start_began, self._training_at or 0.0) > self._setup.timeout:
                    raise Lost(f"it did not go on for {self._setup.timeout:.0f} s, and was ended")
            time.sleep(0.1)
            self._poll()
            if self._job.code != 0:
                raise Lost(f"exit code {self._job.code}")
            left = self._job.left(10.0)
            if left:
                raise Lost(f"left behind: processes {', '.join(str(process.pid) for process in left)}")
        except Lost as lost:
            self.outcome.problems.append(str(lost))
        finally:
            self._job.close()
            self._tell_last()
            for fault in self.injected:
                self._account(fault)
            self.outcome.seconds = round(time.monotonic() - self._began, 3)

    def _launch(self) -> None:
        self._start_began, self._training_at, self._ignores = time.monotonic(), None, False
        self._seen_saves.clear()
        self._job = Launched(
            self._setup.command(), f"{self._folder.parent.name}-{self._number}", self._folder / "output.txt"
        )

    def _poll(self) -> None:
        """Look what the job has printed and saved since the last time."""
        time.sleep(_POLL_SECONDS)
        for at, line in self._job.lines():
            self._read(at, line)
        if self._training_at is not None:
            self._look_at_saves()

    def _read(self, at: float, line: str) -> None:
        last = self.injected[-1] if self.injected else None
        waits = last is not None and last.training_after is None
        told = [int(step) - (word == "at") for word, step in _TOLD_STEP.findall(line)] if "tfdist: " in line else []
        if told and last is not None and waits:
            last.step, last.step_told = max(last.step if last.step_told else 0, *told), True
        if _AGAIN in line:
            if not self._fails:
                self.outcome.problems.append(f"it failed without a fault: {line}")
            self.outcome.starts += 1
            self._start_began, self._training_at, self._ignores, self._fails = at, None, False, False
            self._seen_saves.clear()
        elif replaced := _REPLACED.search(line):
            self._noticed.add(int(replaced[1]))
        elif resumed := _RESUMED.search(line):
            self._went_on(int(resumed[1]))
        elif self._ignores:
            return
        elif _TRAINS.search(line):
            self._look_at_saves()
            self._training_at, self._saved_before = at, self._visible
            if last is not None and waits and not self._replaces(last):
                last.training_after = round(at - self._began - last.seconds, 3)

    def _went_on(self, step: int) -> None:
        """A start has gone on from a step: the one after the last fault, and after those that came while it began."""
        # Of a start that a fault has just ended, the line is about the faults before.
        for fault in reversed(self.injected[:-1] if self._ignores else self.injected):
            if fault.resumed_from is not None or self._replaces(fault):
                break
            fault.resumed_from = step

    def _account(self, fault: Injected) -> None:
        """How many steps a fault has cost, and whether these were too many."""
        if fault.resumed_from is None and (fault.training_after is None or fault.saved > 0):
            return  # killed once more before it could tell
        fault.resumed_from = fault.resumed_from or 0
        fault.steps_lost = max(0, fault.step - fault.resumed_from)
        saves = KINDS[fault.kind].saves and fault.step_told and fault.phase not in ("start-up", "ending")
        # The save of one interval is done before that of the next begins.
        due = (fault.step // self._setup.save_every - 1) * self._setup.save_every
        if fault.resumed_from < max(fault.saved, due, fault.step if saves else 0):
            text = f"{fault.kind} at step {fault.step}: it went on from step {fault.resumed_from}, though {fault.saved}"
            self.outcome.problems.append(f"{text} was saved")

    def _look_at_saves(self) -> None:
        checkpoints = self._folder / "checkpoints"
        steps = [step_of(path) or 0 for path in all_in(checkpoints)] if checkpoints.exists() else []
        self._visible = max(steps, default=0)
        names = [path.name for path in checkpoints.glob(".tmp-step-*")] if checkpoints.exists() else []
        under_way = [int(found[1]) for found in map(_UNDER_WAY.match, names) if found]
        self._under_way = max(under_way, default=None)
        self._seen_saves |= {*steps, *under_way}

    @property
    def _phase(self) -> str:
        if self._training_at is None:
            return "start-up"
        if self._visible >= self._setup.steps:
            return "ending"
        if self._under_way is not None:
            return "during a save"
        return "first steps" if not self._new_saves else "between saves"

    @property
    def _new_saves(self) -> int:
        """Saves that this start has begun."""
        return sum(step > self._saved_before for step in self._seen_saves)

    def _is_due(self, fault: Fault) -> bool:
        now = time.monotonic()
        if fault.phase == "start-up":
            return now - self._start_began >= fault.moment * self._setup.start_seconds
        if self._training_at is None:
            return False
        if fault.phase == "first steps":
            return now - self._training_at >= 0.3 * fault.moment
        late = self._visible >= self._setup.steps // 2
        if self._new_saves < fault.saves and not late:
            return False
        if fault.phase == "during a save" and not late:
            if self._under_way is None:
                return False
            time.sleep(0.01 * fault.moment)
            return True
        time.sleep(0.2 * fault.moment)
        return True

    def _inject(self, fault: Fault) -> None:
        kind, present = KINDS[fault.kind], self._job.ranks()
        victims = present
        if self._setup.asynchronous and kind.to == "one":
            victims = [process for process in present if process.role == "worker"]
        if kind.to == "one":
            victims = victims[int(fault.victim * len(victims)) :][:1]
        if not victims:  # none has started yet
            return
        self._tell_last()
        self._look_at_saves()
        one = victims[0] if kind.to == "one" else None
        injected = Injected(
            kind=fault.kind,
            run=self._number,
            rank=one.rank if one is not None else None,
            role=one.role if one is not None else kind.to,
            phase=self._phase,
            step=max(self._visible, self._under_way or 0),
            saved=self._visible,
        )
        self._noticed.clear()
        self._ignores = self._fails = kind.to != "launcher" and not self._replaces(injected)
        injected.seconds = round(time.monotonic() - self._began, 3)
        if kind.to == "launcher":
            self._job.kill()
        else:
            for victim in victims:
                victim.send(kind.signal)
        self._faults.popleft()
        self.injected.append(injected)
        self._untold = injected
        self._wait_for_the_end(injected, present)

    def _replaces(self, injected: Injected) -> bool:
        """Whether the job goes on beside the fault."""
        return self._setup.asynchronous and injected.role == "worker" and injected.kind != "stop"

    def _wait_for_the_end(self, injected: Injected, present: Sequence[Process]) -> None:
        began, deadline = time.monotonic(), time.monotonic() + self._setup.timeout
        launcher_killed = injected.role == "launcher"
        while time.monotonic() < deadline:
            self._poll()
            if self._replaces(injected):
                over = injected.rank in self._noticed or self._job.code is not None
            elif launcher_killed:
                over = not self._job.left(0.0)
            else:
                over = not any(process.alive for process in present)
            if over:
                injected.ended_after = round(time.monotonic() - began, 3)
                break
        else:
            raise Lost(f"not all had ended {self._setup.timeout:.0f} s after {injected.kind}")
        if launcher_killed:
            self._job.close()
            self._poll()
            self.outcome.starts += 1
            self._launch()

    def _tell_last(self) -> None:
        if self._untold is not None:
            self._tell(self._untold)
            self._untold = None
