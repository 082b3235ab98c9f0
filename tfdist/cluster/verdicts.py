"""What the silence, the end or the standstill of a process means for its job. Knows no sockets, threads or clocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from tfdist.cluster.places import Place, behind, named
from tfdist.errors import PeerLost, Stalled

__all__ = ["SILENCE_SECONDS", "Judge", "Kind", "Verdict"]

SILENCE_SECONDS = 15.0
"""How long a process may say nothing. A pause, or a cut of the network, of a few seconds must not end a job."""

_FRESH_SECONDS = 2.0  # of a word about its own place; of one that has said nothing since, silence decides

Kind = Literal["failed", "lost", "silent", "stalled", "abandoned"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The first cause for which a job ends."""

    kind: Kind
    rank: int
    """The first of those that the cause lies with."""
    code: int
    """What every process ends with."""
    message: str


class Judge:
    """Follows the processes that one process hears of. Its first verdict stays.

    Rank 0 hears of all; the others hear of rank 0 alone. Times are seconds of one monotonic clock.
    """

    def __init__(
        self, rank: int, hosts: Sequence[str], now: float, *, silence: float = SILENCE_SECONDS, stall: float = 0.0
    ) -> None:
        """Begin with all processes there.

        Args:
            rank: of the process that judges.
            hosts: of all ranks.
            silence: after how many seconds without a word a process counts as stopped or cut off.
            stall: after how many seconds a process that does not move on ends the job; 0: never.
        """
        self._hosts, self._stall, self._silence = list(hosts), stall, silence
        others = range(1, len(hosts)) if rank == 0 else (0,)
        self._heard = dict.fromkeys(others, now)
        self._places: dict[int, tuple[Place, float]] = {r: (Place(), now) for r in (rank, *others)}
        self.verdict: Verdict | None = None

    def beat(self, rank: int, place: Place, now: float) -> None:
        """A process, or the one that judges, has told where it is."""
        if rank in self._places:
            self._places[rank] = place, now
        if rank in self._heard:
            self._heard[rank] = now

    def goodbye(self, rank: int) -> None:
        """A process has done its part, and may go."""
        self._heard.pop(rank, None)
        self._places.pop(rank, None)

    def failed(self, rank: int, code: int, cause: str) -> None:
        """A process ends by itself, and says so."""
        self._decide("failed", [rank], code, cause)

    def abandoned(self, rank: int) -> None:
        """The launcher of a process has gone."""
        cause = f"{named([rank], self._hosts)} has lost its launcher {self._words(rank)}, and ends."
        self._decide("abandoned", [rank], PeerLost.exit_code, cause)

    def closed(self, rank: int) -> None:
        """The connection to a process is closed. After a goodbye that means nothing."""
        if rank in self._heard:
            cause = (
                f"{named([rank], self._hosts)} has died {self._words(rank)} without a word (killed? if "
                "memory ran out, by the system): its own output, or the launcher's last lines, tell the signal."
            )
            self._decide("lost", [rank], PeerLost.exit_code, cause)

    def slept(self, seconds: float) -> None:
        """The process that judges has itself stood still, and has heard nobody meanwhile."""
        self._heard = {rank: heard + seconds for rank, heard in self._heard.items()}
        self._places = {rank: (place, at + seconds) for rank, (place, at) in self._places.items()}

    def look(self, now: float) -> None:
        """Decide what time decides."""
        silent = [rank for rank, heard in self._heard.items() if now - heard > self._silence]
        if silent:
            cause = (
                f"{named(silent, self._hosts)} has said nothing for {self._silence:g} s {self._words(silent[0])}: "
                "stopped, or cut off from the network."
            )
            self._decide("silent", silent, PeerLost.exit_code, cause)
        places = self.places(now)
        if self._stall and places:
            last = behind(places)
            fresh = all(now - self._heard.get(rank, now) < _FRESH_SECONDS for rank in last)
            if fresh and all(places[rank].begun and places[rank].seconds > self._stall for rank in last):
                self._decide("stalled", last, Stalled.exit_code, self._standstill(last, places[last[0]]))

    def places(self, now: float) -> dict[int, Place]:
        """Where the processes are that have not said goodbye, each as it last told, and for how long by now."""
        return {
            rank: dataclasses.replace(place, seconds=place.seconds + max(0.0, now - at))
            for rank, (place, at) in self._places.items()
        }

    def _standstill(self, last: list[int], place: Place) -> str:
        limit = f"for {self._stall:g} s (stall_timeout) {place.words}"
        if len(self._hosts) == 1:
            return f"this process has not moved on {limit}."
        if len(last) == len(self._places) > 1:
            return f"no rank has moved on {limit}, and none is behind the others."
        return f"{named(last, self._hosts)} {'has' if len(last) == 1 else 'have'} not moved on {limit}; others wait."

    def _words(self, rank: int) -> str:
        """How far a process had come: as it told, or further, as steps of others show that needed it."""
        if rank not in self._places:
            return "at its end"
        place, newest = self._places[rank][0], max(place.step for place, _ in self._places.values())
        return f"after step {newest}" if newest > place.step else place.words

    def _decide(self, kind: Kind, ranks: Sequence[int], code: int, message: str) -> None:
        self.verdict = self.verdict or Verdict(kind, ranks[0], code, message)
