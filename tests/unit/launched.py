"""Launchers that run small scripts in place of training, for the tests of the supervisor."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.jobs import ROOT, environment

PROGRAM = Path(__file__).with_name("supervise_program.py")

PRELUDE = """\
import json, os, pathlib, signal, socket, subprocess, sys, time
rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))
config = json.loads(os.environ.get("TF_CONFIG", '{"task": {"type": "worker", "index": %s}}' % rank))
role, index = config["task"]["type"], config["task"]["index"]
def note(name, text=""):
    path = pathlib.Path(name + ".part")
    path.write_text(str(text))
    path.rename(name)
note(f"{role}{index}-{os.getpid()}.pid", os.getpid())
begun = len(list(pathlib.Path().glob(f"{role}{index}-*.pid")))
def wait_for(pattern, count=1):
    while len(list(pathlib.Path().glob(pattern))) < count:
        time.sleep(0.01)
"""


class Job:
    """A launcher, in a folder in which its processes leave their numbers."""

    def __init__(self, place: Path, body: str, **settings: Any) -> None:
        place.mkdir(exist_ok=True)
        self.folder = place
        (place / "stand_in.py").write_text(PRELUDE + body)
        settings = {"argv": ["stand_in.py"], "folder": str(place), **settings}
        self.launcher = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environment(None), "PYTHONPATH": str(ROOT)},
            cwd=place,
            start_new_session=True,
        )

    def ended(self, timeout: float = 30) -> tuple[int, bytes, str]:
        """Exit code, output, errors. No process is left then."""
        output, errors = self.launcher.communicate(timeout=timeout)
        self.none_is_left(0)
        return self.launcher.returncode, output, errors.decode(errors="replace")

    def wait_for(self, pattern: str, count: int = 1) -> list[Path]:
        deadline = time.monotonic() + 20
        while len(found := sorted(self.folder.glob(pattern))) < count:
            assert time.monotonic() < deadline and self.launcher.poll() is None, f"{pattern}: {found}"
            time.sleep(0.01)
        return found

    def none_is_left(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while left := [path for path in self.folder.glob("*.pid") if is_alive(int(path.read_text()))]:
            assert time.monotonic() < deadline, left
            time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def jobs_in(folder: Path) -> Iterator[Any]:
    """What starts jobs; ends those that a test has left."""
    jobs: list[Job] = []

    def start(body: str, name: str = "job", **settings: Any) -> Job:
        jobs.append(Job(folder / name, body, **settings))
        return jobs[-1]

    yield start
    for one in jobs:
        if one.launcher.poll() is None:
            one.launcher.kill()
            one.launcher.communicate()
        one.none_is_left(15)


def rsh(folder: Path, body: str) -> list[str]:
    """A stand-in for ssh."""
    path = folder / "rsh"
    path.write_text(f'#!/bin/sh\nhost="$1"\nshift\n{body}\n')
    path.chmod(0o755)
    return [str(path)]


def last(errors: str) -> str:
    return errors.splitlines()[-1]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
