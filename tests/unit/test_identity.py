"""Who am I: from the launchers' variables to an identity, by equality."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tfdist.cluster.identity import Identity, TfConfig, identify
from tfdist.errors import UsageError


def open_mpi(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
    }


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
    assert identify() == Identity("mpi", rank=1, size=3, local_rank=0, local_size=2)


def test_open_mpi() -> None:
    identity = identify(open_mpi(5, 8, 1, 4))
    assert identity == Identity("mpi", rank=5, size=8, local_rank=1, local_size=4)
    assert not identity.is_chief
    assert identify(open_mpi(0, 8, 0, 4)).is_chief


def test_mpich_and_others_with_pmi() -> None:
    everything = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert identify(everything) == Identity("mpi", rank=3, size=4, local_rank=1, local_size=2)


def test_without_local_variables_all_ranks_are_taken_to_be_on_one_host() -> None:
    assert identify({"PMI_RANK": "3", "PMI_SIZE": "4"}) == Identity("mpi", 3, 4, local_rank=3, local_size=4)


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
    assert chief.tf_config == TfConfig(("a:1", "b:1", "c:1"), rank=0, task_type="chief", task_index=0)
    assert (worker.rank, worker.size, worker.is_chief) == (2, 3, False)
    assert worker.tf_config == TfConfig(("a:1", "b:1", "c:1"), rank=2, task_type="worker", task_index=1)


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


@pytest.mark.parametrize("workers", ["a:1", [1, 2], [None], {"0": "a:1"}], ids=str)
def test_workers_that_are_no_list_of_addresses(workers: Any) -> None:
    assert refusal(tf_config({"worker": workers})).startswith("TF_CONFIG cannot be read")


@pytest.mark.parametrize("role", ["ps", "evaluator"])
def test_a_role_that_synchronous_training_does_not_know(role: str) -> None:
    for environ in (tf_config({"worker": ["a:1"], role: ["b:1"]}), tf_config({"worker": ["a:1"]}, role)):
        assert f"the role {role!r}" in refusal(environ)


@pytest.mark.parametrize(
    ("kind", "index"), [("worker", 2), ("worker", -1), ("chief", 1)], ids=["behind", "negative", "second chief"]
)
def test_an_index_outside_of_the_cluster(kind: str, index: int) -> None:
    message = refusal(tf_config({"chief": ["c:1"], "worker": ["a:1", "b:1"]}, kind, index))
    assert f"task {kind} {index}, but its cluster has 1 chief(s) and 2 worker(s)" in message


def test_tf_config_and_mpi_may_agree() -> None:
    identity = identify(open_mpi(1, 2, 0, 1) | tf_config({"worker": ["a:1", "b:1"]}, index=1))
    assert (identity.launcher, identity.rank, identity.size) == ("mpi", 1, 2)
    assert identity.tf_config == TfConfig(("a:1", "b:1"), rank=1, task_type="worker", task_index=1)


@pytest.mark.parametrize("mpi", [open_mpi(0, 2, 0, 2), open_mpi(1, 3, 0, 1)], ids=["rank", "size"])
def test_tf_config_and_mpi_may_not_contradict_each_other(mpi: dict[str, str]) -> None:
    message = refusal(mpi | tf_config({"worker": ["a:1", "b:1"]}, index=1))
    rank, size = mpi["OMPI_COMM_WORLD_RANK"], mpi["OMPI_COMM_WORLD_SIZE"]
    assert f"TF_CONFIG says worker 1 of 2, but MPI says rank {rank} of {size}" in message
    assert "Unset TF_CONFIG" in message
