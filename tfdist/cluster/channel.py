"""How the processes of one job talk to each other outside TensorFlow: small labelled JSON messages.

Used before training (do all ranks hold the same thing, did any rank fail?) and at its end, never in a step.
Every exchange carries a label; ranks that meet under different labels are out of step, which is an error that
names both instead of a hang.
"""

from __future__ import annotations

import functools
import json
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypedDict, TypeVar

import numpy as np

from tfdist import errors
from tfdist.cluster.causes import cause_of, task_traceback, unwrapped
from tfdist.cluster.identity import Identity
from tfdist.errors import EnvironmentProblem, RanksDisagree, TaskFailure, TfdistError

__all__ = ["Alone", "Channel", "Failure", "MpiChannel", "agreed", "open_mpi", "require_same", "shared", "together"]

T = TypeVar("T")


class Failure(TypedDict):
    """What a rank tells the others about an error."""

    kind: str  # the name of a class in tfdist.errors
    message: str
    host: str


class Channel(Protocol):
    """All processes of the job call the same methods in the same order."""

    rank: int
    size: int

    def exchange(self, label: str, value: Any, failure: Failure | None = None) -> list[Any]:
        """Every rank's `value` (anything JSON can hold), in the order of the ranks, on every rank.

        Raises:
            TfdistError: some rank came with a failure; the first one's, on every rank.
            RanksDisagree: the ranks did not come with the same label; on every rank.
        """

    def arrive(self) -> Callable[[], bool]:
        """Say that this process has come to the end. The result tells whether all have, or one has gone."""

    @property
    def address(self) -> str | None:
        """On rank 0: the address of its host that the others have reached, where the channel knows it."""

    def abort(self, code: int) -> None:
        """End all processes of the job at once with this exit code, as far as the launcher allows."""


class Alone:
    """The channel of a job with one process, or of processes that have no way to talk outside TensorFlow."""

    rank = 0
    size = 1
    address: str | None = None

    def exchange(self, label: str, value: Any, failure: Failure | None = None) -> list[Any]:
        if failure is not None:
            raise _error_of([failure])
        return [json.loads(json.dumps(value))]  # as it would come over a network

    def arrive(self) -> Callable[[], bool]:
        return lambda: True

    def abort(self, code: int) -> None:
        pass


