"""What the tests of checkpoints share."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from tfdist.checkpoints.checkpoint import all_in

ONE = {"model/kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "step": np.array(3, np.int64)}
STATE = {"epoch": 2}
FILES = ["manifest.json", "variables.data-00000-of-00001", "variables.index"]


def silent(line: str) -> None:
    """Where nothing should be told."""
    raise AssertionError(line)


def steps(folder: Path) -> list[int]:
    """Of the visible checkpoints."""
    return [int(path.name.removeprefix("step-")) for path in all_in(folder)]


def hidden(folder: Path) -> list[str]:
    """What saving and deleting left behind."""
    return sorted(name for name in os.listdir(folder) if name.startswith((".tmp", ".deleted")))


def flip(path: Path, where: int) -> None:
    data = bytearray(path.read_bytes())
    data[where] ^= 0b100
    path.write_bytes(data)
