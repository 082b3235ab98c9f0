"""The end of a job: nobody leaves while another needs it, and one that fails ends them all. Real processes, no MPI."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.jobs import Ended, run_tf_config
from tfdist.cluster.channel import Alone
from tfdist.cluster.ending import end_together

START = (
    "import os, sys, time\n"
    "from pathlib import Path\n"
    "from tfdist.cluster import ending\n"
    "from tfdist.cluster.identity import identify\n"
    "from tfdist.cluster.tcp_channel import open_tcp\n"
    "channel = open_tcp(identify())\n"
    "wait = ending.end_together(channel)\n"
    "pids = channel.exchange('pids', os.getpid())\n"
    "def is_there(rank): return Path(f'/proc/{pids[rank]}/stat').read_text().rsplit(')')[-1].split()[0] != 'Z'\n"
)


def job(tmp_path: Path, program: str) -> list[Ended]:
    path = tmp_path / "program.py"
    path.write_text(START + program)
    return run_tf_config(2, path, timeout=300)


def test_one_that_is_done_stays_until_the_other_is(tmp_path: Path) -> None:
    program = (
        "if channel.rank == 0:\n"
        "    import atexit\n"
        "    atexit.register(print, 'at the end of its program', flush=True)\n"  # before the wait
        "else:\n"
        "    time.sleep(1)\n"
        "    print('there' if is_there(0) else 'gone')\n"
    )
    chief, other = job(tmp_path, program)
    assert (chief.code, chief.output) == (0, "at the end of its program\n")
    assert (other.code, other.output) == (0, "there\n")


def test_an_exception_that_nobody_catches_ends_the_job(tmp_path: Path) -> None:
    program = (
        "if channel.rank == 1:\n"
        "    raise ValueError('the sky is falling')\n"
        "channel.exchange('one that never comes', None)\n"
    )
    chief, other = job(tmp_path, program)
    assert (chief.code, other.code) == (1, 1)
    assert "ValueError: the sky is falling" in other.output
    ending = "rank 1 of 2 (host {}) failed with the error above; ending the job."
    assert other.output.endswith(ending.format(socket.gethostname()) + "\n")
    assert "rank 1 (127.0.0.1:" in chief.output
    assert ") has gone (" in chief.output


class Waiting(Alone):
    """Its other processes never arrive."""

    def __init__(self, outcomes: list[bool]) -> None:
        self.arrivals = 0
        self.outcomes = outcomes

    def arrive(self) -> Callable[[], bool]:
        self.arrivals += 1
        return lambda: len(self.outcomes) > 0 and self.outcomes.pop(0)


def waited(channel: Any, seconds: float) -> float:
    start = time.monotonic()
    end_together(channel)(seconds)
    return time.monotonic() - start


def test_the_wait_is_until_all_have_arrived_or_so_many_seconds() -> None:
    assert waited(Alone(), 60) < 5
    assert waited(Waiting([False, False, True]), 60) < 5
    never = Waiting([])
    assert [waited(never, seconds) >= seconds for seconds in (0.2, 0.1, 0.0)] == [True] * 3
    assert never.arrivals == 1, "one says it once"


def test_a_channel_has_one_end() -> None:
    channel = Alone()
    assert end_together(channel) is end_together(channel)
    assert end_together(channel) is not end_together(Alone())
