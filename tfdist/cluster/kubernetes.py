"""A job for Kubeflow's operators: MPIJob of the MPI operator, TFJob of the training operator."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import yaml

__all__ = ["Job", "manifest", "resource"]

_TRAIN = ("python", "-m", "tfdist", "train")
_RESOURCES = {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "4Gi"}}
_GPU_NOTE = """\
# One process is one pod. For a GPU in each {pods} pod add under its resources:
#   limits: {{nvidia.com/gpu: 1}}
# and use an image with TensorFlow for CUDA. Change cpu and memory to what your task needs.
"""
_SERVER_NOTE = """\
# TensorFlow's gRPC servers have no authentication: whoever reaches port 2222 of these pods may run operations in them.
# Let a NetworkPolicy admit the pods of this job only.
"""


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be started."""

    name: str
    image: str
    roles: tuple[str, ...]
    """The role of each process in the order of the ranks."""
    arguments: tuple[str, ...]
    """Of `tfdist train`."""
    mpi: bool = False
    """Whether MPI starts the processes."""


def manifest(job: Job) -> str:
    """The job as YAML, with comments."""
    pods = "Worker" if job.mpi else "Chief and Worker" if "chief" in job.roles else "Worker"
    notes = _GPU_NOTE.format(pods=pods) + ("" if job.mpi else _SERVER_NOTE)
    text: str = yaml.safe_dump(resource(job), sort_keys=False, width=1000)
    return notes + text


def resource(job: Job) -> dict[str, Any]:
    """The job as a Kubernetes resource."""
    return _mpi_job(job) if job.mpi else _tf_job(job)


def _mpi_job(job: Job) -> dict[str, Any]:
    count = len(job.roles)
    # The operator mounts this file, and runs sshd in workers without a command. Open MPI must be told twice that it may
    # run as root.
    start = ["mpirun", "--hostfile", "/etc/mpi/hostfile", "-np", str(count)]
    root = [{"name": f"OMPI_ALLOW_RUN_AS_ROOT{end}", "value": "1"} for end in ("", "_CONFIRM")]
    root += [{"name": f"PRTE_ALLOW_RUN_AS_ROOT{end}", "value": "1"} for end in ("", "_CONFIRM")]
    launcher = {"name": "launcher", "image": job.image, "command": [*start, *_TRAIN, *job.arguments], "env": root}
    worker = {"name": "worker", "image": job.image, "resources": _RESOURCES}
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": job.name},
        "spec": {
            "slotsPerWorker": 1,
            # Workers only wait for connections: without this they would never end. The launcher may be there before the
            # names of its workers are known, so it may try again.
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 3},
            "mpiReplicaSpecs": {"Launcher": _replicas(1, launcher), "Worker": _replicas(count, worker)},
        },
    }


def _tf_job(job: Job) -> dict[str, Any]:
    # The operator finds its container by this name, adds port 2222 to it, and sets TF_CONFIG.
    container: dict[str, Any] = {"name": "tensorflow", "image": job.image, "command": [*_TRAIN, *job.arguments]}
    container["resources"] = _RESOURCES
    directed = "chief" in job.roles
    specs: dict[str, Any] = {}
    for role, title in (("chief", "Chief"), ("ps", "PS"), ("worker", "Worker")):
        if count := job.roles.count(role):
            # A worker that dies beside a chief may come back; anything else that dies has lost part of the job.
            specs[title] = _replicas(
                count, container, restart="OnFailure" if directed and role == "worker" else "Never"
            )
    # Servers wait for ever, so they are removed at the end. The chief's success is the job's; without a chief it is
    # that of all workers, or the first to leave would have the others removed.
    policy: dict[str, Any] = {"runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 3 if directed else 0}}
    if not directed:
        policy["successPolicy"] = "AllWorkers"
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "TFJob",
        "metadata": {"name": job.name},
        "spec": {**policy, "tfReplicaSpecs": specs},
    }


def _replicas(count: int, container: dict[str, Any], restart: str = "Never") -> dict[str, Any]:
    containers = [copy.deepcopy(container)]  # the same object twice would become a YAML anchor
    return {"replicas": count, "restartPolicy": restart, "template": {"spec": {"containers": containers}}}
