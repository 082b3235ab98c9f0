"""What a training step may and may not do. That replicas agree is for the contract suite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.toy import ToyLine
from tests.unit.one_device import STRATEGY
from tfdist import Settings, UsageError
from tfdist.training.data import row_count
from tfdist.training.step import StepResult, TrainingStep
from tfdist.training.weighting import fault_of

FOUR = (np.ones((4, 1), np.float32), np.array([0, 1, 2, 3], np.float32))


@dataclasses.dataclass(kw_only=True)
class Own(ToyLine):
    """`ToyLine` with a step that is given as a function of (task, replica, batch)."""

    step: Callable[[Any, Any, Any], None]

    def train_step(self, replica: Any, batch: Any) -> None:
        self.step(self, replica, batch)


class Built:
    """A task with its model and its step, compiled for batches like `batch`."""

    def __init__(self, task: Any, batch: Any = FOUR, **settings: Any) -> None:
        with STRATEGY.scope():
            self.model = task.build_model()
            self.optimizer = task.build_optimizer(task.learning_rate)
            self.optimizer.build(self.model.trainable_variables)
        step = TrainingStep(STRATEGY, task, self.model, self.optimizer, Settings.of(**settings))
        spec = tf.nest.map_structure(lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), batch)
        self._run = tf.function(lambda batch: step(lambda: batch)).get_concrete_function(spec)

    def __call__(self, batch: Any = FOUR) -> StepResult:
        batch = tf.nest.map_structure(tf.constant, batch)
        return StepResult(*tf.nest.map_structure(lambda value: value.numpy(), tuple(self._run(batch))))

    @property
    def weights(self) -> list[Any]:
        return [v.numpy().tolist() for v in self.model.trainable_variables]


def gradients(replica: Any, tape: tf.GradientTape, loss: tf.Tensor) -> list[tuple[Any, Any]]:
    variables = replica.model.trainable_variables
    return list(zip(tape.gradient(loss, variables), variables, strict=True))


def refusal(step: Callable[[Any, Any, Any], None], **fields: Any) -> str:
    with pytest.raises(UsageError) as caught:
        Built(Own(step=step, **fields))
    return str(caught.value)


def with_losses(change: Callable[[tf.Tensor], Any], weights: Callable[[tf.Tensor], Any] = lambda losses: None) -> Any:
    """A step that is right but for what `change` makes of its losses, or for its weights."""

    def step(task: Any, replica: Any, batch: Any) -> None:
        inputs, labels = batch
        with tf.GradientTape() as tape:
            losses = task.losses(labels, replica.model(inputs, training=True))
            loss = replica.loss(change(losses), weights(losses))
        replica.apply_gradients(gradients(replica, tape, loss))

    return step


class TestRightSteps:
    def test_a_plain_step(self) -> None:
        built = Built(ToyLine())
        # Losses (1 − y)² are 1, 0, 1, 4; the gradient is 2·(1 − 1.5).
        result = built()
        assert result.losses.tolist() == [1.5]
        assert result.rates.tolist() == [pytest.approx(0.1)]
        assert (result.penalty, result.rows, result.finite, result.skipped, result.halt) == (0, 4, True, False, False)
        assert result.suspects.tolist() == [0, 0]
        assert result.faults.tolist() == [0, 0, 0]
        assert built.weights == [[[pytest.approx(1.1)]]]
        assert int(built.optimizer.iterations) == 1

    def test_weights_divide_by_their_sum(self) -> None:
        batch = (*FOUR, np.array([0, 0, 0, 0.5], np.float32))
        built = Built(ToyLine(), batch)
        assert built(batch).losses.tolist() == [4.0]
        assert built.weights == [[[pytest.approx(1.4)]]]

    def test_weights_may_be_of_another_type(self) -> None:
        weights = tf.constant([False, True, True, False])
        assert Built(Own(step=with_losses(lambda losses: losses, lambda _: weights)))().losses.tolist() == [0.5]

    def test_the_weight_is_counted_exactly_whatever_the_type_of_the_losses(self) -> None:
        # 301 rows of target 2: w = 1 + 0.2·(2 − 1). bfloat16 has 8 bits, so that it cannot count to 301.
        batch = (np.ones((301, 1), np.float32), np.full(301, 2, np.float32))
        built = Built(Own(step=with_losses(lambda losses: tf.cast(losses, tf.bfloat16))), batch)
        built(batch)
        assert built.weights == [[[pytest.approx(1.2, abs=1e-6)]]]

    @pytest.mark.parametrize("kind", ["no rows", "no weight"])
    def test_a_batch_without_weight_changes_nothing(self, kind: str) -> None:
        full = (*FOUR, np.ones(4, np.float32))
        built = Built(ToyLine(), full)
        batch = tuple(a[:0] for a in full) if kind == "no rows" else (*FOUR, np.zeros(4, np.float32))
        result = built(batch)
        assert (result.losses.tolist(), result.rows) == ([0.0], len(batch[0]))
        assert (result.finite, result.skipped, result.halt) == (True, False, False)
        assert built.weights == [[[1.0]]]
        assert int(built.optimizer.iterations) == 0

    @pytest.mark.parametrize("policy", ["stop", "skip"])
    def test_a_loss_that_is_not_finite_changes_nothing(self, policy: str) -> None:
        built = Built(ToyLine(), nan_policy=policy)
        result = built((FOUR[0], np.array([0, np.nan, 2, 3], np.float32)))
        assert not result.finite
        assert (result.halt, result.skipped) == (policy == "stop", policy == "skip")
        assert result.suspects.tolist() == [1, 0]
        assert built.weights == [[[1.0]]]
        assert int(built.optimizer.iterations) == 0
        assert built().losses.tolist() == [1.5], "and the next step is as if it had not been"

    def test_a_loss_that_is_not_finite_may_be_ignored(self) -> None:
        built = Built(ToyLine(), nan_policy="ignore")
        result = built((FOUR[0], np.array([0, np.nan, 2, 3], np.float32)))
        assert (result.finite, result.skipped, result.halt) == (False, False, False)
        assert np.isnan(built.weights[0][0][0])
        assert int(built.optimizer.iterations) == 1

    def test_a_row_without_weight_may_have_a_loss_that_is_not_a_number(self) -> None:
        # Losses 1, 0, 1, 4, of which the first is not a number; weights 0, 1, 1, 1: mean 5/3; mean target 2.
        step = with_losses(
            lambda losses: losses + tf.constant([np.nan, 0, 0, 0]), lambda _: tf.constant([0.0, 1, 1, 1])
        )
        built = Built(Own(step=step))
        result = built()
        assert result.losses.tolist() == [pytest.approx(5 / 3)]
        assert (result.finite, result.halt) == (True, False)
        assert result.suspects.tolist() == [0, 0]
        assert built.weights == [[[pytest.approx(1.2)]]]

    def test_a_weight_that_is_no_weight_halts(self) -> None:
        batch = (*FOUR, np.array([1, -1, 1, 1], np.float32))
        built = Built(ToyLine(), batch, nan_policy="ignore")
        result = built(batch)
        assert (result.halt, result.skipped) == (True, False)
        assert result.faults.tolist() == [0, 0, 1]
        assert built.weights == [[[1.0]]]
        assert int(built.optimizer.iterations) == 0

    def test_a_gradient_that_is_not_finite_changes_nothing(self) -> None:
        def step(task: Any, replica: Any, batch: Any) -> None:
            with tf.GradientTape() as tape:
                outputs = replica.model(batch[0], training=True)[:, 0]
                loss = replica.loss(tf.sqrt(outputs - outputs) + batch[1])  # 0, whose root has no slope
            replica.apply_gradients(gradients(replica, tape, loss))

        built = Built(Own(step=step))
        result = built()
        assert result.losses.tolist() == [1.5]
        assert (result.finite, result.halt) == (False, True)
        assert result.suspects.tolist() == [0, 0], "no loss was wrong"
        assert built.weights == [[[1.0]]]

    def test_some_variables_may_have_no_gradient(self) -> None:
        class Two(Own):
            def build_model(self) -> keras.Model:
                return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])

        def step(task: Any, replica: Any, batch: Any) -> None:
            kernel, bias = replica.model.trainable_variables
            with tf.GradientTape() as tape:
                loss = replica.loss(task.losses(batch[1], replica.model(batch[0], training=True)))
            replica.apply_gradients([(tape.gradient(loss, kernel), kernel), (None, bias)])

        built = Built(Two(step=step))
        built()
        assert built.weights == [[[pytest.approx(1.1)]], [0.0]]

    def test_a_regularizer_is_enough_of_a_gradient(self) -> None:
        class Two(Own):
            def build_model(self) -> keras.Model:
                return keras.Sequential(
                    [
                        keras.Input((1,)),
                        keras.layers.Dense(
                            1,
                            kernel_initializer="ones",
                            bias_initializer="ones",
                            bias_regularizer=keras.regularizers.L2(0.5),
                        ),
                    ]
                )

        def step(task: Any, replica: Any, batch: Any) -> None:
            kernel = replica.model.trainable_variables[0]
            with tf.GradientTape() as tape:
                loss = replica.loss(task.losses(batch[1], batch[0] @ kernel))
            replica.apply_gradients(gradients(replica, tape, loss))

        # Bias 1 with the penalty 0.5·b², whose gradient is 1; the loss does not reach it.
        built = Built(Two(step=step))
        result = built()
        assert built.weights == [[[pytest.approx(1.1)]], [pytest.approx(0.9)]]
        assert result.penalty == pytest.approx(0.5)

    def test_what_layers_write_is_stored(self) -> None:
        class Normalized(ToyLine):
            def build_model(self) -> keras.Model:
                layers = [keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(1)]
                return keras.Sequential(layers)

        built = Built(Normalized())
        built((np.array([[1], [3]], np.float32), np.zeros(2, np.float32)))
        mean, variance = (v.numpy().tolist() for v in built.model.non_trainable_variables)
        assert mean == [pytest.approx(1.0)]  # half way from 0 to 2
        assert variance == [pytest.approx(1.0)]  # from 1 to 1
        built((np.zeros((0, 1), np.float32), np.zeros(0, np.float32)))
        assert built.model.non_trainable_variables[0].numpy().tolist() == mean, "an empty batch writes nothing"

    def test_random_layers_draw_anew_at_every_step(self) -> None:
        drawn: list[Any] = []

        class Dropping(Own):
            def build_model(self) -> keras.Model:
                layers = [keras.Input((64,)), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)]
                return keras.Sequential(layers)

        def step(task: Any, replica: Any, batch: Any) -> None:
            with tf.GradientTape() as tape:
                dropped = replica.model.layers[0](batch[0], training=True)
                outputs = replica.model.layers[1](dropped)
                loss = replica.loss(outputs[:, 0])
            tf.py_function(lambda value: drawn.append(value.numpy()), [dropped], [])
            replica.apply_gradients(gradients(replica, tape, loss))

        batch = (np.ones((2, 64), np.float32), np.zeros(2, np.float32))
        built = Built(Dropping(step=step), batch)
        built(batch)
        built(batch)
        assert len(drawn) == 2
        assert (drawn[0] == 0).any()
        assert (drawn[0] != drawn[1]).any()

    def test_sparse_gradients_are_applied(self) -> None:
        class Embedded(ToyLine):
            def build_model(self) -> keras.Model:
                return keras.Sequential(
                    [
                        keras.Input((), dtype="int32"),
                        keras.layers.Embedding(3, 1, embeddings_initializer="ones"),
                    ]
                )

        batch = (np.array([2, 0, 2], np.int32), np.array([1, 0, 0], np.float32))
        built = Built(Embedded(), batch)
        assert built(batch).losses.tolist() == [pytest.approx(2 / 3)]
        # Each row of a loss (w − y)²: 2·(w − y)/3, those of index 2 added.
        assert np.ravel(built.weights[0]) == pytest.approx([1 - 0.1 * 2 / 3, 1, 1 - 0.1 * 2 / 3])

    def test_the_replica_knows_its_place(self) -> None:
        seen: list[Any] = []

        def step(task: Any, replica: Any, batch: Any) -> None:
            tf.py_function(lambda *values: seen.append([int(v) for v in values]), [replica.id, replica.rows], [])
            assert replica.model is built_model[0]
            with_losses(lambda losses: losses)(task, replica, batch)

        built_model: list[Any] = []

        class Keeps(Own):
            def build_model(self) -> keras.Model:
                built_model.append(super().build_model())
                return built_model[0]

        Built(Keeps(step=step))()
        assert seen == [[0, 4]]

    def test_rows_are_counted_in_any_structure(self) -> None:
        assert int(row_count({"a": (tf.zeros([3, 2]),), "b": tf.zeros([3])})) == 3


class TestRefusedSteps:
    def test_a_loss_that_is_called_twice(self) -> None:
        def step(task: Any, replica: Any, batch: Any) -> None:
            replica.loss(batch[1])
            replica.loss(batch[1])

        assert "replica.loss was called twice" in refusal(step)

    def test_no_loss(self) -> None:
        assert "train_step did not call replica.loss" in refusal(lambda task, replica, batch: None)

    def test_no_gradient(self) -> None:
        def detached(task: Any, replica: Any, batch: Any) -> None:
            with tf.GradientTape() as tape:
                loss = replica.loss(tf.stop_gradient(replica.model(batch[0]))[:, 0])
            replica.apply_gradients(gradients(replica, tape, loss))

        assert "train_step gave no gradient" in refusal(lambda task, replica, batch: replica.loss(batch[1]))
        assert "train_step gave no gradient" in refusal(detached)

    @pytest.mark.parametrize(
        ("change", "shape"),
        [(tf.reduce_mean, "()"), (lambda losses: losses[:, None], "(None, 1)"), (lambda _: 0.5, "()")],
        ids=["mean", "one axis too many", "a number"],
    )
    def test_a_loss_that_is_not_per_example(self, change: Any, shape: str) -> None:
        message = refusal(with_losses(change))
        assert f"the loss has shape {shape}, but must have one value per example" in message
        assert "reduction=None" in message

    def test_weights_that_are_not_per_example(self) -> None:
        for weights in (lambda _: 2.0, lambda losses: losses[:, None]):
            assert "the weight has shape" in refusal(with_losses(lambda losses: losses, weights))

    @pytest.mark.parametrize("what", ["the loss", "the weight"])
    def test_another_number_of_rows_is_found_when_the_step_runs(self, what: str) -> None:
        def fewer(losses: tf.Tensor) -> tf.Tensor:
            return losses[:-1]

        def ones(losses: tf.Tensor) -> tf.Tensor:
            return tf.ones_like(losses)

        step = with_losses(fewer, ones) if what == "the loss" else with_losses(tf.identity, fewer)
        built = Built(Own(step=step))
        result = built()
        assert result.halt
        assert result.faults.tolist() == [what == "the loss", what == "the weight", 0]
        assert f"{what} must have one value per example" in str(fault_of(result.faults))
        assert built.weights == [[[1.0]]]
        assert int(built.optimizer.iterations) == 0

    def test_a_rank_that_shows_only_when_the_step_runs(self) -> None:
        def hidden(losses: tf.Tensor) -> tf.Tensor:
            shape = tf.cond(tf.reduce_sum(losses) > -1, lambda: tf.constant([4, 1]), lambda: tf.constant([4]))
            return tf.reshape(losses, shape)

        built = Built(Own(step=with_losses(hidden)))
        with pytest.raises(tf.errors.InvalidArgumentError):
            built()
        assert built.weights == [[[1.0]]]

    @pytest.mark.parametrize("kind", ["keras", "tensorflow"])
    def test_a_gradient_for_a_foreign_variable(self, kind: str) -> None:
        with STRATEGY.scope():
            foreign: Any = keras.Variable(1.0, name="foreign") if kind == "keras" else tf.Variable(1.0, name="foreign")

        def step(task: Any, replica: Any, batch: Any) -> None:
            replica.loss(batch[1])
            replica.apply_gradients([(tf.constant(1.0), foreign)])

        message = refusal(step)
        assert "foreign" in message
        assert "not in model.trainable_variables" in message

    def test_a_gradient_for_a_frozen_variable(self) -> None:
        class Frozen(Own):
            def build_model(self) -> keras.Model:
                model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1), keras.layers.Dense(1)])
                model.layers[0].trainable = False
                return model

        def step(task: Any, replica: Any, batch: Any) -> None:
            replica.loss(batch[1])
            replica.apply_gradients([(tf.constant([[1.0]]), replica.model.layers[0].kernel)])

        with pytest.raises(UsageError, match=r"not in model\.trainable_variables"):
            Built(Frozen(step=step))

    @pytest.mark.parametrize("calls", [1, 2])
    def test_two_gradients_for_one_variable(self, calls: int) -> None:
        def step(task: Any, replica: Any, batch: Any) -> None:
            replica.loss(batch[1])
            (kernel,) = replica.model.trainable_variables
            pair = (tf.constant([[1.0]]), kernel)
            for pairs in [[pair, pair]] if calls == 1 else [[pair], [pair]]:
                replica.apply_gradients(pairs)

        assert "two gradients for 'sequential" in refusal(step)

    def test_a_metric_that_is_written(self) -> None:
        with STRATEGY.scope():
            metric = keras.metrics.Mean()

        def step(task: Any, replica: Any, batch: Any) -> None:
            metric.update_state(batch[1])
            with_losses(lambda losses: losses)(task, replica, batch)

        message = refusal(step)
        assert "wrote to a Keras variable that is not in model.variables" in message
        assert "Task.metrics" in message
        assert float(metric.total) == 0

    def test_a_random_number_from_the_global_seed(self) -> None:
        message = refusal(with_losses(lambda losses: losses + keras.random.uniform(losses.shape[1:])))
        assert "keras.random.SeedGenerator" in message
