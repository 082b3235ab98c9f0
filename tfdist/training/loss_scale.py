"""The loss scale of float16: large enough that small gradients do not vanish, small enough that none overflows.

After Micikevicius et al., Mixed Precision Training (2018): halved after an overflow, which skips the step, and doubled
after so many steps in a row without one.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.config import Settings

__all__ = ["LossScale"]


class LossScale:
    """One number for all replicas. It is never below 1: what overflows there is not an overflow but a NaN.

    Its variables belong to this process; all processes do the same with them, since they see the same steps.
    """

    def __init__(self, settings: Settings) -> None:
        self._growth = settings.loss_scale_growth
        self.dynamic = settings.precision == "float16"
        """Whether there is one; else it is 1 for ever."""
        with tf.init_scope(), tf.device("CPU:0"):
            self.value = tf.Variable(settings.loss_scale if self.dynamic else 1.0, trainable=False, name="loss_scale")
            self._clean = tf.Variable(0, dtype=tf.int64, trainable=False, name="clean_steps")

    @property
    def variables(self) -> list[tf.Variable]:
        """What a run must keep to go on."""
        return [self.value, self._clean] if self.dynamic else []

    def overflowed(self, finite: tf.Tensor) -> tf.Tensor:
        """Whether a step that is not finite is one to skip, since a smaller scale may help."""
        return ~finite & (self.value > 1.0) if self.dynamic else tf.constant(False)

    def update(self, finite: tf.Tensor, has_weight: tf.Tensor) -> None:
        """Account for a step (traced). One without weight changes nothing."""
        if not self.dynamic:
            return
        clean = tf.where(finite, self._clean + tf.cast(has_weight, tf.int64), 0)
        grown = clean >= self._growth
        halved = tf.maximum(self.value / 2, tf.minimum(self.value, 1.0))
        doubled = tf.where(tf.math.is_finite(self.value * 2), self.value * 2, self.value)
        self.value.assign(tf.where(finite, tf.where(grown, doubled, self.value), halved))
        self._clean.assign(tf.where(grown, tf.zeros_like(clean), clean))
