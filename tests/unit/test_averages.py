"""The moving average of the weights, by hand and against a Keras optimizer that keeps one (`use_ema=True`)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.toy import ToyLine
from tests.unit.one_device import STRATEGY, trainer
from tfdist.training.averages import Averages


def net() -> keras.Model:
    keras.utils.set_random_seed(0)
    with STRATEGY.scope():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_it_is_what_keras_has(momentum: float) -> None:
    mine, theirs = net(), net()
    with STRATEGY.scope():
        averages = Averages(mine, momentum)
        plain = keras.optimizers.SGD(0.1)
        keeps = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=momentum)
        for optimizer, model in ((plain, mine), (keeps, theirs)):
            optimizer.build(model.trainable_variables)

    @tf.function
    def step(gradients: list[tf.Tensor]) -> None:
        def replica() -> None:
            plain.apply(gradients, mine.trainable_variables)
            averages.update(plain.iterations)
            keeps.apply(gradients, theirs.trainable_variables)

        STRATEGY.run(replica)

    random = np.random.RandomState(0)
    for _ in range(4):
        step([tf.constant(random.randn(*v.shape), tf.float32) for v in mine.trainable_variables])
        for average, kept in zip(averages.variables, keeps._model_variables_moving_average, strict=True):
            assert average.numpy() == pytest.approx(kept.numpy(), abs=1e-6)
    assert any(np.abs(a.numpy() - v.numpy()).max() > 1e-3 for a, v in averages.mapping) is (momentum > 0)


def test_the_first_update_takes_the_weights_and_the_next_the_average() -> None:
    # Weights 3, 5, 6 and momentum 0.75: 3, 0.75·3 + 0.25·5 = 3.5, 0.75·3.5 + 0.25·6 = 4.125.
    model = net()
    with STRATEGY.scope():
        averages = Averages(model, 0.75)
    weight, average = averages.mapping[0]
    assert average.numpy().tolist() == weight.numpy().tolist(), "before any update"
    for update, (value, right) in enumerate(((3.0, 3.0), (5.0, 3.5), (6.0, 4.125)), 1):
        weight.assign(np.full(weight.shape, value))
        STRATEGY.run(lambda update=update: averages.update(tf.constant(update)))
        assert average.numpy() == pytest.approx(np.full(weight.shape, right))


def test_only_what_is_trained_has_an_average() -> None:
    model = net()
    with STRATEGY.scope():
        averages = Averages(model, 0.5)
    assert [id(weight) for weight, _ in averages.mapping] == [id(v) for v in model.trainable_variables]
    assert not any(average.trainable for average in averages.variables)


class Judged(ToyLine):
    def evaluation_splits(self) -> tuple[str, ...]:
        return ("test",)


class TestThroughTheTrainer:
    def test_evaluation_uses_the_average_and_training_does_not(self) -> None:
        # Target 0: w = 0.8, 0.64, 0.512; e = 0.8, 0.72, 0.616. The last batch's loss is 0.64².
        made = trainer(Judged(targets=[0.0]), epochs=3, ema=0.5)
        report = made.fit()
        assert report.losses == pytest.approx([1, 0.64, 0.4096])
        assert report.metrics["test"]["loss"] == pytest.approx(0.616**2)
        assert made.model.get_weights() == [[[pytest.approx(0.512)]]]
        assert [v.numpy().tolist() for v in made.averages.variables] == [[[pytest.approx(0.616)]]]

    def test_a_step_that_is_skipped_leaves_it(self) -> None:
        # The second of three steps is skipped: w = 0.8, 0.8, 0.64; e = 0.8, 0.8, 0.72.
        made = trainer(
            ToyLine(targets=[0.0, np.nan, 0.0], global_batch_size=1), ema=0.5, nan_policy="skip", shuffle_buffer=0
        )
        assert made.fit().skipped_steps == 1
        assert [v.numpy().tolist() for v in made.averages.variables] == [[[pytest.approx(0.72)]]]

    def test_it_belongs_to_the_state_and_does_not_change_training(self) -> None:
        def digests(**settings: Any) -> tuple[str, str]:
            report = trainer(ToyLine(), epochs=2, **settings).fit()
            return report.weights_sha256, report.state_sha256

        plain, half = digests(), digests(ema=0.5)
        assert plain[0] == half[0]
        assert plain[1] != half[1]
