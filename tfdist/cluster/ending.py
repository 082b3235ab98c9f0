"""How the processes of an MPI job end: together when all is well, and at once when one of them fails."""

from __future__ import annotations

import atexit
import functools
import socket
import sys
import time
from types import TracebackType

from tfdist.cluster.channel import MpiChannel

__all__ = ["PATIENCE_SECONDS", "end_together"]

PATIENCE_SECONDS = 5.0
"""How long a process that is done waits for the others before it leaves, which fails their collectives with it."""


@functools.cache
def end_together(channel: MpiChannel) -> None:
    """From now on no process leaves while another needs it, and an exception that nobody catches ends the job.

    Call it after the backend has started, so that the wait comes before the backend's own clean-up at exit.
    """
    from mpi4py import MPI

    if channel.size == 1:
        return
    world = MPI.COMM_WORLD.Dup()

    @atexit.register
    def wait_for_the_others() -> None:
        # Not for ever: another rank may be in a collective that waits for this one. It fails when this one
        # leaves.
        arrived = world.Ibarrier()
        patience = time.monotonic() + PATIENCE_SECONDS
        while not arrived.Test() and time.monotonic() < patience:
            time.sleep(0.002)

    show = sys.excepthook

    def end_the_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        print(
            f"rank {channel.rank} of {channel.size} (host {socket.gethostname()}) failed with the error above; "
            "ending the job.",
            file=sys.stderr,
        )
        # The launcher forwards our output, and drops what it has not read when it ends the job.
        time.sleep(0.2)
        channel.abort(1)

    sys.excepthook = end_the_job
