"""The checkpoints of one job in one folder: written whole or not at all, and deleted when they are no longer kept."""

from __future__ import annotations

import contextlib
import datetime
import errno
import math
import operator
import os
import re
import secrets
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfdist import __version__
from tfdist.checkpoints import manifest, variables
from tfdist.checkpoints.checkpoint import Checkpoint, all_in, name_of, newest_of, read, step_of
from tfdist.checkpoints.lock import Lock
from tfdist.checkpoints.manifest import Manifest, TensorInfo, file_info
from tfdist.errors import CheckpointProblem, UsageError

__all__ = ["Store"]

_LEFTOVER = re.compile(r"\.(tmp|deleted)-step-[0-9]{9,18}-[0-9a-f]{8}")


class Store:
    """The checkpoints of one job in one folder; one job at a time.

    Whoever opens it holds the folder until `close`, or until the process ends, however it ends.

    Args:
        folder: Made where there is none.
        keep: The newest checkpoints to keep.
        keep_best: Also keep the one with the best score.
        less_is_better: Which of two scores is the better one. Of equal ones it is the older.

    Raises:
        UsageError: it cannot be written.
        CheckpointProblem: another job has it.
    """

    def __init__(self, folder: Path, *, keep: int = 3, keep_best: bool = False, less_is_better: bool = True) -> None:
        self._folder = folder.absolute()
        self._keep, self._keep_best = keep, keep_best
        self._sign = 1.0 if less_is_better else -1.0
        self._mutex = threading.Lock()
        # What has been read of visible checkpoints, since they never change; None: damaged.
        self._known: dict[Path, Checkpoint | None] = {}
        try:
            _make(self._folder)
            self._lock = Lock(self._folder)
            try:
                self._remove_leftovers()
                self._try_to_write()
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            not_a_folder = isinstance(error, FileExistsError | NotADirectoryError)
            cause = "it is a file, or lies below one" if not_a_folder else _cause(error)
            raise UsageError(
                f"checkpoint_dir={str(folder)!r} cannot be written: {cause}. Give another folder."
            ) from None

    def save(
        self, step: int, tensors: Mapping[str, np.ndarray], state: Mapping[str, Any], *, score: float | None = None
    ) -> Path:
        """Write one checkpoint completely or not at all, then delete what is not kept; returns its folder.

        A whole checkpoint of the same step is left as it is, also its score; a damaged one is replaced. Deleting comes
        last, so that for a while there is one more than is kept. May be called from any one thread at a time.

        Args:
            step: What it is named by.
            tensors: By name, as they will be found by TensorFlow.
            state: See `Manifest.state`.
            score: What `keep_best` compares: the monitored value of an evaluation at this step. NaN is never the best.

        Raises:
            CheckpointProblem: it could not be written, and why. Nothing is left of it, and the others are as before.
        """
        step = operator.index(step)
        path = self._folder / name_of(step)
        with self._mutex:
            if not self._lock.held:
                raise CheckpointProblem(f"the checkpoint of step {step} was not saved: {self._folder} has been closed.")
            if not self._is_whole(path):
                try:
                    self._write(path, step, tensors, state, score)
                except (OSError, CheckpointProblem) as error:
                    raise CheckpointProblem(self._failure(step, tensors, error)) from None
            self._prune(path)
        return path

    def newest(self, tell: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that is whole; `tell` hears of each damaged one that is passed over, and why."""
        with self._mutex:
            newest, damaged = newest_of(self._folder, tell)
            self._known.update(dict.fromkeys(damaged))
            if newest is not None:
                self._known[newest.path] = newest
            return newest

    def close(self) -> None:
        """Give the folder back. May be called twice."""
        with self._mutex:
            self._lock.release()

    def _write(
        self, path: Path, step: int, tensors: Mapping[str, np.ndarray], state: Mapping[str, Any], score: float | None
    ) -> None:
        temporary = self._hidden("tmp", path)
        arrays = {name: np.asarray(tensor) for name, tensor in tensors.items()}
        moved = False
        try:
            temporary.mkdir()
            variables.write(temporary, arrays)
            files = {}
            for name in (manifest.INDEX, manifest.DATA):
                _to_disk(temporary / name)
                files[name] = file_info(temporary / name)
            written = Manifest(
                step=step,
                created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                tfdist=__version__,
                tensors={name: TensorInfo.of(array) for name, array in arrays.items()},
                files=files,
                state=dict(state),
                score=None if score is None else float(score),
            )
            (temporary / manifest.NAME).write_bytes(written.to_bytes())
            _to_disk(temporary / manifest.NAME)
            _to_disk(temporary)
            if path.exists():  # damaged, else we were not here
                os.rename(path, self._hidden("deleted", path))
            os.rename(temporary, path)
            moved = True
            _to_disk(self._folder)
        except BaseException:
            # What cannot be removed is hidden at least, and the next opening tries again.
            with contextlib.suppress(OSError):
                if moved:
                    self._delete(path)
                elif temporary.exists():
                    _remove(temporary)
            raise
        self._known[path] = Checkpoint(path, written)

    def _failure(self, step: int, tensors: Mapping[str, np.ndarray], error: OSError | CheckpointProblem) -> str:
        message = f"the checkpoint of step {step} could not be written to {self._folder}: {_cause(error)}"
        if "No space left" in message:
            needed = sum(np.asarray(tensor).nbytes for tensor in tensors.values())
            free = shutil.disk_usage(self._folder).free
            message += f" (it needs {needed / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free)"
            message += ". Make room, keep fewer, or give another checkpoint_dir"
        return f"{message}. Earlier checkpoints are as they were."

    def _prune(self, latest: Path) -> None:
        """Delete what is not kept. A damaged one does not count, and goes when all that are kept are newer."""
        try:
            visible = all_in(self._folder)
            whole = [path for path in visible if path == latest or self._looks_whole(path)]
            others = [path for path in whole if path != latest]
            kept = {latest, *others[max(0, len(others) - self._keep + 1) :]}
            oldest = min(step_of(path) or 0 for path in kept)
            if self._keep_best:
                kept |= self._best(whole)
            for path in visible:
                if path not in kept and (path in whole or (step_of(path) or 0) < oldest):
                    self._delete(path)
            self._remove_leftovers()
        except OSError as error:
            # The checkpoint is saved, so training goes on; the next save tries again.
            warnings.warn(f"old checkpoints in {self._folder} cannot be deleted: {_cause(error)}", stacklevel=3)

    def _best(self, whole: list[Path]) -> set[Path]:
        """The best of them, if any has a score."""
        scores = {}
        for path in whole:
            known = self._known.get(path)
            if known is not None and known.manifest.score is not None and not math.isnan(known.manifest.score):
                scores[path] = self._sign * known.manifest.score
        return {min(scores, key=lambda path: scores[path])} if scores else set()

    def _looks_whole(self, path: Path) -> bool:
        """By its manifest and the sizes of its files, and by what `newest` found."""
        if path not in self._known:
            try:
                self._known[path] = read(path)
            except CheckpointProblem:
                self._known[path] = None
        known = self._known[path]
        return known is not None and not known.problems(quick=True)

    def _is_whole(self, path: Path) -> bool:
        """By its checksums, now."""
        self._known.pop(path, None)
        return path.exists() and self._looks_whole(path) and not read(path).problems()

    def _delete(self, path: Path) -> None:
        """Make it invisible at once, then remove it: a half-removed one would look damaged."""
        hidden = self._hidden("deleted", path)
        os.rename(path, hidden)
        self._known.pop(path, None)
        _remove(hidden)

    def _remove_leftovers(self) -> None:
        """Of jobs that were killed: we hold the lock, so nobody works on them."""
        for path in list(self._folder.iterdir()):
            if _LEFTOVER.fullmatch(path.name):
                _remove(path)

    def _try_to_write(self) -> None:
        trial = self._hidden("tmp", self._folder / name_of(0))
        try:
            trial.mkdir()
            (trial / "trial").write_bytes(b"tfdist")
        finally:
            shutil.rmtree(trial, ignore_errors=True)

    def _hidden(self, kind: str, path: Path) -> Path:
        return self._folder / f".{kind}-{path.name}-{secrets.token_hex(4)}"


def _make(folder: Path) -> None:
    """Make a folder and those above it, so that they survive a power cut."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        _to_disk(path.parent)


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _to_disk(path: Path) -> None:
    """Wait until a file, or what a folder lists, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot do this for folders.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _cause(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error).rstrip(".")
