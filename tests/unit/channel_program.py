"""What three ranks say to each other: run by `test_channel.py` under mpirun and with TF_CONFIG, never imported by it.

    mpirun -np 3 python channel_program.py FOLDER

Every rank writes what each scenario gave it to FOLDER/rank.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfdist.cluster.channel import Channel, open_mpi, require_same, together
from tfdist.cluster.identity import identify
from tfdist.cluster.tcp_channel import open_tcp
from tfdist.errors import EnvironmentProblem, UsageError

IDENTITY = identify()
CHANNEL: Channel = open_mpi(IDENTITY) if IDENTITY.launcher == "mpi" else open_tcp(IDENTITY)
RANK = CHANNEL.rank


def outcome(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": work()}
    except Exception as error:
        return {
            "kind": type(error).__name__,
            "message": str(error),
            "shared": getattr(error, "shared", None),
            "exit_code": getattr(error, "exit_code", None),
        }


def fail_on(*ranks: int, error: Callable[[], Exception] = lambda: UsageError(f"of rank {RANK}")) -> str:
    if RANK in ranks:
        raise error()
    return f"done on {RANK}"


def exchange() -> Any:
    # Of different lengths, and none at all.
    return CHANNEL.exchange("greeting", {"rank": RANK, "text": "ü" * RANK, "list": [None, 1.5, True][:RANK]})


def all_succeed() -> Any:
    return together(CHANNEL, "work", lambda: fail_on())


def all_fail() -> Any:
    return together(CHANNEL, "work", lambda: fail_on(0, 1, 2, error=lambda: UsageError("the same")))


def one_fails() -> Any:
    return together(CHANNEL, "work", lambda: fail_on(1))


def two_fail() -> Any:
    kind = UsageError if RANK == 2 else EnvironmentProblem
    return together(CHANNEL, "work", lambda: fail_on(1, 2, error=lambda: kind(f"of rank {RANK}")))


def the_task_fails() -> Any:
    return together(CHANNEL, "work", lambda: fail_on(2, error=lambda: ValueError("the sky is falling")))


def one_fails_while_the_others_exchange() -> Any:
    def work() -> Any:
        fail_on(2)
        return CHANNEL.exchange("inside", RANK)

    return together(CHANNEL, "work", work)


def one_fails_two_stages_deep() -> Any:
    def inner() -> Any:
        return together(CHANNEL, "inner", lambda: fail_on(0))

    return together(CHANNEL, "outer", inner)


def out_of_step() -> Any:
    return CHANNEL.exchange("left" if RANK < 2 else "right", RANK)


def one_leaves_early() -> Any:
    """Rank 1 has a path of its own that leaves an exchange out."""
    return together(CHANNEL, "work", lambda: None if RANK == 1 else CHANNEL.exchange("inside", RANK))


def same() -> Any:
    return require_same(CHANNEL, "seeds", "the seed", 7)


def not_same() -> Any:
    return require_same(CHANNEL, "seeds", "the seed", 7 if RANK < 2 else 8)


def still_in_step() -> Any:
    """After all of that the channel works as before."""
    return CHANNEL.exchange("the end", RANK)


SCENARIOS = (
    exchange,
    all_succeed,
    all_fail,
    one_fails,
    two_fail,
    the_task_fails,
    one_fails_while_the_others_exchange,
    one_fails_two_stages_deep,
    out_of_step,
    one_leaves_early,
    same,
    not_same,
    still_in_step,
)

if __name__ == "__main__":
    outcomes = {scenario.__name__: outcome(scenario) for scenario in SCENARIOS}
    (Path(sys.argv[1]) / f"{RANK}.json").write_text(json.dumps(outcomes))
