"""Training under a real SLURM with two nodes: the scripts of docs/slurm as users submit them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.slurm import Slurm, slurm
from tests.jobs import ROOT, run_alone

SCRIPTS = ROOT / "docs" / "slurm"
TRAIN = ROOT / "scripts" / "train.py"
TOY = ROOT / "tests" / "toy.py"
# SLURM may give a task fewer processors than its host has, and other numbers of threads give other bits.
FLAGS = ["--task", f"{TOY}:ToyNet", "--steps", "6", "--intra-op-threads", "1", "--report"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the same run on one device."""
    report = tmp_path_factory.mktemp("one_device") / "report.json"
    run_alone(TRAIN, "--backend", "one_device", *FLAGS, report).check()
    losses: list[float] = json.loads(report.read_text())["losses"]
    return losses


@pytest.mark.parametrize("backend", ["horovod", "multi_worker_mirrored"])
def test_the_scripts_of_the_documentation_train(
    cluster: Slurm, one_device: list[float], backend: str, tmp_path: Path
) -> None:
    job = cluster.sbatch(SCRIPTS / f"{backend}.sbatch", *FLAGS, tmp_path / "report.json").check()
    assert job.output.count(f"training on {backend}, 2 replicas") == 1, job.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["losses"] == pytest.approx(one_device, abs=1e-5)
    assert report["processes"] == 2


def test_mpirun_starts_tasks_on_the_nodes_that_slurm_gave(cluster: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "where.sbatch"
    script.write_text(
        "#!/bin/bash\nsource .venv/bin/activate\nmpirun bash -c 'echo \"rank $OMPI_COMM_WORLD_RANK on $(hostname)\"'\n"
    )
    job = cluster.sbatch(script, flags=["--nodes=2", "--ntasks-per-node=2"]).check()
    ranks = sorted(line for line in job.output.splitlines() if line.startswith("rank "))
    assert ranks == ["rank 0 on node1", "rank 1 on node1", "rank 2 on node2", "rank 3 on node2"]


def test_horovod_under_srun_is_refused(cluster: Slurm) -> None:
    """Each process would be alone in MPI, and train the whole by itself."""
    job = cluster.srun("--nodes=2", "--ntasks=2", sys.executable, TRAIN, "--backend", "horovod", "--steps", "1")
    assert job.code not in (0, 124), job.output
    assert "training on" not in job.output
    assert "srun started 2 processes, but MPI sees 1" in job.output


def test_a_batch_script_without_srun_is_one_process(cluster: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "alone.sbatch"
    script.write_text(
        "#!/bin/bash\nsource .venv/bin/activate\n"
        'python -c "from tfdist.cluster.identity import identify; print(identify())"\n'
    )
    job = cluster.sbatch(script, flags=["--nodes=2", "--ntasks=2"]).check()
    assert "rank=0, size=1" in job.output
