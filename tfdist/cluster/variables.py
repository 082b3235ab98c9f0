"""Whether the processes of a job make the same variables: found at once, not as a hang or as wrong numbers later."""

from __future__ import annotations

from tfdist.cluster.channel import Channel
from tfdist.errors import RanksDisagree

__all__ = ["check_same_variable"]


def check_same_variable(channel: Channel, path: str, shape: str, dtype: str) -> None:
    """Compare a variable that this process is about to make with those of the other processes.

    Args:
        path: the name scope and the name of the variable.

    Raises:
        RanksDisagree: names the path, the first rank that differs from rank 0, and both shapes and dtypes.
    """
    made = channel.exchange("a new variable", [path, shape, dtype])
    for rank, other in enumerate(made):
        if other != made[0]:
            error = RanksDisagree(
                f"the ranks make different variables: rank 0 makes {made[0][0]!r} of shape {made[0][1]} and "
                f"dtype {made[0][2]}, rank {rank} makes {other[0]!r} of shape {other[1]} and dtype {other[2]}. "
                "Every rank must build the same model; look for code that depends on the rank."
            )
            error.shared = True
            raise error
