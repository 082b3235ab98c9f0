"""The manifests, against the field names of the published custom resource definitions."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tfdist.cluster.kubernetes import Job, manifest

# Facts of kubeflow.org/v2beta1 MPIJob (MPI operator) and kubeflow.org/v1 TFJob (training operator), of their
# definitions and of what the MPI operator refuses beyond them.
RUN_POLICY = {"cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "schedulingPolicy"}
CLEAN_POD_POLICIES = {"All", "Running", "None"}
REPLICA_SPEC = {"replicas", "restartPolicy", "template"}
SPECS = {
    "MPIJob": {"slotsPerWorker", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath", "mpiImplementation"},
    "TFJob": {"runPolicy", "successPolicy", "tfReplicaSpecs", "enableDynamicWorker"},
}
REPLICAS_FIELD = {"MPIJob": "mpiReplicaSpecs", "TFJob": "tfReplicaSpecs"}  # the required field of each
REPLICA_TYPES = {"MPIJob": {"Launcher", "Worker"}, "TFJob": {"PS", "Worker", "Chief", "Master", "Evaluator"}}
RESTART_POLICIES = {"MPIJob": {"Never", "OnFailure"}, "TFJob": {"Always", "OnFailure", "Never", "ExitCode"}}
CONTAINER = {"name", "image", "command", "args", "env", "resources", "volumeMounts"}

JOBS = {
    "horovod": Job("tfdist", "registry.example/tfdist:1", ("worker",) * 3, ("--backend", "horovod"), mpi=True),
    "multi_worker_mirrored": Job("tfdist", "registry.example/tfdist:1", ("worker",) * 3, ("--steps", "20")),
    "parameter_server": Job(
        "tfdist", "registry.example/tfdist:1", ("chief", "ps", "ps", "worker", "worker", "worker"), ()
    ),
}
TRAIN = ["python", "-m", "tfdist", "train"]


def loaded(backend: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(manifest(JOBS[backend]))
    return read


@pytest.mark.parametrize("backend", JOBS)
def test_only_known_fields_and_values(backend: str) -> None:
    job = loaded(backend)
    kind = job["kind"]
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
    assert job["apiVersion"] == {"MPIJob": "kubeflow.org/v2beta1", "TFJob": "kubeflow.org/v1"}[kind]
    assert set(job["spec"]) <= SPECS[kind]
    assert set(job["spec"]["runPolicy"]) <= RUN_POLICY
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] in CLEAN_POD_POLICIES
    replicas = job["spec"][REPLICAS_FIELD[kind]]
    assert set(replicas) <= REPLICA_TYPES[kind]
    for spec in replicas.values():
        assert set(spec) == REPLICA_SPEC
        assert spec["restartPolicy"] in RESTART_POLICIES[kind]
        assert spec["replicas"] >= 1
        (container,) = spec["template"]["spec"]["containers"]
        assert set(container) <= CONTAINER
        assert container["image"] == "registry.example/tfdist:1"
        assert all(isinstance(word, str) for word in container.get("command", []))
        assert kind == "MPIJob" or container["name"] == "tensorflow"  # by which the operator finds it


def test_horovod_is_an_mpi_job() -> None:
    spec = loaded("horovod")["spec"]
    launcher, worker = (spec["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    command = launcher["template"]["spec"]["containers"][0]["command"]
    assert command[0] == "mpirun"
    assert command[command.index("-np") :] == ["-np", "3", *TRAIN, "--backend", "horovod"]
    assert launcher["replicas"] == 1  # the operator refuses another number
    assert worker["replicas"] * spec["slotsPerWorker"] == 3
    assert "command" not in worker["template"]["spec"]["containers"][0]  # the operator then runs sshd


def test_multi_worker_is_a_tf_job_of_workers() -> None:
    spec = loaded("multi_worker_mirrored")["spec"]
    assert spec["successPolicy"] == "AllWorkers"
    assert {role: one["replicas"] for role, one in spec["tfReplicaSpecs"].items()} == {"Worker": 3}
    worker = spec["tfReplicaSpecs"]["Worker"]
    assert worker["restartPolicy"] == "Never"
    assert worker["template"]["spec"]["containers"][0]["command"] == [*TRAIN, "--steps", "20"]


def test_parameter_servers_are_a_tf_job_with_a_chief() -> None:
    spec = loaded("parameter_server")["spec"]
    specs = spec["tfReplicaSpecs"]
    assert {role: one["replicas"] for role, one in specs.items()} == {"Chief": 1, "PS": 2, "Worker": 3}
    assert {role: one["restartPolicy"] for role, one in specs.items()} == {
        "Chief": "Never",
        "PS": "Never",
        "Worker": "OnFailure",
    }
    assert spec["runPolicy"]["cleanPodPolicy"] == "Running"  # or the servers would stay for ever
    assert "successPolicy" not in spec  # the chief's success is the job's


def test_the_comments_tell_of_gpus_and_of_open_ports() -> None:
    assert "nvidia.com/gpu" in manifest(JOBS["horovod"])
    assert "no authentication" not in manifest(JOBS["horovod"])
    assert "no authentication" in manifest(JOBS["parameter_server"])
