"""How the processes of a job end: together when all is well, and at once when one of them fails."""

from __future__ import annotations

import atexit
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from tfdist.cluster.channel import Channel

__all__ = ["PATIENCE_SECONDS", "end_on_sigterm", "end_together"]

PATIENCE_SECONDS = 5.0
"""How long a process that is done waits for the others before it leaves, which fails their collectives with it."""


_waits: dict[int, Callable[[float], None]] = {}


def end_together(channel: Channel) -> Callable[[float], None]:
    """From now on no process leaves while another needs it, and an exception that nobody catches ends the job.

    Call it after the backend has started, so that the wait comes before the backend's own clean-up at exit.

    Returns:
        The wait itself, for a process that comes to its end now: until the others have, or so many seconds.
    """
    if id(channel) in _waits:
        return _waits[id(channel)]
    arrived: list[Callable[[], bool]] = []

    def wait(seconds: float) -> None:
        if not arrived:
            arrived.append(channel.arrive())
        patience = time.monotonic() + seconds
        pause = 0.002
        while not arrived[0]() and time.monotonic() < patience:
            time.sleep(pause)
            pause = min(1.1 * pause, 0.1)

    _waits[id(channel)] = wait
    if channel.size == 1:
        return wait
    # Not for ever: another rank may be in a collective that waits for this one. It fails when this one leaves.
    atexit.register(wait, PATIENCE_SECONDS)

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
    return wait


def end_on_sigterm() -> None:
    """SIGTERM ends this process again, where TensorFlow has taken it for a notice of preemption that nobody reads.

    Call it after a backend has started TensorFlow's coordination service. A handler of the program's own stays.
    """
    # Python does not see the handler of another language, and says that there is none.
    ours = threading.current_thread() is threading.main_thread()
    if ours and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
