"""Which backend, with how many local replicas: every combination of what was asked for and what is there."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Literal, NamedTuple

import pytest

from tests.jobs import ROOT
from tfdist.cluster.identity import Identity, TfConfig
from tfdist.errors import UsageError
from tfdist.strategies.table import BACKENDS, Options, check_options, resolve

Launcher = Literal["alone", "mpi", "tf_config", "slurm"]


class Launch(NamedTuple):
    launcher: Launcher
    size: int
    local_size: int


ALONE = Launch("alone", 1, 1)
MPI_1 = Launch("mpi", 1, 1)
MPI_4 = Launch("mpi", 4, 4)
MPI_4_HOSTS = Launch("mpi", 4, 1)
TF_1 = Launch("tf_config", 1, 1)
TF_4 = Launch("tf_config", 4, 4)
TF_4_HOSTS = Launch("tf_config", 4, 1)
SLURM_4 = Launch("slurm", 4, 2)
SLURM_4_HOSTS = Launch("slurm", 4, 1)
MPI = [MPI_1, MPI_4, MPI_4_HOSTS]
OWN_HOST = [TF_1, TF_4_HOSTS, SLURM_4_HOSTS]  # one process for each host, and no MPI that could have started more
SHARED_HOST = [TF_4, SLURM_4]
EVERYWHERE = [ALONE, *MPI, *OWN_HOST, *SHARED_HOST]
ONE_PROCESS = [ALONE, MPI_1, TF_1]
SEVERAL = [MPI_4, MPI_4_HOSTS, TF_4, TF_4_HOSTS, SLURM_4, SLURM_4_HOSTS]
ANY_GPUS = [0, 1, 8]

# asked for: backend, replicas | launchers | GPUs | outcome: (backend, local replicas), or a part of the refusal
TABLE = [
    # Nothing asked for: the launcher decides, and alone the GPUs do.
    (None, None, MPI, ANY_GPUS, ("horovod", 1)),
    (None, None, SHARED_HOST, ANY_GPUS, ("multi_worker_mirrored", 1)),
    (None, None, OWN_HOST, [0, 1], ("multi_worker_mirrored", 1)),
    (None, None, OWN_HOST, [8], ("multi_worker_mirrored", 8)),
    (None, None, [ALONE], [0, 1], ("one_device", 1)),
    (None, None, [ALONE], [8], ("mirrored", 8)),
    # Replicas alone.
    (None, 1, [ALONE], ANY_GPUS, ("one_device", 1)),
    (None, 3, [ALONE], ANY_GPUS, ("mirrored", 3)),
    (None, 3, MPI, [0, 8], "backend='horovod': its replicas are processes"),
    (None, 3, [*OWN_HOST, *SHARED_HOST], [0, 8], ("multi_worker_mirrored", 3)),
    # Several processes: one replica in each, however they were started and whatever GPUs there are.
    ("horovod", None, EVERYWHERE, ANY_GPUS, ("horovod", 1)),
    ("horovod", 3, EVERYWHERE, [0, 8], "mpirun -np 3 python"),
    ("parameter_server", None, EVERYWHERE, ANY_GPUS, ("parameter_server", 1)),
    ("parameter_server", 3, EVERYWHERE, [0, 8], "mpirun -np 5 python"),
    # Several processes with several devices: as many as asked for, else all of a host that the process has to itself.
    ("multi_worker_mirrored", None, [ALONE, *MPI, *SHARED_HOST], ANY_GPUS, ("multi_worker_mirrored", 1)),
    ("multi_worker_mirrored", None, OWN_HOST, [0, 1], ("multi_worker_mirrored", 1)),
    ("multi_worker_mirrored", None, OWN_HOST, [8], ("multi_worker_mirrored", 8)),
    ("multi_worker_mirrored", 1, EVERYWHERE, ANY_GPUS, ("multi_worker_mirrored", 1)),
    ("multi_worker_mirrored", 3, EVERYWHERE, ANY_GPUS, ("multi_worker_mirrored", 3)),
    # Backends of one process.
    *(
        row
        for name in ("mirrored", "central_storage")
        for row in (
            (name, None, ONE_PROCESS, [0, 1], (name, 1)),
            (name, None, ONE_PROCESS, [8], (name, 8)),
            (name, 3, ONE_PROCESS, ANY_GPUS, (name, 3)),
            (name, None, SEVERAL, [0, 8], "trains in one process, but the launcher started 4"),
            (name, 3, SEVERAL, [0, 8], "trains in one process, but the launcher started 4"),
        )
    ),
    ("one_device", None, ONE_PROCESS, ANY_GPUS, ("one_device", 1)),
    ("one_device", 1, ONE_PROCESS, ANY_GPUS, ("one_device", 1)),
    ("one_device", 3, ONE_PROCESS, ANY_GPUS, "Use --backend mirrored"),
    ("one_device", None, SEVERAL, [0, 8], "trains in one process, but the launcher started 4"),
    ("one_device", 3, SEVERAL, [0, 8], "trains in one process, but the launcher started 4"),
]
CASES = [(name, n, launch, gpus, want) for name, n, launches, all_gpus, want in TABLE for launch in launches
         for gpus in all_gpus]  # fmt: skip


@pytest.mark.parametrize(("name", "replicas", "launch", "gpus", "outcome"), CASES)
def test_resolve(
    name: str | None, replicas: int | None, launch: Launch, gpus: int, outcome: tuple[str, int] | str
) -> None:
    identity = Identity(launch.launcher, size=launch.size, local_size=launch.local_size)
    if isinstance(outcome, tuple):
        assert resolve(name, replicas, identity, gpus) == outcome
        return
    with pytest.raises(UsageError) as caught:
        resolve(name, replicas, identity, gpus)
    assert outcome in str(caught.value)
    if name is not None:
        assert f"{name!r}" in str(caught.value)


def with_servers(launcher: Launcher = "tf_config") -> Identity:
    config = TfConfig(("a:1", "b:1"), 1, "ps", 0, servers=("a:2", "b:2"), has_chief=True)
    return Identity(launcher, rank=1, size=4, local_size=2, tf_config=config)


@pytest.mark.parametrize("gpus", ANY_GPUS)
def test_servers_in_tf_config_ask_for_parameter_server(gpus: int) -> None:
    assert resolve(None, None, with_servers(), gpus) == ("parameter_server", 1)
    assert resolve("parameter_server", None, with_servers("mpi"), gpus) == ("parameter_server", 1)
    with pytest.raises(UsageError, match="backend='parameter_server': its replicas are processes"):
        resolve(None, 2, with_servers(), gpus)


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "parameter_server"])
def test_other_backends_refuse_servers_in_tf_config(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(name, None, with_servers(), 0)
    assert str(caught.value) == (
        f"TF_CONFIG names 2 parameter server(s) ('ps'), which backend={name!r} has none of. Use "
        "--backend parameter_server, or leave 'ps' out."
    )


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("options", "given", "only"),
    [
        (Options(parameter_servers=1), "parameter_servers=1", "parameter_server"),
        (Options(collectives="ring"), "collectives='ring'", "multi_worker_mirrored"),
        (Options(collectives="nccl"), "collectives='nccl'", "multi_worker_mirrored"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_option_without_effect_is_refused(name: str, options: Options, given: str, only: str) -> None:
    if name == only:
        check_options(name, options)
        return
    with pytest.raises(UsageError) as caught:
        check_options(name, options)
    assert str(caught.value) == f"{given} has no effect with backend={name!r}. Leave it out, or use backend={only!r}."


@pytest.mark.parametrize("name", BACKENDS)
def test_options_that_all_backends_have(name: str) -> None:
    check_options(name, Options(replicas=2, intra_op_threads=3, gpu_memory="all"))


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
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=300, check=True)
