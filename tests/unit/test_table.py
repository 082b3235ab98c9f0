"""Which backend, with how many local replicas: every combination of what was asked for and what is there."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Literal

import pytest

from tests.jobs import ROOT
from tfdist.cluster.identity import Identity
from tfdist.errors import UsageError
from tfdist.strategies.table import BACKENDS, resolve

Launcher = Literal["alone", "mpi", "tf_config"]
Launch = tuple[Launcher, int]

ALONE: Launch = ("alone", 1)
MPI_1: Launch = ("mpi", 1)
MPI_4: Launch = ("mpi", 4)
TF_1: Launch = ("tf_config", 1)
TF_4: Launch = ("tf_config", 4)
EVERYWHERE = [ALONE, MPI_1, MPI_4, TF_1, TF_4]
ONE_PROCESS = [ALONE, MPI_1, TF_1]

# asked for: backend, replicas | launchers | GPUs | outcome: (backend, local replicas), or a part of the refusal
TABLE = [
    # Nothing asked for: the launcher decides, and alone the GPUs do.
    (None, None, [MPI_1, MPI_4], [0, 1, 8], ("horovod", 1)),
    (None, None, [TF_1, TF_4], [0, 1, 8], ("multi_worker_mirrored", 1)),
    (None, None, [ALONE], [0, 1], ("one_device", 1)),
    (None, None, [ALONE], [8], ("mirrored", 8)),
    # Replicas alone.
    (None, 1, [ALONE], [0, 1, 8], ("one_device", 1)),
    (None, 3, [ALONE], [0, 1, 8], ("mirrored", 3)),
    (None, 3, [MPI_1, MPI_4], [0, 8], "backend='horovod': its replicas are processes"),
    (None, 3, [TF_1, TF_4], [0, 8], "backend='multi_worker_mirrored': its replicas are processes"),
    # Backends of several processes: one replica in each, however they were started and whatever GPUs there are.
    ("horovod", None, EVERYWHERE, [0, 1, 8], ("horovod", 1)),
    ("multi_worker_mirrored", None, EVERYWHERE, [0, 1, 8], ("multi_worker_mirrored", 1)),
    ("horovod", 3, EVERYWHERE, [0, 8], "mpirun -np 3 python"),
    ("multi_worker_mirrored", 3, EVERYWHERE, [0, 8], "mpirun -np 3 python"),
    # Backends of one process.
    ("mirrored", None, ONE_PROCESS, [0, 1], ("mirrored", 1)),
    ("mirrored", None, ONE_PROCESS, [8], ("mirrored", 8)),
    ("mirrored", 3, ONE_PROCESS, [0, 1, 8], ("mirrored", 3)),
    ("one_device", None, ONE_PROCESS, [0, 1, 8], ("one_device", 1)),
    ("one_device", 1, ONE_PROCESS, [0, 1, 8], ("one_device", 1)),
    ("one_device", 3, ONE_PROCESS, [0, 1, 8], "Use --backend mirrored"),
    ("mirrored", None, [MPI_4, TF_4], [0, 8], "trains in one process, but the launcher started 4"),
    ("mirrored", 3, [MPI_4, TF_4], [0, 8], "trains in one process, but the launcher started 4"),
    ("one_device", None, [MPI_4, TF_4], [0, 8], "trains in one process, but the launcher started 4"),
    ("one_device", 3, [MPI_4, TF_4], [0, 8], "trains in one process, but the launcher started 4"),
]
CASES = [(name, n, launch, gpus, want) for name, n, launches, all_gpus, want in TABLE for launch in launches
         for gpus in all_gpus]  # fmt: skip


@pytest.mark.parametrize(("name", "replicas", "launch", "gpus", "outcome"), CASES)
def test_resolve(
    name: str | None, replicas: int | None, launch: Launch, gpus: int, outcome: tuple[str, int] | str
) -> None:
    launcher, size = launch
    identity = Identity(launcher, size=size, local_size=size)
    if isinstance(outcome, tuple):
        assert resolve(name, replicas, identity, gpus) == outcome
        return
    with pytest.raises(UsageError) as caught:
        resolve(name, replicas, identity, gpus)
    assert outcome in str(caught.value)
    if name is not None:
        assert f"{name!r}" in str(caught.value)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_opener_is_there(name: str) -> None:
    module, _, function = BACKENDS[name].opener.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_knowing_the_backends_costs_nothing() -> None:
    program = (
        "import sys, tfdist.strategies.table\n"
        "heavy = {'tensorflow', 'keras', 'horovod', 'mpi4py'} & {name.split('.')[0] for name in sys.modules}\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=True)
