"""One failing process ends the whole job: a peer that waits in a collective would wait for ever."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterator

from tfdist.cluster.causes import account, cause_of, is_aftermath
from tfdist.cluster.channel import Channel
from tfdist.errors import TfdistError

__all__ = ["ends_the_job"]

_AFTERMATH_SECONDS = 5.0


@contextlib.contextmanager
def ends_the_job(channel: Channel, where: Callable[[], str]) -> Iterator[None]:
    """Around what all processes do together outside of `channel.together`.

    In a job of one process an exception goes on as it is, and so does one that every process raises alike. Any other
    is told here, its cause last, and then the launcher is made to end all processes.

    Args:
        where: says how far this process had come, as in "at step 7".
    """
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, TfdistError) and error.shared:
            raise
        if channel.size == 1:
            error.add_note(where())
            raise
        rank = f"rank {channel.rank} of {channel.size} (host {socket.gethostname()})"
        if is_aftermath(error):
            time.sleep(_AFTERMATH_SECONDS)  # the process that failed first ends this one, after it has told why
            print(f"tfdist: {rank} lost another rank {where()}: {cause_of(error)}", file=sys.stderr, flush=True)
        else:
            if not isinstance(error, TfdistError):
                print(account(error), file=sys.stderr)
            print(f"tfdist: {rank} failed {where()}: {cause_of(error)}", file=sys.stderr, flush=True)
        time.sleep(0.2)  # the launcher forwards our output, and drops what it has not read when it ends the job
        channel.abort(error.exit_code if isinstance(error, TfdistError) else 1)
        raise
