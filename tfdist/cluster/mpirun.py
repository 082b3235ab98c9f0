"""Jobs of MPI under `tfdist launch`: the command of mpirun, and what its output says. Starts nothing itself."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tfdist.cluster.hosts import Host
from tfdist.cluster.launch import Member
from tfdist.cluster.watch import exit_code, how

__all__ = ["ABORT_SECONDS", "MPIRUN", "Mpi", "MpirunOutput", "mpirun", "version_of"]

MPIRUN = Member(0, "mpirun", 0, "localhost")
"""All that the launcher starts of an MPI job itself."""

ABORT_SECONDS = 10.0
"""How long mpirun may take to end a job once it has said that it must end."""

_PEER_LOST = 7
_KEPT_BYTES = 1 << 14
"""So much of mpirun's own last words is looked at."""


def mpirun() -> str | None:
    """The mpirun beside this Python, else the one on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def version_of(program: str) -> str:
    """What `mpirun --version` says; empty where it says nothing."""
    try:
        return subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


@dataclasses.dataclass(frozen=True)
class Mpi:
    """An mpirun, and how it reaches other hosts."""

    program: str
    version: str = ""
    """What `mpirun --version` says."""
    rsh: tuple[str, ...] | None = None
    """The command that runs others on another host; None: as mpirun does by itself."""
    hands_on: tuple[str, ...] = ()
    """Names of variables that processes on other hosts need."""

    def command(self, hosts: Sequence[Host], argv: Sequence[str]) -> tuple[str, ...]:
        """Start `argv` with the rank before each line that is printed, where this mpirun can write it.

        Args:
            hosts: where, and how many; localhost leaves the place to mpirun.
        """
        count = str(sum(host.processes for host in hosts))
        named = [host for host in hosts if host.name != "localhost"]
        places = ",".join(f"{host.name}:{host.processes}" for host in named)
        rsh = self.rsh if named else None
        found = re.search(r"Open MPI\)?\s+v?(\d+)", self.version)
        if found is None and "HYDRA" not in self.version:
            options = ["--host", places] if named else []
        elif found is None:  # MPICH and others with Hydra, which hand on all variables
            options = ["-prepend-rank"]
            options += ["-launcher", "ssh", "-launcher-exec", rsh[0]] if rsh else []
            options += ["-hosts", places] if named else []
        else:
            new = int(found[1]) >= 5
            options = ["--output", "tag"] if new else ["--tag-output"]
            agent = ["--prtemca", "plm_ssh_agent"] if new else ["--mca", "plm_rsh_agent"]
            options += [*agent, " ".join(rsh)] if rsh else []
            options += ["--host", places] if named else []
            options += [word for name in self.hands_on if named for word in ("-x", name)]
        return (self.program, *options, "-np", count, *argv)


_TAGS = re.compile(rb"\[\d+,(\d+)\]<std(?:out|err)>: ?|\[(\d+)\] ")
_ENDS = (
    # Open MPI 4 and 5, in the order of what they tell.
    re.compile(
        r"noticed that process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on signal (?P<n>\d+)"
    ),
    re.compile(r"first process to do so was: Process name: \[.*?(?P<rank>\d+)\] Exit code: (?P<code>\d+)"),
    re.compile(r"due to process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) calling .abort"),
    re.compile(r"MPI_ABORT was invoked on rank (?P<rank>\d+) .*?code:? (?P<code>\d+)"),
)
_ENDS_OF_HYDRA = re.compile(r"RUNNING AT (?P<host>\S+) = EXIT CODE: \d+ .*EXIT STRING: [^()]*\(signal (?P<n>\d+)\)")
_HOST_LOST = re.compile(r"lost communication with a remote daemon.*?Remote daemon: \S+ on node (?P<host>\S+)")


class MpirunOutput:
    """Takes the lines of an MPI job apart: who printed them, and what mpirun says of the job's end."""

    def __init__(self) -> None:
        self._words = ""
        self._must_end_by: float | None = None

    def read(self, line: bytes, now: float) -> tuple[str, bytes]:
        """Who has printed a line, as in `worker 1`, and the line without mpirun's mark."""
        tag = _TAGS.match(line)
        text = line[tag.end() :] if tag else line
        if tag is None or b"MPI_ABORT" in text or "MPI_ABORT" in self._words:
            self._listen(text, now)
        return (f"worker {int(tag[1] or tag[2])}" if tag else MPIRUN.role), text

    def _listen(self, text: bytes, now: float) -> None:
        self._words = " ".join(f"{self._words} {text.decode(errors='replace')}".split())[-_KEPT_BYTES:]
        if self._must_end_by is None and (self._end or _HOST_LOST.search(self._words)):
            self._must_end_by = now + ABORT_SECONDS

    @property
    def _end(self) -> re.Match[str] | None:
        return next((found for found in (end.search(self._words) for end in (*_ENDS, _ENDS_OF_HYDRA)) if found), None)

    def hangs(self, now: float) -> bool:
        """Whether mpirun has said that the job must end, and does not end it, as 5.0.11 where a host has just gone."""
        return self._must_end_by is not None and now >= self._must_end_by

    @property
    def refuses_root(self) -> bool:
        """Whether mpirun does not start anything for root."""
        return "attempt to run as root" in self._words

    def code(self, code: int) -> int:
        """How the job has ended, from how mpirun has.

        Open MPI 5.0.11 ends with 0 when it loses a host, and MPICH with n when a rank was killed by signal n.
        """
        if code == 0 and _HOST_LOST.search(self._words):
            return _PEER_LOST
        end = self._end
        return 128 + code if end and end.groupdict().get("n") == str(code) else code

    def aborted_with(self) -> int:
        """The exit code of a job that mpirun does not end."""
        for end in (*_ENDS, _ENDS_OF_HYDRA):
            given = found.groupdict() if (found := end.search(self._words)) else {}
            if given.get("n"):
                return 128 + int(given["n"])
            if given.get("code"):
                return int(given["code"])
        return _PEER_LOST

    def describe(self, member: Member, code: int) -> str:
        """Who failed, as mpirun tells it; else that mpirun itself did."""
        if self.refuses_root:
            return (
                "mpirun starts nothing for root unless OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "
                "are set."
            )
        lost = _HOST_LOST.search(self._words)
        if lost:
            return f"host {lost['host']} is lost: mpirun no longer reaches it."
        end = self._end
        if end is None:
            return f"mpirun failed: {how(code)}."
        given = end.groupdict()
        host = f", host {given['host']}" if given.get("host") else ""
        ending = how(-int(given["n"])) if given.get("n") else f"exit code {given.get('code') or exit_code(code)}"
        who = f"worker {given['rank']} (rank {given['rank']}{host})" if given.get("rank") else f"a worker ({host[2:]})"
        return f"{who} failed first: {ending}."
