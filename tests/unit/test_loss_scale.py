"""The loss scale: halved by an overflow, doubled after clean steps, never below 1 by itself, never infinite."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.toy import ToyLine
from tests.unit.one_device import trainer
from tfdist import Settings
from tfdist.errors import NonFiniteError
from tfdist.training.loss_scale import LossScale

CLEAN, OVERFLOW, EMPTY = (True, True), (False, True), (True, False)
"""Whether a step is finite, and whether it has weight."""


def scale(**settings: Any) -> LossScale:
    return LossScale(Settings.of(**{"precision": "float16", **settings}))


def after(made: LossScale, *steps: tuple[bool, bool]) -> list[float]:
    """The scale after each step, as the training loop does it: traced once."""
    update = tf.function(made.update, input_signature=[tf.TensorSpec([], tf.bool)] * 2)
    values = []
    for step in steps:
        update(*map(tf.constant, step))
        values.append(float(made.value))
    return values


def test_it_begins_as_set() -> None:
    assert float(scale().value) == 32768
    assert float(scale(loss_scale=8.0).value) == 8


def test_an_overflow_halves_it() -> None:
    assert after(scale(loss_scale=32.0), OVERFLOW, OVERFLOW, CLEAN) == [16, 8, 8]


def test_it_doubles_after_so_many_clean_steps_in_a_row() -> None:
    assert after(scale(loss_scale=8.0, loss_scale_growth=2), *[CLEAN] * 5) == [8, 16, 16, 32, 32]
    # The overflow begins the count again, so that the step after it is the first of three.
    steps = (CLEAN, OVERFLOW, CLEAN, CLEAN, CLEAN)
    assert after(scale(loss_scale=8.0, loss_scale_growth=3), *steps) == [8, 4, 4, 4, 8]
    assert after(scale(loss_scale=8.0, loss_scale_growth=1), CLEAN, CLEAN) == [16, 32]


def test_a_step_without_weight_is_no_clean_step() -> None:
    steps = (CLEAN, EMPTY, EMPTY, CLEAN, EMPTY)
    assert after(scale(loss_scale=8.0, loss_scale_growth=2), *steps) == [8, 8, 8, 16, 16]
    assert after(scale(loss_scale=8.0, loss_scale_growth=1), EMPTY, EMPTY) == [8, 8]


def test_it_never_falls_below_1() -> None:
    assert after(scale(loss_scale=4.0), *[OVERFLOW] * 4) == [2, 1, 1, 1]
    assert after(scale(loss_scale=1.5), OVERFLOW, OVERFLOW) == [1, 1]
    assert after(scale(loss_scale=0.25), OVERFLOW, OVERFLOW) == [0.25, 0.25], "what was set below 1 stays"


def test_it_never_grows_to_infinity() -> None:
    # The largest float32 is 2¹²⁸ − 2¹⁰⁴.
    assert after(scale(loss_scale=2.0**126, loss_scale_growth=1), *[CLEAN] * 3) == [2.0**127] * 3


@pytest.mark.parametrize(("value", "helps"), [(2.0, True), (1.5, True), (1.0, False), (0.5, False)])
def test_it_is_an_overflow_only_above_1(value: float, helps: bool) -> None:
    made = scale(loss_scale=value)
    assert bool(made.overflowed(tf.constant(False))) is helps
    assert not made.overflowed(tf.constant(True))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_other_types_need_none(precision: str) -> None:
    made = scale(precision=precision)
    assert not made.dynamic
    assert made.variables == []
    assert not made.overflowed(tf.constant(False))
    assert after(made, CLEAN, OVERFLOW) == [1, 1]


def test_what_a_run_must_keep() -> None:
    made = scale(loss_scale=8.0, loss_scale_growth=3)
    after(made, CLEAN, CLEAN)
    assert [float(v) for v in made.variables] == [8, 2]


@dataclasses.dataclass(kw_only=True)
class Slope(ToyLine):
    """`ToyLine` with inputs x and a first weight of one's own: the gradient is 2·x·(w·x − y)."""

    inputs: tuple[float, ...]
    start: float = 1.0
    global_batch_size: int = 1

    def build_model(self) -> keras.Model:
        start = keras.initializers.Constant(self.start)
        return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer=start)])

    def dataset(self, split: str) -> Any:
        return np.array(self.inputs, np.float32)[:, None], np.array(self.targets, np.float32)


class TestThroughTheTrainer:
    def test_an_overflow_is_skipped_and_the_next_step_goes_on(self) -> None:
        # Step 1: the loss 60000² fits into its float32, and the gradient times 32768 not into float16.
        # Step 2: w = 1 + 0.2·(2 − 1).
        made = trainer(Slope(inputs=(60000.0, 1.0), targets=[0.0, 2.0]), precision="float16", shuffle_buffer=0)
        report = made.fit()
        assert report.skipped_steps == 1
        assert report.losses == [3.6e9, 1.0]
        assert report.loss_scale == 16384
        assert int(made.optimizer.iterations) == 1
        assert made.model.get_weights() == [[[pytest.approx(1.2)]]]

    @pytest.mark.parametrize(("loss_scale", "right"), [(1.0, 0.0), (32768.0, 2.0**-25)])
    def test_small_gradients_do_not_vanish(self, loss_scale: float, right: float) -> None:
        # The gradient is 2·2⁻⁵·(0 − 2⁻²¹) = −2⁻²⁵; the least that float16 has is 2⁻²⁴.
        task = Slope(inputs=(2.0**-5,), targets=[2.0**-21], start=0.0, learning_rate=1.0)
        made = trainer(task, precision="float16", loss_scale=loss_scale)
        made.fit()
        assert made.model.get_weights() == [[[right]]]

    def test_what_is_not_finite_at_a_scale_of_1_stops(self) -> None:
        made = trainer(Slope(inputs=(np.nan,), targets=[0.0]), precision="float16", loss_scale=1.0)
        with pytest.raises(NonFiniteError, match=r"^step 1: the loss is not finite on replica 0"):
            made.fit()