class MpiChannel:
    """Messages over a duplicate of MPI's world, apart from Horovod's own traffic. Buffers of JSON, no pickle."""

    address: str | None = None

    def __init__(self) -> None:
        # Initializes MPI, and registers its finalization: Horovod must find MPI running, or it would finalize it
        # as soon as any rank shuts down.
        from mpi4py import MPI

        self._mpi = MPI
        self._world = MPI.COMM_WORLD.Dup()
        self._ends = MPI.COMM_WORLD.Dup()
        self.rank: int = self._world.Get_rank()
        self.size: int = self._world.Get_size()

    def __deepcopy__(self, memo: dict[int, Any]) -> MpiChannel:
        return self  # programs copy objects that hold a strategy; there is one group of processes

    def exchange(self, label: str, value: Any, failure: Failure | None = None) -> list[Any]:
        mine = np.frombuffer(json.dumps([label, value, failure]).encode(), np.uint8)
        lengths = np.zeros(self.size, np.int64)
        self._world.Allgather(np.array([mine.size], np.int64), lengths)
        everything = np.zeros(int(lengths.sum()), np.uint8)
        self._world.Allgatherv(mine, [everything, lengths])
        parts = np.split(everything, np.cumsum(lengths)[:-1])
        return agreed([json.loads(part.tobytes()) for part in parts])

    def arrive(self) -> Callable[[], bool]:
        return self._ends.Ibarrier().Test

    def abort(self, code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._mpi.COMM_WORLD.Abort(code)


@functools.cache
def open_mpi(identity: Identity) -> MpiChannel:
    """The channel of this MPI job; one per process.

    Raises:
        EnvironmentProblem: mpi4py is missing, or MPI does not see the job that the launcher started.
    """
    try:
        channel = MpiChannel()
    except (ImportError, RuntimeError) as error:
        raise EnvironmentProblem(
            f"this process was started by an MPI launcher, but mpi4py cannot be used ({error}). "
            "Install it with: pip install 'tfdist[horovod]'"
        ) from None
    if (channel.rank, channel.size) != (identity.rank, identity.size):
        if identity.launcher == "slurm":
            raise EnvironmentProblem(
                f"srun started {identity.size} processes, but MPI sees {channel.size}: SLURM's MPI plugin and the MPI "
                "library of this environment do not fit together. Start the job with mpirun inside sbatch or salloc "
                "(mpirun -np N python …), or with srun --mpi=pmix where `srun --mpi=list` shows a pmix that works."
            )
        raise EnvironmentProblem(
            f"the launcher says rank {identity.rank} of {identity.size} processes, but MPI says rank {channel.rank} of "
            f"{channel.size}: mpirun and the MPI library of this environment are not the same. Use the mpirun of the "
            "activated environment (source .venv/bin/activate), or unset the launcher's variables to run alone."
        )
    return channel


def agreed(messages: Sequence[tuple[str, Any, Failure | None]]) -> list[Any]:
    """The values of all ranks' messages (label, value, failure).

    Raises:
        TfdistError, RanksDisagree: as `Channel.exchange`.
    """
    labels, values, failures = zip(*messages, strict=True)
    if any(failures):
        raise _error_of(failures)
    for rank, other in enumerate(labels):
        if other != labels[0]:
            raise shared(
                RanksDisagree(
                    f"the ranks are out of step: rank 0 is at {labels[0]!r}, rank {rank} at {other!r}. Every rank "
                    "must build the same model and take the same path; look for code that depends on the rank."
                )
            )
    return list(values)


def together(channel: Channel, stage: str, work: Callable[[], T]) -> T:
    """Do `work` on every rank; if it fails on any, every rank raises the error of the lowest failing rank.

    `work` may exchange messages on the channel (a failing rank reaches the others there), but must not hold any
    other collective that a failing rank would leave them waiting in.
    """
    failure: Failure | None = None
    try:
        result = work()
    except KeyboardInterrupt:
        raise
    except BaseException as raised:  # the task's code may also call exit
        error = unwrapped(raised)
        if isinstance(error, TfdistError) and error.shared:
            raise error from None  # came out of an exchange, so every rank has it
        own = isinstance(error, TfdistError)
        failure = {
            "kind": _kind(type(error)) if own else TaskFailure.__name__,
            "message": str(error) if own else task_traceback(error) or cause_of(error),
            "host": socket.gethostname(),
        }
    channel.exchange(f"the end of {stage}", None, failure)
    return result


def require_same(channel: Channel, label: str, what: str, value: Any, way_out: str = "") -> None:
    """Check that every rank holds an equal `value`.

    Raises:
        RanksDisagree: names `what`, the first rank that differs from rank 0, and both values; on every rank.
    """
    values = channel.exchange(label, value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise shared(
                RanksDisagree(
                    f"{what} differs: rank 0 has {values[0]}, rank {rank} has {other}.{way_out and ' '}{way_out}"
                )
            )


def _kind(error: type[BaseException]) -> str:
    """The class of `tfdist.errors` that an error belongs to; a task may have made its own subclass."""
    return next(cls.__name__ for cls in error.__mro__ if cls.__module__ == errors.__name__)


def _error_of(failures: Sequence[Failure | None]) -> TfdistError:
    failed = [rank for rank, failure in enumerate(failures) if failure]
    first = failures[failed[0]]
    assert first is not None
    message = first["message"]
    if len(failed) < len(failures):
        message = f"rank {failed[0]} of {len(failures)} (host {first['host']}): {message}"
    return shared(getattr(errors, first["kind"])(message))


def shared(error: TfdistError) -> TfdistError:
    """The error, marked as one that every rank raises, so that the chief alone prints it."""
    error.shared = True
    return error
