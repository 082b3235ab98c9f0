"""The end of a process that cannot end in order: what it may still say and write, and how it leaves."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

__all__ = ["leave", "limit", "say", "write_stacks"]


def write_stacks(folder: Path, own: int, ranks: range | list[int]) -> str:
    """Write the Python stacks of this process, of rank `own`; returns where those of all these ranks are."""

    def name(rank: int) -> str:
        return f"tfdist-stall-rank-{rank}.txt"

    folder = folder if folder.is_dir() else Path()
    try:
        with (folder / name(own)).open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
    except OSError as error:
        return f"could not be written to {folder.absolute()} ({error.strerror})."
    return f"{', '.join(map(name, ranks))} in {folder.absolute()}"


def say(text: str) -> None:
    """Print a line, where anybody still reads."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def limit(seconds: float, code: int) -> None:
    """End this process after so many seconds, if nothing else has."""

    def end() -> None:
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=end, name="tfdist end", daemon=True).start()


def leave(code: int) -> None:
    """End this process now, from whatever thread."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
