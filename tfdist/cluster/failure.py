"""One failing process ends the whole job: a peer that waits in a collective would wait for ever."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterator

from tfdist.cluster import watchdog
from tfdist.cluster.causes import account, cause_of, is_aftermath
from tfdist.cluster.channel import Channel
from tfdist.errors import Interrupted, PeerLost, TfdistError

__all__ = ["ends_the_job"]

_AFTERMATH_SECONDS = 5.0
_LONG = 20.0  # for a watchdog that is about to end this process, which takes it a few seconds at most


@contextlib.contextmanager
def ends_the_job(channel: Channel, where: Callable[[], str]) -> Iterator[None]:
    """Around what all processes do together outside of `channel.together`.

    In a job of one process an exception goes on as it is, and so does one that every process raises alike. Any other
    is told here, its cause last, and then the launcher is made to end all processes. Where the processes are watched
    (see `watchdog`), only the first one that fails tells it as the cause.

    Args:
        where: says how far this process had come, as in "at step 7".
    """
    try:
        yield
    except GeneratorExit:
        raise
    except BaseException as error:
        if isinstance(error, TfdistError) and error.shared:
            raise
        if channel.size == 1:
            if not isinstance(error, KeyboardInterrupt):
                error.add_note(where())
            raise
        if isinstance(error, KeyboardInterrupt):
            watchdog.first_cause(channel, Interrupted.exit_code, f"interrupted {where()}")
            raise
        rank = f"rank {channel.rank} of {channel.size} (host {socket.gethostname()})"
        if is_aftermath(error):
            code = _after(channel, f"{rank} lost another rank {where()}: {cause_of(error)}")
        else:
            code = _first(channel, error, f"{rank} failed {where()}: {cause_of(error)}")
        time.sleep(0.2)  # the launcher forwards our output, and drops what it has not read when it ends the job
        channel.abort(code)
        raise


def _after(channel: Channel, line: str) -> int:
    """The process that failed first ends this one, after it has told why; else this one tells what it knows."""
    if watchdog.told_cause(channel, _AFTERMATH_SECONDS) is not None:
        time.sleep(_LONG)
    verdict = watchdog.first_cause(channel, PeerLost.exit_code, line)
    known = verdict is not None and (verdict.kind, verdict.rank) == ("failed", channel.rank)
    print(f"tfdist: {'' if known else 'secondary: '}{line}", file=sys.stderr, flush=True)
    return PeerLost.exit_code


def _first(channel: Channel, error: BaseException, line: str) -> int:
    code = error.exit_code if isinstance(error, TfdistError) else 1
    verdict = watchdog.first_cause(channel, code, line)
    if verdict is not None and (verdict.kind, verdict.rank) != ("failed", channel.rank):
        print(f"tfdist: secondary: {line}", file=sys.stderr, flush=True)
        time.sleep(_LONG)
        return verdict.code
    if not isinstance(error, TfdistError):
        print(account(error), file=sys.stderr, flush=True)
    if verdict is not None:
        time.sleep(0.2)  # so that what others say about it comes before
    print(f"tfdist: {line}", file=sys.stderr, flush=True)
    return code
