"""The times of all-reduces, measured by two processes. How long they took is nobody's concern here."""

from __future__ import annotations

import json
from pathlib import Path

from tests.jobs import run_mpi

JOB = Path(__file__).with_name("allreduce_job.py")


def test_the_chief_writes_the_time_of_each_size(tmp_path: Path) -> None:
    run_mpi(2, JOB, tmp_path, "horovod", 2, timeout=120).check()
    written = json.loads((tmp_path / "points.json").read_text())
    assert (written["backend"], written["replicas"]) == ("horovod", 2)
    assert [point["bytes"] for point in written["points"]] == [1024, 1 << 18]
    assert all(0 < point["seconds"] < 10 for point in written["points"])

    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert told[0] == told[1]
    more, odd, asynchronous = told[0]
    assert more == "UsageError: replicas=3, but backend='horovod' has 2. Start as many: mpirun -np 3"
    assert "sizes=6" in odd
    assert "backend='parameter_server' has no all-reduce" in asynchronous
    assert not (tmp_path / "wrong.json").exists()
