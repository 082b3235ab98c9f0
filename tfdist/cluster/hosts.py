"""The hosts of a launch: from `node1,node2:2` or a hostfile to names and numbers of processes."""

from __future__ import annotations

import dataclasses
import re
import socket
from pathlib import Path

from tfdist.errors import UsageError

__all__ = ["MOST_PROCESSES", "Host", "hosts_of", "read_hostfile"]

MOST_PROCESSES = 4096

_LOOPBACK = ("localhost", "127.0.0.1")
# A host's name goes into the command of ssh: no name may be taken for an option, or for a user.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\Z")


@dataclasses.dataclass(frozen=True)
class Host:
    """A host and how many processes it gets."""

    name: str
    processes: int

    @property
    def is_this(self) -> bool:
        """Whether it is the machine that the launcher runs on."""
        own = socket.gethostname()
        return self.name in (*_LOOPBACK, own, own.partition(".")[0])


def hosts_of(processes: int | None, hosts: str | None, hostfile: Path | None) -> tuple[Host, ...]:
    """The hosts in the order of their ranks, from one of the three settings.

    Raises:
        UsageError: none or several of them are set, or one cannot be used.
    """
    settings = {"processes": processes, "hosts": hosts, "hostfile": hostfile}
    given = [f"{name}={value}" for name, value in settings.items() if value is not None]
    if not given:
        raise UsageError("nothing says how many processes to start. Add --processes N, --hosts or --hostfile.")
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} are both set, but each says what to start. Leave one of them out.")
    if processes is not None:
        found = [Host("localhost", processes)]
    elif hosts is not None:
        found = [_host(f"hosts={hosts}", *_apart(word)) for word in hosts.split(",") if word.strip()]
    else:
        assert hostfile is not None
        found = read_hostfile(hostfile)
    return _checked(given[0], found)


def read_hostfile(path: Path) -> list[Host]:
    """One host a line, as `host`, `host:2` or `host slots=2`; `#` begins a comment.

    Raises:
        UsageError: it cannot be read or understood; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"hostfile={path} cannot be read ({error}). Give a text file with one host a line.") from None
    found = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"hostfile={path} line {number}: {line.strip()!r}"
        name, slots = _apart(words[0])
        rest = words[1:]
        if rest and slots is None and rest[0].startswith("slots="):
            slots = rest.pop(0).removeprefix("slots=")
        if rest:
            raise UsageError(f"{where} is not understood. Write: host, host:2 or host slots=2.")
        found.append(_host(where, name, slots))
    return found


def _apart(word: str) -> tuple[str, str | None]:
    name, colon, count = word.strip().partition(":")
    return name, count if colon else None


def _host(where: str, name: str, count: str | None) -> Host:
    if not _NAME.match(name):
        raise UsageError(f"{where}: {name!r} is no name of a host. Write a name or an IPv4 address, and :N after it.")
    if count is None:
        return Host(name, 1)
    if not re.fullmatch(r"[0-9]{1,6}", count) or int(count) < 1:
        raise UsageError(f"{where}: {count!r} processes cannot be started. Write a whole number, 1 or more.")
    return Host(name, int(count))


def _checked(given: str, hosts: list[Host]) -> tuple[Host, ...]:
    names = [host.name for host in hosts]
    if not hosts:
        raise UsageError(f"{given} names no host. Write HOST or HOST:PROCESSES.")
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{given} names {name} twice. Write {name}:{names.count(name)} for two processes there.")
        if len(names) > 1 and name in _LOOPBACK:
            raise UsageError(f"{given}: the other hosts cannot reach {name}. Write the name they know this machine by.")
    total = sum(host.processes for host in hosts)
    if total > MOST_PROCESSES:
        raise UsageError(f"{given} starts {total} processes. Start at most {MOST_PROCESSES}.")
    return tuple(hosts)
