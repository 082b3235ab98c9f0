"""The device of this process's replica, and TensorFlow's threads. Before TensorFlow runs anything."""

from __future__ import annotations

import os
import socket

from tfdist.cluster import runtime
from tfdist.cluster.channel import Channel
from tfdist.cluster.identity import Identity
from tfdist.errors import EnvironmentProblem

__all__ = ["take_device"]


def take_device(identity: Identity, channel: Channel) -> str:
    """Make one GPU the only one that this process sees, and set the threads. Every rank calls this.

    Returns:
        `GPU:0`, or `CPU:0` where there is no GPU.

    Raises:
        EnvironmentProblem: there are more ranks on this host than GPUs, or TensorFlow has already used them
        all.
    """
    import tensorflow as tf

    host = socket.gethostname()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    asked = channel.exchange("choosing devices", [host, visible])
    here = [theirs for name, theirs in asked if name == host]
    _set_threads(runtime.intra_op_threads(identity, local_replicas=1))
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return "CPU:0"
    launcher_chose = len(gpus) == 1 and len(set(here)) == len(here)  # SLURM's --gpus-per-task, for one
    index = 0 if launcher_chose else identity.local_rank
    if index >= len(gpus):
        raise EnvironmentProblem(
            f"{identity.local_size} ranks run on host {host}, but TensorFlow sees {len(gpus)} GPU(s) there. Start at "
            f"most {len(gpus)} per host, or set CUDA_VISIBLE_DEVICES='' to train on the CPU."
        )
    try:
        tf.config.set_visible_devices(gpus[index], "GPU")
        tf.config.experimental.set_memory_growth(gpus[index], True)
    except RuntimeError:
        if tf.config.get_visible_devices("GPU") != [gpus[index]]:
            raise EnvironmentProblem(
                "this rank cannot have its own GPU, since TensorFlow has already taken them all. Create the strategy "
                "before any other TensorFlow operation."
            ) from None
    return "GPU:0"


def _set_threads(threads: int) -> None:
    """By the rule of `runtime.intra_op_threads`, but keep what the user has set and what a running TensorFlow has."""
    import tensorflow as tf

    if tf.config.threading.get_intra_op_parallelism_threads() == 0:
        try:
            tf.config.threading.set_intra_op_parallelism_threads(threads)
        except RuntimeError:
            return
