"""One job at a time in a folder of checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import weakref
from pathlib import Path

from tfdist.errors import CheckpointProblem

__all__ = ["Lock"]


class Lock:
    """Holds `folder/.lock` by flock, which the kernel gives back when the process ends, however it ends.

    The file stays, since removing it would let two jobs hold two files of this name. What stands in it is for people.

    Raises:
        CheckpointProblem: another job holds it.
        OSError: the file cannot be made, or not be locked.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = None
        path = folder / ".lock"
        while self._descriptor is None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Somebody may have removed the file, and others hold a new one.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                        self._descriptor = descriptor
            except BlockingIOError:
                raise CheckpointProblem(
                    f"checkpoint_dir={str(folder)!r} is in use by {_holder(descriptor)}. "
                    "Give another folder, or wait until that job has ended."
                ) from None
            finally:
                if self._descriptor is None:
                    os.close(descriptor)
        _held.add(self)
        try:
            os.ftruncate(self._descriptor, 0)
            holder = {"host": socket.gethostname(), "pid": os.getpid()}
            os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)
        except OSError:
            self.release()
            raise

    @property
    def held(self) -> bool:
        """Whether it is held still; a forked child does not hold its parent's."""
        return self._descriptor is not None

    def release(self) -> None:
        """Give it back, if it is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A forked child shares the lock, and would hold it when its parent has long been killed."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 1000, 0))
        return f"another job: process {int(holder['pid'])} on host {str(holder['host'])[:100]}"
    except (ValueError, TypeError, KeyError, OSError):  # it is just being written, or somebody has changed it
        return "another job"
