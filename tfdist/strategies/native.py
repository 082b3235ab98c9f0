"""TensorFlow's strategies of one process: one device, mirrored over several, and variables in a central place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.cluster.devices import show_gpus, split_cpu
from tfdist.errors import EnvironmentProblem
from tfdist.strategies.creating import creating
from tfdist.strategies.table import Place

__all__ = ["CentralStorage", "open_central_storage", "open_mirrored", "open_one_device"]


class CentralStorage(tf.distribute.experimental.CentralStorageStrategy):
    """`tf.distribute.experimental.CentralStorageStrategy` under which every variable may be written in a step.

    A variable that says nothing of how the values of several replicas become one cannot be assigned there, and Keras's
    BatchNormalization makes such. Here it takes the first replica's value.
    """

    def scope(self) -> contextlib.AbstractContextManager[tf.distribute.Strategy]:
        """As TensorFlow's own."""
        return super().scope() if tf.distribute.has_strategy() else creating(super().scope(), _writable)


def _writable(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    unset = (None, tf.VariableAggregation.NONE)
    if kwargs.get("aggregation") in unset:
        kwargs["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return next_creator(**kwargs)


def open_one_device(place: Place) -> tf.distribute.Strategy:
    """The reference of all backends: one replica on the first GPU, else on the CPU."""
    return tf.distribute.OneDeviceStrategy(_devices(place)[0])


def open_mirrored(place: Place) -> tf.distribute.Strategy:
    """`place.replicas` replicas on as many GPUs, or on logical CPU devices where there is no GPU."""
    devices = _devices(place)
    if devices[0].startswith("GPU"):
        return tf.distribute.MirroredStrategy(devices)
    # Plain additions on a CPU. TensorFlow's default there are collectives, which one failing step makes unusable for
    # the rest of the process, and which allow only one MirroredStrategy in it.
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())


def open_central_storage(place: Place) -> tf.distribute.Strategy:
    """Replicas as those of `open_mirrored`; one copy of the variables, on the CPU."""
    return CentralStorage(compute_devices=_devices(place), parameter_device="CPU:0")


def _devices(place: Place) -> list[str]:
    count = place.replicas
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return split_cpu(count)
    if count > len(gpus):
        raise EnvironmentProblem(
            f"replicas={count}, but TensorFlow sees {len(gpus)} GPU(s). Ask for at most {len(gpus)}, or set "
            "CUDA_VISIBLE_DEVICES='' to train on logical CPU devices."
        )
    show_gpus(gpus, grow=place.options.gpu_memory == "grow")
    return [f"GPU:{i}" for i in range(count)]
