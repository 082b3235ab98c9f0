"""`tfdist launch` as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.jobs import ROOT, run_alone, run_mpi

TRAIN = ROOT / "scripts" / "train.py"
COMMON = ["--backend", "multi_worker_mirrored", "--steps", "4", "--quiet"]


def test_launch_trains_as_mpirun_does(tmp_path: Path) -> None:
    job = run_alone("-m", "tfdist", "launch", "--processes", "2", "--", *COMMON, "--report", tmp_path / "launch.json")
    assert job.check().output == ""
    run_mpi(2, TRAIN, *COMMON, "--report", tmp_path / "mpi.json").check()
    launched, by_mpi = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("launch", "mpi"))
    for key in ("weights_sha256", "state_sha256", "losses", "processes", "backend", "intra_op_threads"):
        assert launched[key] == by_mpi[key], key
