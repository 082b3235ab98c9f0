"""The learning rate of each step, against the formula of the module's docstring worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.toy import ToyLine
from tests.unit.one_device import STRATEGY, trainer
from tfdist import Settings, UsageError
from tfdist.training.learning_rate import LearningRate, Plateau

SGD = keras.optimizers.SGD


def schedule(base: Any = 0.1, *, replicas: int = 2, warmup: int = 0, steps: int = 8, **settings: Any) -> LearningRate:
    return LearningRate(base, Settings.of(**settings), replicas=replicas, warmup=warmup, steps=steps)


def rates(made: LearningRate, steps: int) -> list[float]:
    """The rates of the first steps, as the training loop asks for them: traced once."""
    traced = tf.function(made, input_signature=[tf.TensorSpec([], tf.int64)])
    return [float(traced(tf.constant(step, tf.int64))) for step in range(steps)]


def near(*values: float) -> Any:
    return pytest.approx(list(values), rel=1e-6, abs=1e-8)


class Given(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of a Keras optimizer that gives these values."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def __call__(self, step: Any) -> Any:
        return tf.gather(tf.constant(self.values), tf.cast(step, tf.int32))

    def get_config(self) -> dict[str, Any]:
        return {}


class TestFormula:
    def test_a_constant_rate(self) -> None:
        assert rates(schedule(), 3) == near(0.1, 0.1, 0.1)

    @pytest.mark.parametrize(("kind", "factor"), [("none", 1), ("linear", 9), ("sqrt", 3)])
    def test_scaling_with_the_number_of_replicas(self, kind: str, factor: float) -> None:
        assert rates(schedule(replicas=9, lr_scaling=kind), 2) == near(0.1 * factor, 0.1 * factor)

    def test_a_warm_up_goes_from_the_base_to_the_factor(self) -> None:
        # f = 2, W = 4: 1 + min(1, (s + 1)/4).
        assert rates(schedule(warmup=4, lr_scaling="linear"), 6) == near(0.125, 0.15, 0.175, 0.2, 0.2, 0.2)

    def test_a_warm_up_without_a_factor_changes_nothing(self) -> None:
        assert rates(schedule(warmup=4), 5) == near(*[0.1] * 5)

    @pytest.mark.parametrize(("kind", "top"), [("none", 0.1), ("linear", 0.2)])
    def test_a_warm_up_from_zero(self, kind: str, top: float) -> None:
        made = schedule(warmup=4, lr_scaling=kind, warmup_steps=4, warmup_from_zero=True)
        assert rates(made, 5) == near(0.25 * top, 0.5 * top, 0.75 * top, top, top)

    def test_linear_decay(self) -> None:
        # t = s/4.
        assert rates(schedule(steps=4, lr_schedule="linear"), 6) == near(0.1, 0.075, 0.05, 0.025, 0, 0)

    def test_cosine_decay(self) -> None:
        # ½(1 + cos πt) with t = 0, ¼, ½, ¾, 1.
        high, low = 0.05 * (1 + math.sqrt(0.5)), 0.05 * (1 - math.sqrt(0.5))
        assert rates(schedule(steps=4, lr_schedule="cosine"), 6) == near(0.1, high, 0.05, low, 0, 0)

    def test_decay_begins_after_the_warm_up(self) -> None:
        # f = 2, W = 2, T = 6: m = 1.5, 2, 2, …; t = 0, 0, 0, ¼, ½, ¾.
        made = schedule(steps=6, warmup=2, lr_scaling="linear", lr_schedule="linear")
        assert rates(made, 7) == near(0.15, 0.2, 0.2, 0.15, 0.1, 0.05, 0)

    def test_a_warm_up_as_long_as_the_run(self) -> None:
        made = schedule(steps=2, warmup=2, lr_scaling="linear", lr_schedule="cosine")
        assert rates(made, 2) == near(0.15, 0.2)

    def test_plateaus_multiply_all_further_steps(self) -> None:
        made = schedule(lr_scaling="linear")
        made.plateau = Plateau()
        traced = tf.function(made, input_signature=[tf.TensorSpec([], tf.int64)])
        step = tf.constant(0, tf.int64)
        assert float(traced(step)) == pytest.approx(0.2)
        made.plateau.reduce(0.5)
        assert float(traced(step)) == pytest.approx(0.1)
        made.plateau.reduce(0.1)
        assert float(traced(step)) == pytest.approx(0.01)


def taken_over(optimizer: Any, *, replicas: int = 2, warmup: int = 0, steps: int = 3, **settings: Any) -> LearningRate:
    with STRATEGY.scope():
        made = LearningRate.of(optimizer, Settings.of(**settings), replicas=replicas, warmup=warmup, steps=steps)
    assert optimizer._learning_rate is made
    return made


def refusal(make: Callable[[], Any], **settings: Any) -> str:
    with pytest.raises(UsageError) as caught:
        taken_over(make(), **settings)
    return str(caught.value)


class TestOptimizers:
    def test_a_number(self) -> None:
        optimizer = SGD(0.25)
        assert rates(taken_over(optimizer, lr_scaling="linear"), 2) == near(0.5, 0.5)
        assert float(optimizer.learning_rate) == 0.5

    def test_a_schedule_of_its_own_is_honoured_and_scaled(self) -> None:
        def decay() -> Any:
            return SGD(keras.optimizers.schedules.ExponentialDecay(0.8, 1, 0.5))

        assert rates(taken_over(decay()), 3) == near(0.8, 0.4, 0.2)
        # Times f = 2, and with W = 2 times 1.5, 2, 2.
        assert rates(taken_over(decay(), lr_scaling="linear"), 3) == near(1.6, 0.8, 0.4)
        assert rates(taken_over(decay(), lr_scaling="linear", warmup=2), 3) == near(1.2, 0.8, 0.4)

    def test_a_function_is_asked_at_every_step(self) -> None:
        with STRATEGY.scope():
            rate = tf.Variable(0.5)
        made = taken_over(SGD(lambda: rate * 1.0), lr_scaling="linear")
        traced = tf.function(made, input_signature=[tf.TensorSpec([], tf.int64)])
        assert float(traced(tf.constant(0, tf.int64))) == 1.0
        rate.assign(0.25)
        assert float(traced(tf.constant(0, tf.int64))) == 0.5

    def test_two_schedules_are_refused(self) -> None:
        message = refusal(lambda: SGD(Given(1.0, 1.0, 1.0)), lr_schedule="cosine")
        assert message == (
            "lr_schedule='cosine' is set, but the optimizer SGD has a schedule of its own (Given). Leave one of them "
            "out."
        )

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -0.5])
    @pytest.mark.parametrize("step", [1, 3])
    def test_a_first_or_last_rate_that_is_no_rate_is_refused(self, step: int, bad: float) -> None:
        values = [0.1, 0.1, 0.1]
        values[step - 1] = bad
        message = refusal(lambda: SGD(Given(*values)))
        assert message.startswith(f"the learning rate of step {step} is {bad}")
        assert message.endswith("optimizer SGD must give finite numbers, 0 or more.")

    def test_the_optimizer_can_be_saved_with_its_base(self) -> None:
        optimizer = SGD(0.25)
        taken_over(optimizer)
        assert optimizer.get_config()["learning_rate"]["config"] == {"base": 0.25}
        optimizer = SGD(keras.optimizers.schedules.ExponentialDecay(0.8, 1, 0.5))
        taken_over(optimizer)
        base = optimizer.get_config()["learning_rate"]["config"]["base"]
        assert keras.saving.deserialize_keras_object(base).initial_learning_rate == 0.8


class Scheduled(ToyLine):
    """`ToyLine` with a schedule of one rate for each step."""

    rates: tuple[float, ...] = ()

    def build_optimizer(self, learning_rate: float) -> Any:
        return SGD(Given(*self.rates))


class TestThroughTheTrainer:
    def test_a_later_rate_that_is_no_rate_stops_at_its_step(self) -> None:
        task = Scheduled(targets=[2.0])
        task.rates = (0.1, math.nan, 0.1)
        made = trainer(task, steps=3)
        with pytest.raises(UsageError) as caught:
            made.fit()
        assert str(caught.value).startswith("step 2: the learning rate is nan; the step was not applied")
        assert caught.value.shared
        assert made.model.get_weights() == [[[pytest.approx(1.2)]]]  # step 1: 1 + 0.2·(2 − 1)

    def test_the_report_has_the_rates_and_the_weights_have_moved_by_them(self) -> None:
        # W = 2 epochs of one step, T = 4: m = ½, 1, 1, 1; t = 0, 0, 0, ½. From w = 1 to y = 0: w ← w·(1 − 2·rate).
        made = trainer(ToyLine(targets=[0.0]), epochs=4, warmup_epochs=2, warmup_from_zero=True, lr_schedule="linear")
        report = made.fit()
        assert report.learning_rates == near(0.05, 0.1, 0.1, 0.05)
        assert made.model.get_weights() == [[[pytest.approx(0.9 * 0.8 * 0.8 * 0.9)]]]
        assert report.learning_rate == 0.1, "the base"

    def test_epochs_of_a_warm_up_must_be_countable(self) -> None:
        class Endless(ToyLine):
            def dataset(self, split: str) -> Any:
                return tf.data.Dataset.from_tensor_slices(super().dataset(split)).repeat()

        with pytest.raises(
            UsageError, match=r"warmup_epochs=2, but the training dataset never ends.* Set warmup_steps"
        ):
            trainer(Endless(), steps=3, warmup_epochs=2, lr_scaling="linear").fit()

    def test_a_warm_up_without_effect_is_noticed(self, capsys: pytest.CaptureFixture[str]) -> None:
        trainer(ToyLine(), warmup_steps=3, quiet=False).fit()
        assert "a warm-up of 3 steps changes nothing with lr_scaling='none'" in capsys.readouterr().out
