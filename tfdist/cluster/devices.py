"""The devices of this process's replicas, and TensorFlow's threads. Before TensorFlow runs anything."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import TypeVar

from tfdist.cluster import runtime
from tfdist.cluster.channel import Channel
from tfdist.cluster.identity import Identity
from tfdist.errors import EnvironmentProblem

__all__ = ["assigned", "show_gpus", "split_cpu", "take_devices"]

T = TypeVar("T")


def take_devices(identity: Identity, channel: Channel, count: int = 1, *, grow: bool = True) -> list[str]:
    """Make some GPUs the only ones that this process sees, and set the threads. Every rank calls this.

    Args:
        count: devices of each process.
        grow: whether TensorFlow takes a GPU's memory as it needs it, or all of it at once.

    Returns:
        `GPU:0` and so on, or logical CPU devices where there is no GPU.

    Raises:
        EnvironmentProblem: there are more replicas on this host than GPUs, or TensorFlow has already used them
        all.
    """
    import tensorflow as tf

    host = socket.gethostname()
    asked = channel.exchange("choosing devices", [host, os.environ.get("CUDA_VISIBLE_DEVICES")])
    here = [visible for name, visible in asked if name == host]
    _set_threads(runtime.intra_op_threads(identity, local_replicas=count))
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return split_cpu(count)
    own = assigned(gpus, identity.local_rank, identity.local_size, count, visible=here, host=host)
    try:
        show_gpus(own, grow=grow)
    except RuntimeError:
        if tf.config.get_visible_devices("GPU") != own:
            raise EnvironmentProblem(
                "this rank cannot have its own GPU, since TensorFlow has already taken them all. Create the strategy "
                "before any other TensorFlow operation."
            ) from None
    return [f"GPU:{i}" for i in range(count)]


def assigned(
    gpus: Sequence[T], local_rank: int, local_size: int, count: int, *, visible: Sequence[str | None], host: str
) -> list[T]:
    """The GPUs of one process among those of its host.

    Args:
        gpus: those that TensorFlow sees in this process.
        visible: CUDA_VISIBLE_DEVICES of each process on the host. Where they all differ, the launcher has chosen for
            each, as SLURM does with --gpus-per-task, and `gpus` are this process's own.

    Raises:
        EnvironmentProblem: there are not enough.
    """
    launcher_chose = local_size > 1 and len(gpus) == count and len(set(visible)) == len(visible) == local_size
    first = 0 if launcher_chose else local_rank * count
    if first + count > len(gpus):
        each = "" if count == 1 else f" with {count} replicas each"
        raise EnvironmentProblem(
            f"{local_size} ranks run on host {host}{each}, but TensorFlow sees {len(gpus)} GPU(s) there. Start at "
            f"most {len(gpus) // count} per host, or set CUDA_VISIBLE_DEVICES='' to train on the CPU."
        )
    return list(gpus[first : first + count])


def show_gpus(gpus: Sequence[object], *, grow: bool) -> None:
    """Let TensorFlow use these GPUs and no others. Raises RuntimeError where it has begun to use others."""
    import tensorflow as tf

    tf.config.set_visible_devices(list(gpus), "GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, grow)


def split_cpu(count: int) -> list[str]:
    """So many logical CPU devices.

    Raises:
        EnvironmentProblem: TensorFlow has already run in this process with fewer.
    """
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    existing = tf.config.get_logical_device_configuration(cpu) or []
    if count > max(1, len(existing)):
        try:
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
        except RuntimeError:
            raise EnvironmentProblem(
                f"replicas={count} needs {count} logical CPU devices, but TensorFlow has already run in this process "
                f"with {max(1, len(existing))}. Create the Trainer before any other TensorFlow operation."
            ) from None
    return [f"CPU:{i}" for i in range(count)]


def _set_threads(threads: int) -> None:
    """By the rule of `runtime.intra_op_threads`, but keep what the user has set and what a running TensorFlow has."""
    import tensorflow as tf

    if tf.config.threading.get_intra_op_parallelism_threads() == 0:
        try:
            tf.config.threading.set_intra_op_parallelism_threads(threads)
        except RuntimeError:
            return
