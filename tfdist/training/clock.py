"""The time, as compiled code sees it."""

from __future__ import annotations

import time

import numpy as np
import tensorflow as tf

from tfdist import private_tf

__all__ = ["now"]


def now() -> tf.Tensor:
    """Seconds of the system's clock, float64, as `time.time()` gives them (traced).

    TensorFlow's own operation fails where operations are to be deterministic; Python's clock is read there.
    """
    if not private_tf.is_op_determinism_enabled():
        return tf.timestamp()
    read = tf.numpy_function(lambda: np.float64(time.time()), [], tf.float64, stateful=True)
    return tf.ensure_shape(read, [])
