"""Whether all replicas still hold the same variables: cheap checksums, compared while a run goes on."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.cluster.channel import shared
from tfdist.errors import RanksDisagree
from tfdist.strategies.session import Session

__all__ = ["require_equal"]


def require_equal(session: Session, variables: Mapping[str, Any], when: str) -> None:
    """Compare every replica's copy of each variable. Every process calls it alike.

    Args:
        variables: by name.
        when: as in "after step 7".

    Raises:
        RanksDisagree: names the first variable that differs and who differs; on every rank.
    """
    if session.one_copy:
        return
    own = _checksums(session.strategy, variables)
    together = zlib.crc32(np.array(own, np.uint32).tobytes())
    if len(own) == 1 and len(set(session.channel.exchange("the checksum of the variables", together))) == 1:
        return
    # One list for each replica of all processes.
    everyone = [sums for rank in session.channel.exchange("the checksums of the variables", own) for sums in rank]
    here = len(own)
    for i, name in enumerate(variables):
        column = [sums[i] for sums in everyone]
        if len(set(column)) > 1:
            usual = max(column, key=column.count)
            others = [place for place, value in enumerate(column) if value != usual]
            all_of_them = _named(range(len(column)), here, count=True)
            raise shared(
                RanksDisagree(
                    f"{when}, {_named(others, here)} of {all_of_them} no longer hold(s) the same values of the "
                    f"variable {name!r} as the rest. Look for code in the task that changes variables outside of the "
                    "step; if there is none, suspect the memory or the network of that machine."
                )
            )


def _checksums(strategy: tf.distribute.Strategy, variables: Mapping[str, Any]) -> list[list[int]]:
    """For each local replica, one number for each variable."""
    held = [v.value if isinstance(v, keras.Variable) else v for v in variables.values()]
    copies = [strategy.experimental_local_results(v) for v in held]
    count = max((len(of_one) for of_one in copies), default=1)
    # What the trainer makes for itself has one copy in a process.
    columns = [[_crc(copy) for copy in of_one] * (count if len(of_one) == 1 else 1) for of_one in copies]
    return [list(replica) for replica in zip(*columns, strict=True)] or [[]]


def _crc(value: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(value.numpy()).reshape(-1).view(np.uint8).data)


def _named(places: Any, here: int, *, count: bool = False) -> str:
    """Replicas for people: they are ranks where each process has one."""
    word = "rank" if here == 1 else "replica"
    if count:
        return f"{len(list(places))} {word}s"
    return f"{word}{'s' if len(places) > 1 else ''} {', '.join(map(str, places))}"
