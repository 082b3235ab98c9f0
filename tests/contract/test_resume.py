"""Checkpoints from one backend to another: right values 4 (drift) and 7 (parity), in real processes.

Four jobs in a row, of which each goes on from what those before it have saved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.jobs import once_more_if_tensorflow_crashed, run_alone, run_mpi

PROGRAM = Path(__file__).with_name("resume_program.py")
LIMIT = 600

pytestmark = pytest.mark.timeout(5 * LIMIT)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By part: what each of its processes got."""
    folder = tmp_path_factory.mktemp("resume")

    def alone(part: str) -> None:
        once_more_if_tensorflow_crashed(lambda: run_alone(PROGRAM, folder, part, timeout=LIMIT)).check()

    alone("mirrored")
    run_mpi(2, PROGRAM, folder, "horovod", timeout=LIMIT).check()
    run_mpi(2, PROGRAM, folder, "multi_worker_mirrored", timeout=LIMIT).check()
    alone("mirrored_again")
    names = ("mirrored", "horovod", "multi_worker_mirrored", "mirrored_again")
    return {name: [json.loads(file.read_text()) for file in sorted(folder.glob(f"{name}-?.json"))] for name in names}


SAME = [
    ("horovod", "mirrored"),
    ("horovod", "horovod"),
    ("multi_worker_mirrored", "horovod"),
    ("mirrored_again", "mirrored"),
    ("mirrored_again", "multi_worker_mirrored"),
]
"""(which goes on, whose checkpoint); the last two in a new process."""


@pytest.mark.parametrize(("part", "saved_by"), SAME, ids=[f"{b}-to-{a}" for a, b in SAME])
def test_a_run_goes_on_bit_for_bit_on_another_backend(parts: Any, part: str, saved_by: str) -> None:
    straight = parts["mirrored"][0]["straight"]
    for process in parts[part]:
        got = process[f"from {saved_by}"]
        assert got["resumed_from"] == 7
        assert got["state_sha256"] == straight["state_sha256"]
        for name in ("metrics", "steps", "examples_seen"):
            assert got[name] == straight[name], name


def test_another_number_of_replicas_gives_the_same_to_rounding(parts: Any) -> None:
    three, two = parts["mirrored_again"][0]["three"], parts["mirrored_again"][0]["two"]
    assert three["resumed_from"] == 5
    assert three["examples_seen"] == two["examples_seen"]
    for a, b in zip(three["weights"], two["weights"], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("backend", ["horovod", "multi_worker_mirrored"])
def test_a_weight_that_drifts_on_one_rank_is_found_and_named(parts: Any, backend: str) -> None:
    for process in parts[backend]:
        assert process["drift"].startswith("RanksDisagree: after step 6, rank")
        assert "kernel" in process["drift"]
        assert "of 2 ranks" in process["drift"]


def test_every_process_gets_all_predictions(parts: Any) -> None:
    alone = parts["mirrored_again"][0]["predictions"]
    assert np.shape(alone) == (37, 3)
    for process in parts["horovod"]:
        assert process["predictions"] == alone
