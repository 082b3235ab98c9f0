"""Starts MPI and Horovod, once per process, and ends them without leaving anyone waiting.

Importing this file starts nothing. `start()` is called by `HorovodStrategy()`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import os
import sys
from types import ModuleType

from tfdist.cluster import runtime
from tfdist.cluster.channel import MpiChannel, open_mpi
from tfdist.cluster.ending import end_together
from tfdist.cluster.identity import Identity, identify
from tfdist.errors import EnvironmentProblem, UsageError

__all__ = ["Started", "start"]

_DEFAULTS = {
    # Horovod warns once a rank is this late for a collective, and ends the job when it is much later. Its own
    # default never ends: a silent rank would keep the others waiting for ever.
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "600",
}

_BUILD = "python -m hvd_backend.build"


@dataclasses.dataclass(frozen=True)
class Started:
    """MPI and Horovod of this process."""

    identity: Identity
    channel: MpiChannel


@functools.cache
def start() -> Started:
    """Start MPI, then Horovod. Later calls return the same.

    Raises:
        EnvironmentProblem: Horovod is missing or does not fit, or the launcher, MPI and Horovod disagree on the job.
        UsageError: the processes were started by TF_CONFIG, not by MPI.
    """
    identity = identify()
    if identity.launcher == "tf_config":
        raise UsageError(
            f"TF_CONFIG describes {identity.size} processes, but Horovod's are started by MPI. Unset TF_CONFIG and "
            f"use: mpirun -np {identity.size} python …"
        )
    runtime.prepare(identity)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    # mpi4py first: if Horovod initializes MPI, it also finalizes it as soon as any rank shuts down.
    channel = open_mpi(identity)
    horovod = _load()
    horovod.init()
    if (horovod.rank(), horovod.size()) != (identity.rank, identity.size):
        raise EnvironmentProblem(
            f"MPI says rank {identity.rank} of {identity.size} processes, but Horovod says rank {horovod.rank()} of "
            f"{horovod.size()}: it was built for another MPI. Build it again with: {_BUILD}"
        )
    end_together(channel)  # after Horovod's start, so that it comes before Horovod's end
    return Started(identity, channel)


def _load() -> ModuleType:
    """Import Horovod's TensorFlow part.

    Raises:
        EnvironmentProblem: it is not installed, does not fit this TensorFlow, or was built without MPI.
    """
    if importlib.util.find_spec("horovod") is None:
        raise EnvironmentProblem(
            f"Horovod is not installed in this environment ({sys.prefix}). Build and install it with: {_BUILD}"
        )
    import tensorflow as tf

    try:
        horovod = importlib.import_module("horovod.tensorflow")
    # A library that does not load raises several kinds of errors, from TensorFlow and from Horovod.
    except Exception as error:
        raise EnvironmentProblem(
            f"the installed Horovod cannot be loaded with TensorFlow {tf.__version__} "
            f"({_first_line(error)}). Build it for this TensorFlow with: {_BUILD}"
        ) from None
    if not horovod.mpi_built():
        raise EnvironmentProblem(f"the installed Horovod was built without MPI. Build it again with: {_BUILD}")
    return horovod


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
