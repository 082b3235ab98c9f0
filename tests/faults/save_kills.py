"""Kills processes while they save checkpoints, and looks whether what is visible afterwards is whole.

    python -m tests.faults.save_kills --points 300 --seed 1 --json out.json

One folder is used for the whole campaign, as by a job that is killed again and again: each child goes on from the
newest checkpoint. Most children are killed at the boundary of a system call of one save, each at another one, until all
have had their turn; the others save in a loop and are killed after a random time, also in the midst of a system call.
Children are forked from a process that has imported TensorFlow and runs no operation of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import signal
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.faults.ptrace import be_traced, run_to
from tfdist.checkpoints.checkpoint import all_in, read, step_of
from tfdist.checkpoints.manifest import NAME
from tfdist.checkpoints.store import Store

KEEP = 2
PHASES = (
    "before the temporary folder",
    "while the variables are written",
    "while the manifest is written, or before the rename",
    "after the rename",
    "while an older one is deleted",
    "after all",
)
_SECONDS_PER_CHILD = 60


@dataclasses.dataclass
class Result:
    """Of a campaign."""

    points: int
    seed: int
    boundaries: int
    """Of system calls in one save, with the deletion of an older checkpoint."""
    at_boundaries: int = 0
    """Children that were killed at one of them, each at another one."""
    at_random: int = 0
    """Children that were killed after a random time."""
    phases: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    """Where the kills fell."""
    checkpoints_read: int = 0
    """Whole ones, compared with what was saved."""
    failures: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


def campaign(points: int, seed: int) -> Result:
    """Kill `points` saving processes. Needs a process in which TensorFlow has not run any operation."""
    import tensorflow  # noqa: F401 - before the first child, so that it is imported once

    began, chance = time.monotonic(), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="tfdist-kills-") as name:
        job = _Job(Path(name))
        for _ in range(KEEP + 1):
            job.one_save(None)
        boundaries, _ = job.one_save(None)
        result = Result(points, seed, boundaries)
        count = min(points - points // 6, boundaries)
        # Spread over the whole save, each at another place of its part.
        edges = [1 + boundaries * index // count for index in range(count + 1)]
        kills: list[int | None] = [chance.randrange(a, b) for a, b in itertools.pairwise(edges)]
        kills += [None] * (points - count)
        chance.shuffle(kills)
        for kill in kills:
            if kill is None:
                what, status = "after a random time", job.many_saves(chance.uniform(0, 0.2))
                result.at_random += 1
            else:
                what = f"at boundary {kill} of {boundaries}"
                _, status = job.one_save(kill)
                result.at_boundaries += 1
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            # The number of system calls differs a little from save to save, so that the last are not always there.
            if not killed and (kill is None or status != 0):
                result.failures.append(f"killed {what}: the child ended by itself, with status {status}")
            result.phases[job.phase()] += 1
            try:
                result.checkpoints_read += job.check()
            except Exception as error:
                result.failures.append(f"killed {what}: {type(error).__name__}: {error}")
    result.seconds = round(time.monotonic() - began, 1)
    return result


class _Job:
    """A job that is killed and started again, and what is known of its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._told = -1  # the last step of which a child said that it is saved
        self._last: int | None = None  # the last step that the child was to save
        self._seen: set[int] = set()

    def one_save(self, boundary: int | None) -> tuple[int, int]:
        """A child saves one step and is killed at a boundary, or ends."""

        def child(store: Store, step: int, told: int) -> None:
            store.save(step, *content(step), score=score(step))  # TensorFlow starts here
            _tell(told, step)
            be_traced()
            store.save(step + 1, *content(step + 1), score=score(step + 1))
            _tell(told, step + 1)

        self._last = max(self._visible(), default=-1) + 2
        pid, pipe = self._fork(child)
        ended = run_to(pid, boundary)
        self._hear(pipe)
        return ended

    def many_saves(self, seconds: float) -> int:
        """A child saves step by step, and is killed so long after its first save."""

        def child(store: Store, step: int, told: int) -> None:
            while True:
                store.save(step, *content(step), score=score(step))
                _tell(told, step)
                step += 1

        self._last = None
        pid, pipe = self._fork(child)
        first = os.read(pipe, 8)
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        self._hear(pipe, first)
        return status

    def phase(self) -> str:
        """How far the child had come, by what it left."""
        names = os.listdir(self._folder)
        temporary = [name for name in names if name.startswith(".tmp-")]
        deleted = [name for name in names if name.startswith(".deleted-")]
        visible = self._visible()
        if max(visible) > self._told:  # renamed, and not yet told
            kept = len(set(visible[-KEEP:]) | {best(self._seen | set(visible))})
            return PHASES[4] if deleted else PHASES[3] if len(visible) > kept else PHASES[5]
        if temporary:
            return PHASES[2] if (self._folder / temporary[0] / NAME).exists() else PHASES[1]
        return PHASES[5] if self._told == self._last else PHASES[0]

    def check(self) -> int:
        """Read what is visible, as the next job would; returns how many checkpoints.

        Raises:
            AssertionError: what is wrong.
        """
        damaged: list[str] = []
        store = Store(self._folder, keep=KEEP, keep_best=True)
        newest = store.newest(damaged.append)
        store.close()
        visible = self._visible()
        _expect(not damaged, f"damaged: {damaged}")
        _expect(newest is not None and newest.manifest.step == max(visible), "the newest is not the newest visible one")
        _expect(max(visible) >= self._told, f"step {self._told} was said to be saved, and {max(visible)} is the newest")
        _expect(len(visible) >= KEEP, f"only {visible} are left")
        left = [name for name in os.listdir(self._folder) if name.startswith(".") and name != ".lock"]
        _expect(not left, f"left behind: {left}")
        self._seen |= set(visible)
        _expect(best(self._seen) in visible, f"the best, {best(self._seen)}, has gone")
        for path in all_in(self._folder):
            checkpoint = read(path)
            _expect(not checkpoint.problems(), f"{path.name}: {checkpoint.problems()}")
            tensors, state = content(checkpoint.manifest.step)
            found = checkpoint.tensors()
            same = {name: (a.shape, a.dtype, a.tobytes()) for name, a in tensors.items()}
            _expect(
                {name: (a.shape, a.dtype, a.tobytes()) for name, a in found.items()} == same, f"{path.name}: values"
            )
            _expect(checkpoint.manifest.state == state, f"{path.name}: state")
        return len(visible)

    def _visible(self) -> list[int]:
        return [step for step in map(step_of, all_in(self._folder)) if step is not None]

    def _fork(self, body: Callable[[Store, int, int], None]) -> tuple[int, int]:
        mine, its = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(_SECONDS_PER_CHILD)
                store = Store(self._folder, keep=KEEP, keep_best=True)
                newest = store.newest(_tell_all)
                body(store, 0 if newest is None else newest.manifest.step + 1, its)
                code = 0
            except BaseException as error:
                os.write(2, f"the child failed: {type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(code)
        os.close(its)
        return pid, mine

    def _hear(self, pipe: int, heard: bytes = b"") -> None:
        while data := os.read(pipe, 2**16):
            heard += data
        os.close(pipe)
        steps = [step for (step,) in struct.iter_unpack("q", heard)]
        self._seen.update(steps)
        self._told = max([self._told, *steps])


def content(step: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """What is saved at a step; tens of kilobytes, of another size each time."""
    random_numbers = np.random.default_rng(step)
    tensors = {
        "kernel": random_numbers.standard_normal((64 + step % 97, 64), np.float32),
        "half": random_numbers.standard_normal(33).astype(ml_dtypes.bfloat16),
        "flags": random_numbers.integers(0, 2, 5).astype(bool),
        "empty": np.zeros((0, 3), np.float64),
        "step": np.array(step, np.int64),
    }
    return tensors, {"step": step, "losses": random_numbers.standard_normal(step % 50).tolist()}


def score(step: int) -> float:
    """Of a step; seldom better than all before."""
    return random.Random(step).random()


def best(steps: set[int]) -> int:
    """Of the steps that there have been."""
    return min(steps, key=score)


def _tell(pipe: int, step: int) -> None:
    os.write(pipe, struct.pack("q", step))


def _tell_all(line: str) -> None:
    raise AssertionError(line)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = dataclasses.asdict(campaign(options.points, options.seed))
    text = json.dumps(result, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    raise SystemExit(1 if result["failures"] else 0)


if __name__ == "__main__":
    main()
