"""Whether the processes of a job make the same variables: found at once, not as a hang or as wrong numbers later."""

from __future__ import annotations

import re

from tfdist.cluster.channel import Channel, shared
from tfdist.errors import RanksDisagree

__all__ = ["agree_on_variable", "unnumbered", "variable_path"]


def agree_on_variable(channel: Channel, path: str, shape: str, dtype: str) -> str:
    """Compare a variable that this process is about to make with those of the other processes.

    Args:
        path: the name scope and the name of the variable.

    Returns:
        Rank 0's path, on every rank.

    Raises:
        RanksDisagree: names the path, the first rank that differs from rank 0, and both shapes and dtypes.
    """
    made = channel.exchange("a new variable", [path, shape, dtype])
    for rank, other in enumerate(made):
        if [unnumbered(other[0]), *other[1:]] != [unnumbered(made[0][0]), *made[0][1:]]:
            raise shared(
                RanksDisagree(
                    f"the ranks make different variables: rank 0 makes {made[0][0]!r} of shape {made[0][1]} and dtype "
                    f"{made[0][2]}, rank {rank} makes {other[0]!r} of shape {other[1]} and dtype {other[2]}. Every "
                    "rank must build the same model; look for code that depends on the rank."
                )
            )
    return str(made[0][0])


def unnumbered(path: str) -> str:
    """A variable's path without the numbers that Keras gives to unnamed layers.

    They count all layers that the process has made, and a rank may have made another model before.
    """
    return re.sub(r"_\d+(?=/|_|$)", "", path)


def variable_path(scope: str, name: str | None) -> str:
    """A variable's path from TensorFlow's name scope and its name; Keras's scope ends with the name already."""
    name = name or "Variable"
    return scope if scope.rpartition("/")[2] == name else "/".join(filter(None, (scope, name)))
