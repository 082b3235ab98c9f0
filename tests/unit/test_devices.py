"""Which GPUs a process gets, from lists of names: the choice is made without any GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.one_device import STRATEGY
from tfdist.cluster.channel import Alone
from tfdist.cluster.devices import assigned, split_cpu, take_devices
from tfdist.cluster.identity import Identity
from tfdist.errors import EnvironmentProblem

GPUS = ["a", "b", "c", "d", "e", "f", "g", "h"]


def own(gpus: int, rank: int, size: int, count: int = 1, visible: list[str | None] | None = None) -> list[str]:
    given = [None] * size if visible is None else visible
    return assigned(GPUS[:gpus], rank, size, count, visible=given, host="node1")


@pytest.mark.parametrize(
    ("gpus", "size", "count", "each"),
    [
        (1, 1, 1, ["a"]),
        (8, 1, 1, ["a"]),
        (8, 1, 8, ["abcdefgh"]),
        (2, 2, 1, ["a", "b"]),
        (8, 3, 1, ["a", "b", "c"]),
        (4, 2, 2, ["ab", "cd"]),
        (8, 2, 3, ["abc", "def"]),
    ],
)
def test_each_process_has_its_own(gpus: int, size: int, count: int, each: list[str]) -> None:
    assert ["".join(own(gpus, rank, size, count)) for rank in range(size)] == each


@pytest.mark.parametrize(
    ("gpus", "size", "count", "most", "replicas"),
    [
        (1, 2, 1, 1, ""),
        (2, 3, 1, 2, ""),
        (8, 3, 3, 2, " with 3 replicas each"),
        (4, 1, 5, 0, " with 5 replicas each"),
        (3, 2, 2, 1, " with 2 replicas each"),
    ],
)
def test_too_few_are_told_with_the_numbers(gpus: int, size: int, count: int, most: int, replicas: str) -> None:
    """To the last rank at least: `together` then tells all."""
    with pytest.raises(EnvironmentProblem) as caught:
        own(gpus, size - 1, size, count)
    assert str(caught.value) == (
        f"{size} ranks run on host node1{replicas}, but TensorFlow sees {gpus} GPU(s) there. Start at most {most} per "
        "host, or set CUDA_VISIBLE_DEVICES='' to train on the CPU."
    )


@pytest.mark.parametrize(
    ("visible", "gpus", "count", "each"),
    [
        (["0", "1", "2"], 1, 1, ["a", "a", "a"]),
        (["GPU-5a", "GPU-6b"], 1, 1, ["a", "a"]),
        (["0,1", "2,3"], 2, 2, ["ab", "ab"]),
        (["0", None], 1, 1, ["a", "a"]),
        # More of them than the process shall have, or the same for all: the launcher has not chosen.
        (["0,1", "1,0"], 2, 1, ["a", "b"]),
        (["0,1", "0,1"], 2, 1, ["a", "b"]),
        ([None, None], 2, 1, ["a", "b"]),
    ],
)
def test_what_the_launcher_has_chosen_for_each_is_taken(
    visible: list[str | None], gpus: int, count: int, each: list[str]
) -> None:
    size = len(visible)
    assert ["".join(own(gpus, rank, size, count, visible)) for rank in range(size)] == each


@pytest.mark.parametrize("visible", [["0", "0"], ["0", "0", "1"], ["0"]], ids=str)
def test_one_gpu_for_several_is_not_a_choice(visible: list[str | None]) -> None:
    """Where two see the same one, or not all have been heard of, the second may not have the first one's."""
    with pytest.raises(EnvironmentProblem, match=r"but TensorFlow sees 1 GPU\(s\) there"):
        assigned(["a"], 1, max(2, len(visible)), 1, visible=visible, host="node1")


class Asked(Alone):
    """Notes what it is asked to exchange, and answers for a second rank on another host."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def exchange(self, label: str, value: Any, failure: Any = None) -> list[Any]:
        self.labels.append(label)
        return [value, ["another host", None]]


def test_without_gpus_there_are_cpu_devices_and_all_ranks_have_spoken() -> None:
    channel = Asked()
    with STRATEGY.scope():
        assert take_devices(Identity("mpi", size=2), channel) == ["CPU:0"]
    assert channel.labels == ["choosing devices"]


def test_a_running_tensorflow_cannot_be_split() -> None:
    assert split_cpu(1) == ["CPU:0"]
    with pytest.raises(EnvironmentProblem) as caught:
        split_cpu(3)
    assert str(caught.value) == (
        "replicas=3 needs 3 logical CPU devices, but TensorFlow has already run in this process with 1. Create the "
        "Trainer before any other TensorFlow operation."
    )
