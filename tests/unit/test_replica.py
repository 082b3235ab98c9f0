"""What a step gets of its replica: seeds, and one loss for each optimizer."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.toy import ToyLine
from tests.unit.one_device import STRATEGY, trainer
from tfdist import UsageError
from tfdist.evidence.tasks import Twins
from tfdist.training.replica import Replica


def replica(*, run: int = 0, place: int = 0, **arguments: Any) -> Replica:
    """One on four rows, outside of a training step."""
    with STRATEGY.scope():
        model = ToyLine().build_model()
    given = {"length": tf.constant(4), "replica_id": tf.constant(0), "seed": (run, tf.constant(place, tf.int64))}
    return Replica(model, tf.constant(4), **{**given, **arguments})


class TestSeeds:
    def test_they_fit_stateless_operations(self) -> None:
        seed = replica().seed()
        assert seed.shape == (2,)
        assert tf.random.stateless_normal([3], seed).shape == (3,)

    def test_each_call_run_and_place_has_its_own(self) -> None:
        seeds = []
        for run, place in itertools.product((0, 1, 2**32 - 1), (0, 1, 10**12)):
            made = replica(run=run, place=place)
            seeds += [tuple(made.seed().numpy().tolist()) for _ in range(3)]
        assert len(set(seeds)) == len(seeds) == 27

    def test_they_repeat(self) -> None:
        assert replica(run=3, place=7).seed().numpy().tolist() == replica(run=3, place=7).seed().numpy().tolist()


class TestLoss:
    def test_it_is_the_sum_of_weight_times_loss(self) -> None:
        made = replica()
        assert float(made.loss(tf.constant([1.0, 2.0, 3.0, 4.0]), [0, 1, 0.5, 2])) == 11.5
        part = made.parts["optimizer"]
        assert [float(v) for v in (part.loss, part.weight, part.count, part.penalty)] == [11.5, 3.5, 4, 0]

    def test_losses_of_tokens_with_a_mask(self) -> None:
        made = replica(length=tf.constant(2))
        losses = tf.constant([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
        mask = tf.constant([[True, True, False], [True, False, False]])
        # Row weights 1 and 3: 1 + 2 + 3·8, and 1 + 1 + 3.
        assert float(made.loss(losses, [1.0, 3.0], mask=mask)) == 27
        part = made.parts["optimizer"]
        assert [float(v) for v in (part.loss, part.weight, part.count)] == [27, 5, 6]

    def test_halves_are_added_in_float32(self) -> None:
        made = replica(length=tf.constant(4096))
        loss = made.loss(tf.fill([4096], tf.constant(1.0, tf.float16)) / 3)
        assert loss.dtype == tf.float32
        assert float(loss) == pytest.approx(4096 * float(np.float16(1 / 3)), rel=1e-6)

    def test_what_is_differentiated_is_multiplied_by_the_factor(self) -> None:
        made = replica(factor=tf.constant(8.0))
        assert float(made.loss(tf.ones([4]))) == 32
        assert float(made.parts["optimizer"].loss) == 4

    @pytest.mark.parametrize(("by_weight", "right"), [(True, 2.5), (False, 4.0)])
    def test_what_layers_add_is_a_mean_over_the_rows(self, by_weight: bool, right: float) -> None:
        # A penalty of 1 in the mean, times what the loss is divided by: Σ weight 2.5, or 4 losses.
        made = replica(penalties=[tf.constant(0.75), tf.constant(0.25)], by_weight=by_weight)
        total = made.loss(tf.zeros([4]), [1.0, 1.0, 0.5, 0.0])
        assert float(total) == float(made.parts["optimizer"].penalty) == right
        assert float(made.parts["optimizer"].loss) == 0

    def test_penalties_reach_every_loss_after_them_and_are_reported_once(self) -> None:
        penalties: list[Any] = [tf.constant(1.0)]
        made = replica(parts=("a", "b"), penalties=penalties)
        totals = [made.loss(tf.zeros([4]), name="a")]
        penalties.append(tf.constant(0.5))
        totals.append(made.loss(tf.zeros([4]), name="b"))
        assert [float(total) for total in totals] == [4, 6]
        assert [float(made.parts[name].penalty) for name in "ab"] == [4, 2]

    @pytest.mark.parametrize("order", [(tf.float16, tf.float32), (tf.float32, tf.float16)], ids=str)
    def test_penalties_of_two_types(self, order: tuple[tf.DType, ...]) -> None:
        made = replica(penalties=[tf.constant(0.5, dtype) for dtype in order])
        total = made.loss(tf.zeros([4], tf.float16))
        assert (float(total), total.dtype) == (4, tf.float32)

    def test_faults_of_all_losses_add_up(self) -> None:
        made = replica(parts=("a", "b"))
        made.loss(tf.zeros([3]), name="a")
        made.loss(tf.zeros([4]), [1.0, -1.0, 1.0, 1.0], name="b")
        assert made.faults.numpy().tolist() == [1, 0, 1]


class TestSeveralOptimizers:
    def test_each_applies_the_gradients_of_its_own_loss(self) -> None:
        # Both weights begin with 1. up goes towards y at rate 0.1, down towards −y at 0.2.
        # up: mean target 1.5, loss (1 + 0 + 1 + 4)/4, w = 1 + 0.2·(1.5 − 1).
        # down: weights y of sum 6, losses (1 + y)² = 1, 4, 9, 16, so 70/6; w = 1 − 0.4·(14/6 + 1).
        made = trainer(Twins())
        report = made.fit()
        up, down = (float(w[0][0]) for w in made.model.get_weights())
        assert (up, down) == (pytest.approx(1.1), pytest.approx(1 - 0.4 * (14 / 6 + 1)))
        assert report.losses == [pytest.approx(1.5 + 70 / 6)]
        assert report.parts == {
            "up": {"losses": [1.5], "learning_rates": [pytest.approx(0.1)]},
            "down": {"losses": [pytest.approx(70 / 6)], "learning_rates": [pytest.approx(0.2)]},
        }
        assert report.learning_rates == [pytest.approx(0.1)]
        assert [int(o.iterations) for o in made.optimizers.values()] == [1, 1]

    def test_each_clips_by_itself(self) -> None:
        # Target 3: gradients 2·(1 − 3) = −4 and 2·(1 + 3) = 8, each clipped to 1.
        made = trainer(Twins(targets=(3.0,)), clip_global_norm=1.0)
        made.fit()
        assert [float(w[0][0]) for w in made.model.get_weights()] == [pytest.approx(1.1), pytest.approx(0.8)]

    def test_one_without_weight_is_not_updated_and_the_other_is(self) -> None:
        # down is weighted with targets of 0; up goes towards 0, w = 1 − 0.2.
        made = trainer(Twins(targets=(0.0, 0.0)))
        assert made.fit().parts["down"]["losses"] == [0]
        assert made.model.get_weights() == [[[pytest.approx(0.8)]], [[1.0]]]
        assert [int(o.iterations) for o in made.optimizers.values()] == [1, 0]

    def test_averages_go_on_where_one_is_not_updated(self) -> None:
        # The first update gives the average, 0.8. Then target 1: 0.84, and (0.8 + 0.84)/2; down 1 − 0.4·2 = 0.2, and
        # (1 + 0.2)/2.
        made = trainer(Twins(targets=(0.0, 1.0), global_batch_size=1), ema=0.5, shuffle_buffer=0)
        made.fit()
        assert [float(v.numpy()[0][0]) for v in made.averages.variables] == [pytest.approx(0.82), pytest.approx(0.6)]

    def test_what_layers_add_reaches_the_weights_of_every_optimizer_and_is_reported_once(self) -> None:
        # The penalty 0.25·w² of each output has the gradient 0.5. up: target 1; down: target −1, gradient 2·(1 + 1).
        made = trainer(Added(targets=(1.0, 1.0)))
        report = made.fit()
        up, down = (float(w[0][0]) for w in made.model.get_weights())
        assert (up, down) == (pytest.approx(1 - 0.1 * 0.5), pytest.approx(1 - 0.2 * (4 + 0.5)))
        assert report.penalties == [pytest.approx(0.5)]


@dataclasses.dataclass(kw_only=True)
class Added(Twins):
    """`Twins` with a penalty of 0.25·w² in the mean on the output of each layer."""

    def build_model(self) -> keras.Model:
        inputs = keras.Input((1,))
        penalty = keras.regularizers.L2(0.25)
        layers = [
            keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", activity_regularizer=penalty, name=name)
            for name in ("up", "down")
        ]
        return keras.Model(inputs, [layer(inputs) for layer in layers])


@dataclasses.dataclass(kw_only=True)
class Own(Twins):
    """`Twins` with a step that is given as a function of (replica, outputs)."""

    step: Callable[[Any, Any], None]

    def train_step(self, replica: Any, batch: Any) -> None:
        self.step(replica, replica.model(batch[0], training=True))


def refusal(step: Callable[[Any, Any], None]) -> str:
    with pytest.raises(UsageError) as caught:
        trainer(Own(step=step)).fit()
    return str(caught.value)


class TestNames:
    @pytest.mark.parametrize("name", [None, "left"])
    def test_an_unknown_name(self, name: str | None) -> None:
        with pytest.raises(UsageError) as caught:
            replica(parts=("up", "down")).loss(tf.zeros([4]), name=name)
        assert str(caught.value).startswith(f"name={name!r} is not one of the task's optimizers (up, down).")
        made = replica(parts=("up", "down"))
        made.loss(tf.zeros([4]), name="up")
        with pytest.raises(UsageError, match="is not one of the task's optimizers"):
            made.apply_gradients([], name=name)

    def test_a_loss_that_comes_twice(self) -> None:
        made = replica(parts=("up", "down"))
        made.loss(tf.zeros([4]), name="up")
        made.loss(tf.zeros([4]), name="down")
        with pytest.raises(UsageError, match=r"called twice in one train_step with name='up'\. Add the per-example"):
            made.loss(tf.zeros([4]), name="up")

    def test_gradients_without_their_loss(self) -> None:
        made = replica(parts=("up", "down"))
        made.loss(tf.zeros([4]), name="up")
        with pytest.raises(UsageError, match=r"apply_gradients was called before replica\.loss with name='down'"):
            made.apply_gradients([], name="down")

    def test_a_variable_of_two_optimizers(self) -> None:
        made = replica(parts=("up", "down"))
        pair = (tf.constant([[1.0]]), made.model.trainable_variables[0])
        for name in ("up", "down"):
            made.loss(tf.zeros([4]), name=name)
        made.apply_gradients([pair], name="up")
        with pytest.raises(UsageError, match=r"two gradients for 'sequential.*'\. Add them first"):
            made.apply_gradients([pair], name="down")

    def test_a_part_without_a_loss_or_a_gradient(self) -> None:
        def only_up(replica: Any, outputs: Any) -> None:
            replica.loss(outputs[0][:, 0], name="up")

        def no_gradient(replica: Any, outputs: Any) -> None:
            for name in ("up", "down"):
                replica.loss(outputs[0][:, 0], name=name)
            kernel = replica.model.get_layer("up").kernel
            replica.apply_gradients([(tf.constant([[1.0]]), kernel)], name="up")

        assert "train_step did not call replica.loss(losses) with name='down'" in refusal(only_up)
        assert "train_step gave no gradient for 'down'" in refusal(no_gradient)
