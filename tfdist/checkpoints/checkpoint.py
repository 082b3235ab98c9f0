"""A checkpoint that stands on the disk: is it whole, and what is in it."""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tfdist.checkpoints import manifest, variables
from tfdist.checkpoints.manifest import Manifest, TensorInfo
from tfdist.errors import CheckpointProblem, UsageError

__all__ = ["Checkpoint", "all_at", "all_in", "find", "name_of", "newest_of", "read", "step_of"]

_NAME = re.compile(r"step-([0-9]{9,18})")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest has been read."""

    path: Path
    manifest: Manifest

    def problems(self, *, quick: bool = False) -> list[str]:
        """What is wrong with its files; nothing means that it is whole. `quick` leaves the checksums out."""
        found = []
        step = step_of(self.path)
        if step is not None and step != self.manifest.step:
            found.append(f"it is of step {self.manifest.step}, and its folder says {step}")
        for name, right in self.manifest.files.items():
            try:
                info = os.lstat(self.path / name)
                if not stat.S_ISREG(info.st_mode):
                    found.append(f"{name} is not a file")
                elif info.st_size != right.bytes:
                    how = "truncated" if info.st_size < right.bytes else "too long"
                    found.append(f"{name} is {how}: {info.st_size} bytes of {right.bytes}")
                elif not quick and manifest.file_info(self.path / name).sha256 != right.sha256:
                    found.append(f"{name} has changed: its SHA-256 is wrong")
            except FileNotFoundError:
                found.append(f"{name} is missing")
            except OSError as error:
                found.append(f"{name} cannot be read: {error.strerror or error}")
        try:
            unexpected = set(os.listdir(self.path)) - set(self.manifest.files) - {manifest.NAME}
        except OSError as error:
            return [*found, f"the folder cannot be read: {error.strerror or error}"]
        return [*found, *(f"{name} does not belong there" for name in sorted(unexpected))]

    def tensors(self) -> dict[str, np.ndarray]:
        """All tensors, by name.

        Raises:
            CheckpointProblem: they cannot be read, or are not those of the manifest.
        """
        try:
            tensors = variables.read(self.path)
        except CheckpointProblem as error:
            raise damaged(self.path, [str(error)]) from None
        if {name: TensorInfo.of(tensor) for name, tensor in tensors.items()} != self.manifest.tensors:
            raise damaged(self.path, ["its variables are not those that the manifest names"])
        return tensors

    @property
    def bytes(self) -> int:
        """Size of its files, without the manifest."""
        return sum(info.bytes for info in self.manifest.files.values())


def read(path: Path) -> Checkpoint:
    """The checkpoint in a folder; its other files are not looked at.

    Raises:
        CheckpointProblem: what is wrong with its manifest, without the path.
    """
    return Checkpoint(path, Manifest.read(path))


def find(path: Path, tell: Callable[[str], None]) -> Checkpoint:
    """The checkpoint that a path means: itself, or the newest whole one in a folder of checkpoints.

    Args:
        path: A checkpoint's folder, or a folder of checkpoints.
        tell: Hears of each damaged one that is passed over.

    Raises:
        UsageError: there is no checkpoint.
        CheckpointProblem: it is damaged, or all are.
    """
    if all_at(path) == [path]:
        try:
            checkpoint = read(path)
        except CheckpointProblem as error:
            raise damaged(path, [str(error)]) from None
        problems = checkpoint.problems()
        if problems:
            raise damaged(path, problems)
        return checkpoint
    newest, _ = newest_of(path, tell)
    if newest is None:
        raise CheckpointProblem(
            f"all checkpoints in {str(path)!r} are damaged; tfdist checkpoints {path} --verify says how. "
            "Restore one from a copy, or begin anew in another folder."
        )
    return newest


def newest_of(folder: Path, tell: Callable[[str], None]) -> tuple[Checkpoint | None, list[Path]]:
    """The newest whole checkpoint, and the damaged ones that are newer; `tell` hears of each of these, and why."""
    passed: list[Path] = []
    for path in reversed(all_in(folder)):
        try:
            checkpoint = read(path)
            problems = checkpoint.problems()
        except CheckpointProblem as error:
            problems = [str(error)]
        else:
            if not problems:
                return checkpoint, passed
        if path.exists():  # else the job that writes here has just deleted it
            passed.append(path)
            tell(f"checkpoint {path} is damaged and passed over: {'; '.join(problems)}")
    return None, passed


def all_at(path: Path) -> list[Path]:
    """The checkpoint that a path is, or else those that are in it, whole or not, oldest first.

    Raises:
        UsageError: there is none.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise UsageError(f"{str(path)!r} {what}. Give the folder of a checkpoint, or a folder of checkpoints.")
    if step_of(path) is not None or (path / manifest.NAME).exists():
        return [path]
    found = all_in(path)
    if not found:
        raise UsageError(f"{str(path)!r} holds no checkpoint (step-000000001 and the like). Give another folder.")
    return found


def all_in(folder: Path) -> list[Path]:
    """Visible checkpoints of a folder, whole or not, oldest first."""
    found = [(step_of(path), path) for path in folder.iterdir() if step_of(path) is not None and path.is_dir()]
    return [path for _, path in sorted(found)]


def name_of(step: int) -> str:
    """The name of a step's checkpoint; by name they sort as by step, up to 999999999."""
    return f"step-{step:09d}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name; None where it is no such name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match and name_of(int(match[1])) == path.name else None


def damaged(path: Path, problems: list[str]) -> CheckpointProblem:
    """The error over a damaged checkpoint that somebody asked for."""
    return CheckpointProblem(
        f"checkpoint {path} is damaged: {'; '.join(problems)}. Restore it from a copy, or use another one."
    )
