"""TensorFlow's strategies of one process: one device, and mirrored over several."""

from __future__ import annotations

import tensorflow as tf

from tfdist.errors import EnvironmentProblem
from tfdist.strategies.table import Place

__all__ = ["open_mirrored", "open_one_device"]


def open_one_device(place: Place) -> tf.distribute.Strategy:
    """The reference of all backends: one replica on the first GPU, else on the CPU."""
    return tf.distribute.OneDeviceStrategy(_devices(1)[0])


def open_mirrored(place: Place) -> tf.distribute.Strategy:
    """`place.replicas` replicas on as many GPUs, or on logical CPU devices where there is no GPU."""
    devices = _devices(place.replicas)
    if devices[0].startswith("GPU"):
        return tf.distribute.MirroredStrategy(devices)
    # Plain additions on a CPU. TensorFlow's default there are collectives, which one failing step makes unusable for
    # the rest of the process, and which allow only one MirroredStrategy in it.
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())


def _devices(count: int) -> list[str]:
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        if count > len(gpus):
            raise EnvironmentProblem(
                f"replicas={count}, but TensorFlow sees {len(gpus)} GPU(s). Ask for at most {len(gpus)}, or set "
                "CUDA_VISIBLE_DEVICES='' to train on logical CPU devices."
            )
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        return [f"GPU:{i}" for i in range(count)]
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
