"""Who am I: from the launchers' variables to an identity, by equality."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tfdist.cluster.identity import LAUNCHED, Identity, SlurmStep, TfConfig, identify
from tfdist.errors import UsageError


def open_mpi(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
    }


def mpi(rank: int, size: int, local_rank: int, local_size: int) -> Identity:
    return Identity("mpi", rank, size, local_rank, local_size, one_console=True)


def tf_config(cluster: Any, kind: Any = "worker", index: Any = 0) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def refusal(environ: dict[str, str]) -> str:
    with pytest.raises(UsageError) as caught:
        identify(environ)
    return str(caught.value)


def test_without_a_launcher_the_process_is_alone() -> None:
    assert identify({}) == Identity(launcher="alone", rank=0, size=1, local_rank=0, local_size=1, tf_config=None)
    assert identify({}).is_chief


def test_the_environment_of_the_process_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in open_mpi(1, 3, 0, 2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert identify() == mpi(rank=1, size=3, local_rank=0, local_size=2)


def test_open_mpi() -> None:
    identity = identify(open_mpi(5, 8, 1, 4))
    assert identity == mpi(rank=5, size=8, local_rank=1, local_size=4)
    assert not identity.is_chief
    assert identify(open_mpi(0, 8, 0, 4)).is_chief


def test_mpich_and_others_with_pmi() -> None:
    everything = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert identify(everything) == mpi(rank=3, size=4, local_rank=1, local_size=2)


def test_without_local_variables_all_ranks_are_taken_to_be_on_one_host() -> None:
    assert identify({"PMI_RANK": "3", "PMI_SIZE": "4"}) == mpi(3, 4, local_rank=3, local_size=4)


def test_open_mpi_comes_before_pmi() -> None:
    assert identify({"PMI_RANK": "0", "PMI_SIZE": "1"} | open_mpi(1, 2, 1, 2)).rank == 1


def test_a_rank_without_a_size_is_no_launcher() -> None:
    assert identify({"PMI_RANK": "3"}).launcher == "alone"


@pytest.mark.parametrize(
    "name",
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"],
)
@pytest.mark.parametrize("value", ["", "two", "1.5"])
def test_a_variable_that_is_not_a_number_is_named(name: str, value: str) -> None:
    message = refusal(open_mpi(0, 2, 0, 2) | {name: value})
    assert f"{name}={value!r}" in message
    assert "Unset it" in message


def test_tf_config_with_workers() -> None:
    workers = ["a:1", "b:1", "a:2"]
    assert identify(tf_config({"worker": workers}, index=2)) == Identity(
        "tf_config",
        rank=2,
        size=3,
        local_rank=1,
        local_size=2,
        tf_config=TfConfig(tuple(workers), rank=2, task_type="worker", task_index=2),
    )


def test_tf_config_with_a_chief_which_is_rank_0() -> None:
    cluster = {"worker": ["b:1", "c:1"], "chief": ["a:1"]}
    chief, worker = identify(tf_config(cluster, "chief")), identify(tf_config(cluster, "worker", 1))
    assert (chief.rank, chief.size, chief.is_chief) == (0, 3, True)
    assert chief.tf_config == TfConfig(("a:1", "b:1", "c:1"), 0, "chief", 0, has_chief=True)
    assert (worker.rank, worker.size, worker.is_chief) == (2, 3, False)
    assert worker.tf_config == TfConfig(("a:1", "b:1", "c:1"), 2, "worker", 1, has_chief=True)


def test_hosts_are_told_apart_by_all_but_the_port() -> None:
    identity = identify(tf_config({"worker": ["[fd00::1]:1", "[fd00::2]:1", "[fd00::1]:2"]}, index=1))
    assert (identity.local_rank, identity.local_size) == (0, 1)


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_tf_config_counts_as_none(text: str) -> None:
    assert identify({"TF_CONFIG": text}) == Identity("alone")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("7", "TypeError"),
        ("{}", "KeyError: 'cluster'"),
        ('{"cluster": {"worker": ["a:1"]}}', "KeyError: 'task'"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}', "KeyError: 'index'"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "one"}}', "ValueError"),
        ('{"cluster": ["a:1"], "task": {"type": "worker", "index": 0}}', "AttributeError"),
        ('{"cluster": {"worker": 7}, "task": {"type": "worker", "index": 0}}', "TypeError"),
    ],
)
def test_a_tf_config_that_cannot_be_read(text: str, part: str) -> None:
    message = refusal({"TF_CONFIG": text})
    assert message.startswith("TF_CONFIG cannot be read")
    assert part in message
    assert "unset it to train on this machine alone" in message


@pytest.mark.parametrize("workers", ["a:1", [1, 2], [None], {"0": "a:1"}, ["a"], ["a:"], ["a:x"], [":1"]], ids=str)
def test_workers_that_are_no_list_of_addresses(workers: Any) -> None:
    assert refusal(tf_config({"worker": workers})).startswith("TF_CONFIG cannot be read")


def test_a_role_that_nobody_knows() -> None:
    for environ in (tf_config({"worker": ["a:1"], "evaluator": ["b:1"]}), tf_config({"worker": ["a:1"]}, "evaluator")):
        assert "the role 'evaluator'" in refusal(environ)


def test_what_tfdist_launch_starts_has_one_console() -> None:
    config = tf_config({"worker": ["a:1", "b:1"]})
    assert not identify(config).one_console
    assert identify(config | {LAUNCHED: "1"}) == dataclasses.replace(identify(config), one_console=True)


ROLES = {"worker": ["a:3", "b:1"], "ps": ["a:2", "c:1"], "chief": ["a:1"]}


@pytest.mark.parametrize(
    ("kind", "index", "rank", "local_rank", "local_size"),
    [("chief", 0, 0, 0, 3), ("ps", 0, 1, 1, 3), ("ps", 1, 2, 0, 1), ("worker", 0, 3, 2, 3), ("worker", 1, 4, 0, 1)],
)
def test_chief_servers_and_workers_are_ranks_in_this_order(
    kind: str, index: int, rank: int, local_rank: int, local_size: int
) -> None:
    config = TfConfig(("a:1", "a:3", "b:1"), rank, kind, index, servers=("a:2", "c:1"), has_chief=True)
    assert config.members == ("a:1", "a:2", "c:1", "a:3", "b:1")
    assert identify(tf_config(ROLES, kind, index)) == Identity(
        "tf_config", rank, size=5, local_rank=local_rank, local_size=local_size, tf_config=config
    )


def test_servers_without_a_chief_come_before_the_workers() -> None:
    identity = identify(tf_config({"worker": ["a:1"], "ps": ["b:1"]}))
    assert identity.tf_config == TfConfig(("a:1",), 1, "worker", 0, servers=("b:1",))
    assert identity.tf_config.members == ("b:1", "a:1")
    assert (identity.rank, identity.size) == (1, 2)


def test_servers_under_mpi_count_as_ranks() -> None:
    assert identify(open_mpi(3, 5, 2, 3) | tf_config(ROLES)).tf_config == TfConfig(
        ("a:1", "a:3", "b:1"), 3, "worker", 0, servers=("a:2", "c:1"), has_chief=True
    )
    assert "TF_CONFIG says process 3 of 5, but MPI says rank 1 of 3" in refusal(open_mpi(1, 3, 0, 1) | tf_config(ROLES))


@pytest.mark.parametrize(
    ("kind", "index"),
    [("worker", 2), ("worker", -1), ("chief", 1), ("ps", 1)],
    ids=["behind", "negative", "second chief", "second server"],
)
def test_an_index_outside_of_the_cluster(kind: str, index: int) -> None:
    message = refusal(tf_config({"chief": ["c:1"], "ps": ["s:1"], "worker": ["a:1", "b:1"]}, kind, index))
    assert f"task {kind} {index}, but its cluster has 1 chief(s), 2 worker(s) and 1 parameter server(s)" in message


def test_tf_config_and_mpi_may_agree() -> None:
    identity = identify(open_mpi(1, 2, 0, 1) | tf_config({"worker": ["a:1", "b:1"]}, index=1))
    assert (identity.launcher, identity.rank, identity.size) == ("mpi", 1, 2)
    assert identity.tf_config == TfConfig(("a:1", "b:1"), rank=1, task_type="worker", task_index=1)


@pytest.mark.parametrize("mpi", [open_mpi(0, 2, 0, 2), open_mpi(1, 3, 0, 1)], ids=["rank", "size"])
def test_tf_config_and_mpi_may_not_contradict_each_other(mpi: dict[str, str]) -> None:
    message = refusal(mpi | tf_config({"worker": ["a:1", "b:1"]}, index=1))
    rank, size = mpi["OMPI_COMM_WORLD_RANK"], mpi["OMPI_COMM_WORLD_SIZE"]
    assert f"TF_CONFIG says process 1 of 2, but MPI says rank {rank} of {size}" in message
    assert "Unset TF_CONFIG" in message


JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
}
SALLOC = JOB | {"SLURM_NTASKS": "2", "SLURM_NPROCS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}
BATCH = SALLOC | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"}


def srun(task: int, tasks: int, local: int, here: str, nodes: str = "node[1-2]", step: int = 0) -> dict[str, str]:
    """What a task of a step sees, as it was written down on SLURM 22.05."""
    return JOB | {
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(local),
        "SLURM_GTIDS": here,
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_ID": str(step),
    }


def slurm(rank: int, size: int, local_rank: int, local_size: int, job: str = "7.0", host: str = "node1") -> Identity:
    step = SlurmStep(job, host)
    return Identity("slurm", rank, size, local_rank, local_size, slurm=step, one_console=True)


@pytest.mark.parametrize(
    ("environ", "identity"),
    [
        (srun(1, 2, 0, "1"), slurm(1, 2, 0, 1)),
        (srun(0, 3, 0, "0,1"), slurm(0, 3, 0, 2)),
        (srun(1, 3, 1, "0,1"), slurm(1, 3, 1, 2)),
        (srun(2, 3, 0, "2"), slurm(2, 3, 0, 1)),
        (srun(3, 4, 1, "2,3"), slurm(3, 4, 1, 2)),
        (srun(0, 2, 0, "0,1", nodes="node2", step=5), slurm(0, 2, 0, 2, job="7.5", host="node2")),
        (srun(0, 1, 0, "0"), Identity("alone")),
        (srun(1, 2, 0, "1") | {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9"}, slurm(1, 2, 0, 1)),
        (BATCH, Identity("alone")),
        (SALLOC, Identity("alone")),
    ],
    ids=[
        "one task per node",
        "uneven: first",
        "uneven: beside it",
        "uneven: other node",
        "two per node",
        "a smaller step",
        "a step of one task",
        "srun --mpi=pmi2",
        "a batch script",
        "a shell of salloc",
    ],
)
def test_slurm(environ: dict[str, str], identity: Identity) -> None:
    assert identify(environ) == identity


@pytest.mark.parametrize(
    ("slurm", "rank"),
    [(BATCH, 0), (BATCH, 1), (srun(0, 1, 0, "0"), 1), (srun(0, 2, 0, "0"), 2), (srun(1, 2, 0, "1"), 3)],
    ids=["sbatch, first rank", "sbatch, second rank", "sbatch, other node", "salloc", "salloc, other node"],
)
def test_mpirun_comes_before_the_slurm_that_started_its_daemons(slurm: dict[str, str], rank: int) -> None:
    assert identify(slurm | open_mpi(rank, 4, rank % 2, 2)) == mpi(rank, 4, rank % 2, 2)


def test_mpich_under_slurm_tells_places_on_the_host_and_comes_before_it_too() -> None:
    mpich = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert identify(srun(1, 2, 0, "1") | mpich) == mpi(3, 4, 1, 2)


def test_tf_config_counts_within_a_step_of_as_many_tasks() -> None:
    config = tf_config({"worker": ["node1:1", "node2:1"]}, index=1)
    assert identify(srun(1, 2, 0, "1") | config) == identify(config)
    assert identify(BATCH | config) == identify(config)
    message = refusal(srun(1, 3, 0, "1") | config)
    assert message.startswith(
        "TF_CONFIG describes 2 process(es), but SLURM has started 3 in this step. Unset TF_CONFIG"
    )


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login", "login"),
        ("node[1-2]", "node1"),
        ("gpu[07-09,12],login", "gpu07"),
        ("gpu[12,07-09]", "gpu12"),
        ("login,gpu[07-09]", "login"),
        ("rack[1-2]n[01-04]", "rack1n01"),
        ("a-1.cluster[3,5]x,b", "a-1.cluster3x"),
        ("", "node1"),
    ],
)
def test_the_first_host_of_a_list_of_nodes(nodes: str, first: str) -> None:
    identity = identify(srun(0, 2, 0, "0", nodes=nodes))
    assert identity.slurm == SlurmStep("7.0", first)


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"])
def test_slurms_variables_that_are_no_numbers_are_named(name: str) -> None:
    assert refusal(srun(1, 2, 0, "1") | {name: "x"}).startswith(f"{name}='x' in the environment is not a number")


def test_a_task_outside_of_its_step_cannot_be() -> None:
    assert "say rank 2 of 2, local rank 0 of 1" in refusal(srun(2, 2, 0, "2"))
