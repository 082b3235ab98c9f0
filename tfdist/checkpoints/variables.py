"""Tensors in TensorFlow's own checkpoint format. The only file of this package that needs TensorFlow.

Runs on the host's processor, in any thread and inside of any strategy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tfdist.checkpoints.manifest import DATA
from tfdist.errors import CheckpointProblem

__all__ = ["read", "write"]

_PREFIX = "variables"


def write(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write the two files of TensorFlow's format.

    Raises:
        CheckpointProblem: why they could not be written.
    """
    if not tensors or "" in tensors:
        raise CheckpointProblem("there are no variables to save, or one has no name")
    for name, tensor in tensors.items():
        if tensor.dtype.kind in "OSUMm":
            raise CheckpointProblem(f"{name} is of type {tensor.dtype}, and checkpoints hold numbers only")
    import tensorflow as tf

    names = sorted(tensors)
    try:
        with tf.init_scope(), tf.device("/CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=str(folder / _PREFIX),
                tensor_names=names,
                shape_and_slices=[""] * len(names),
                tensors=[tf.constant(tensors[name]) for name in names],
            )
    except (tf.errors.OpError, ValueError, TypeError) as error:
        raise CheckpointProblem(_reason(str(error))) from None
    expected = sum(tensor.nbytes for tensor in tensors.values())
    written = (folder / DATA).stat().st_size
    if written != expected:
        raise CheckpointProblem(f"TensorFlow wrote {written} bytes of {expected} and said nothing")


def read(folder: Path) -> dict[str, np.ndarray]:
    """All tensors by name. TensorFlow checks its own checksum of each.

    Raises:
        CheckpointProblem: why they cannot be read.
    """
    import tensorflow as tf

    try:
        reader = tf.train.load_checkpoint(str(folder / _PREFIX))
        # A scalar comes as one of NumPy's numbers.
        return {name: np.asarray(reader.get_tensor(name)) for name in sorted(reader.get_variable_to_shape_map())}
    except (tf.errors.OpError, RuntimeError, ValueError, TypeError) as error:
        raise CheckpointProblem(f"TensorFlow cannot read it: {_reason(str(error))}") from None


def _reason(message: str) -> str:
    """TensorFlow's message without the names of its nodes; a full disk in the system's words."""
    if "No space left on device" in message:
        return "No space left on device"
    return " ".join(re.sub(r"\{\{.*?\}\}|\[Op:.*", "", message).split())
