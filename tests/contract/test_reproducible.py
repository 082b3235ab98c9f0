"""The same bits on every backend and at every number of replicas, in real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contract.reproducible_program import CASES
from tests.full import full
from tests.jobs import once_more_if_tensorflow_crashed, run_alone, run_mpi

PROGRAM = Path(__file__).with_name("reproducible_program.py")
LIMIT = 600

JOBS = [("mirrored", 2), ("one_device", 1), ("horovod", 2), ("multi_worker_mirrored", 4)]
if full():
    JOBS += [("central_storage", 2), ("horovod", 3), ("horovod", 8), ("multi_worker_mirrored", 2)]

pytestmark = pytest.mark.timeout(len(JOBS) * LIMIT)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By backend and number of replicas, and then by case, what the first process got; all have got the same."""
    folder = tmp_path_factory.mktemp("reproducible")
    found: dict[str, dict[str, Any]] = {}
    for backend, count in JOBS:
        if backend in ("horovod", "multi_worker_mirrored"):
            run_mpi(count, PROGRAM, folder, backend, count, timeout=LIMIT).check()
        else:
            counts = "4,2" if backend == "mirrored" and full() else count

            def job(backend: str = backend, counts: Any = counts) -> Any:
                return run_alone(PROGRAM, folder, backend, counts, timeout=LIMIT)

            once_more_if_tensorflow_crashed(job).check()
        files = sorted(folder.glob(f"{backend}-?.json"))
        first, *others = [json.loads(file.read_text()) for file in files]
        assert all(other == first for other in others)
        for file in files:
            file.unlink()
        for key, value in first.items():
            replicas, _, case = key.partition(" ")
            found.setdefault(f"{backend} {replicas}", {})[case] = value
    return found


@pytest.mark.parametrize("case", [*CASES, "resumed"])
def test_every_backend_and_number_of_replicas_gives_the_same_bits(results: Any, case: str) -> None:
    want = results["one_device 1"][case]
    for who, cases in results.items():
        if case in cases:
            assert cases[case] == want, who


def test_a_run_that_changes_its_number_of_replicas_ends_with_the_bits_of_one_that_does_not(results: Any) -> None:
    straight = results["one_device 1"]["cnn"]
    resumed = {who: cases["resumed"] for who, cases in results.items() if "resumed" in cases}
    assert len(resumed) >= 2
    for who, case in resumed.items():
        assert len(case["losses"]) == 2, who  # after four on mirrored
        assert case["state_sha256"] == straight["state_sha256"], who
