"""The private names of Keras that tfdist uses, among them the method that it replaces while it traces.

That gradients are not reduced twice shows in the contract suite, where several replicas agree with one.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.jobs import ROOT
from tests.unit.one_device import STRATEGY
from tfdist.training.private_keras import (
    count_atomically,
    count_rows,
    has_synchronized_layer,
    mask_of,
    normalizations,
    own_schedule,
    rows_count,
    without_second_reduction,
)

NAME = "_all_reduce_sum_gradients"


@pytest.fixture
def optimizer() -> keras.optimizers.Optimizer:
    with STRATEGY.scope():
        return keras.optimizers.SGD(1.0)


@pytest.fixture
def home() -> type:
    """The class that has the method."""
    homes = [cls for cls in keras.optimizers.SGD.__mro__ if NAME in vars(cls)]
    assert homes, f"Keras {keras.__version__} has renamed Optimizer.{NAME}. Adapt tfdist/training/private_keras.py."
    return homes[0]


@pytest.fixture
def calls(home: type, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Notes what Keras gives to its own method."""
    noted: list[Any] = []
    original = getattr(home, NAME)

    def note(self: Any, gradients_and_variables: Any) -> Any:
        noted.append(gradients_and_variables)
        return original(self, gradients_and_variables)

    monkeypatch.setattr(home, NAME, note)
    yield noted


def step(optimizer: keras.optimizers.Optimizer) -> float:
    """Apply a gradient of 0.25 to a weight of 1, inside a replica."""
    with STRATEGY.scope():
        weight = keras.Variable(1.0)
        optimizer.build([weight])
    tf.function(lambda: STRATEGY.run(lambda: optimizer.apply([tf.constant(0.25)], [weight])))()
    return float(weight)


def test_keras_reduces_in_this_method_and_nowhere_else(optimizer: Any, calls: list[Any]) -> None:
    """Fails where Keras has moved its reduction, so that replacing the method would not help any more."""
    assert step(optimizer) == 0.75
    assert len(calls) == 1
    ((gradient, _),) = calls[0]
    assert gradient.shape == ()


def test_the_method_is_left_out_inside_and_comes_back(optimizer: Any, calls: list[Any]) -> None:
    with without_second_reduction(optimizer):
        assert step(optimizer) == 0.75
    assert calls == []
    assert NAME not in vars(optimizer)
    optimizer.built = False
    step(optimizer)
    assert len(calls) == 1


def test_it_comes_back_after_an_error(optimizer: Any) -> None:
    with pytest.raises(ValueError, match="falling"), without_second_reduction(optimizer):
        assert NAME in vars(optimizer)
        raise ValueError("the sky is falling")
    assert NAME not in vars(optimizer)


def test_other_optimizers_are_left_alone(optimizer: Any, calls: list[Any]) -> None:
    with without_second_reduction(keras.optimizers.SGD(1.0)):
        step(optimizer)
    assert len(calls) == 1


def test_a_keras_that_has_renamed_it_is_told(optimizer: Any, home: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(home, NAME)
    with pytest.raises(AttributeError, match=f"SGD.*{NAME}"), without_second_reduction(optimizer):
        pytest.fail("it would have reduced twice")
    assert NAME not in vars(optimizer)


def operations(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """What a traced step does to the optimizer's counter."""
    with STRATEGY.scope():
        weight = keras.Variable(1.0)
        optimizer.build([weight])
    run = tf.function(lambda: STRATEGY.run(lambda: optimizer.apply([tf.constant(0.25)], [weight])))
    traced = run.get_concrete_function()
    counter = next(inside for outside, inside in traced.graph.captures if outside is optimizer.iterations.value.handle)
    return sorted(op.type for op in counter.consumers() if op.type != "ReadVariableOp")


def test_updates_are_counted_in_one_operation(optimizer: Any) -> None:
    """Keras itself reads, adds and writes: where it counts in one operation, too, `count_atomically` can go."""
    with STRATEGY.scope():
        assert operations(keras.optimizers.SGD(1.0)) == ["AssignVariableOp"]
    count_atomically(optimizer)
    assert operations(optimizer) == ["AssignAddVariableOp"]
    assert int(optimizer.iterations) == 0
    optimizer.built = False
    assert step(optimizer) == 0.75
    assert int(optimizer.iterations) == 1


class Inner(keras.layers.Layer):
    """A layer of one's own, with another inside, which `model.layers` does not show."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.inner = keras.layers.BatchNormalization(**arguments)

    def build(self, input_shape: Any) -> None:
        self.inner.build(input_shape)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.inner(inputs, training=training)


def test_layers_are_found_at_any_depth() -> None:
    def model(**arguments: Any) -> keras.Model:
        nested = keras.Sequential([keras.Input((2,)), Inner(**arguments)])
        return keras.Sequential([keras.Input((2,)), nested, keras.layers.Dense(1)])

    assert not has_synchronized_layer(model())
    assert has_synchronized_layer(model(synchronized=True))
    (found,) = normalizations(model())
    assert isinstance(found, keras.layers.BatchNormalization)
    assert normalizations(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])) == []


def written(present: bool | None, inputs: Any, *before: keras.layers.Layer) -> tuple[list[float], list[float]]:
    """Moving mean and variance of a synchronized layer with momentum 0, after one batch inside a replica."""
    layer = keras.layers.BatchNormalization(synchronized=True, momentum=0.0)
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input(inputs.shape[1:]), *before, layer])
    count_rows(model)

    def step() -> None:
        counts = contextlib.nullcontext() if present is None else rows_count(tf.constant(present))
        with counts:
            model(tf.constant(inputs), training=True)

    tf.function(lambda: STRATEGY.run(step))()
    return layer.moving_mean.numpy().tolist(), layer.moving_variance.numpy().tolist()


class TestRowsThatCount:
    ROWS = np.array([[1.0, 10.0], [3.0, 30.0]], np.float32)

    @pytest.mark.parametrize("present", [True, None])
    def test_the_statistics_are_those_of_the_rows(self, present: bool | None) -> None:
        assert written(present, self.ROWS) == ([2, 20], [pytest.approx(1), pytest.approx(100)])

    def test_rows_that_do_not_count_are_left_out(self) -> None:
        assert written(False, self.ROWS) == ([0, 0], [0, 0])

    def test_steps_that_are_masked_are_left_out(self) -> None:
        # The mask of Masking leaves the steps of zeros: 2 and 4 stay in the first row, 9 in the second.
        steps = np.array([[[2.0], [4.0], [0.0]], [[9.0], [0.0], [0.0]]], np.float32)
        mean, variance = written(True, steps, keras.layers.Masking())
        assert mean == [pytest.approx(5)]
        assert variance == [pytest.approx((9 + 1 + 16) / 3)]
        plain_mean, plain_variance = written(None, steps, keras.layers.Masking())
        assert (mean, variance) == (pytest.approx(plain_mean), pytest.approx(plain_variance)), "as Keras has it"
        assert written(False, steps, keras.layers.Masking()) == ([0], [0])

    def test_it_ends_with_the_rows(self) -> None:
        with pytest.raises(ValueError, match="falling"), rows_count(tf.constant(False)):
            raise ValueError("the sky is falling")
        assert written(None, self.ROWS)[0] == [2, 20]


def test_an_optimizers_own_schedule() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    assert own_schedule(keras.optimizers.SGD(schedule)) is schedule
    function = own_schedule(keras.optimizers.SGD(lambda: 0.25))
    assert function is not None
    assert function(tf.constant(7)) == 0.25
    assert own_schedule(keras.optimizers.SGD(0.5)) is None


def test_masks_of_keras_layers() -> None:
    assert mask_of(keras.layers.Embedding(3, 1, mask_zero=True)(np.array([[1, 0]]))).numpy().tolist() == [[True, False]]
    assert mask_of(keras.layers.Embedding(3, 1)(np.array([[1, 0]]))) is None
    assert mask_of({"a": tf.zeros([1])}) is None


def test_private_names_of_keras_are_nowhere_else() -> None:
    """Attributes with an underscore of what comes from Keras: `keras.…._name` and `optimizer._name`."""
    found = []
    files = [path for package in ("tfdist", "hvd_backend") for path in (ROOT / package).rglob("*.py")]
    files = [path for path in files if path.name != "private_keras.py"]
    assert files
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
            if private and ast.unparse(node.value).split(".")[0] in ("keras", "optimizer", "model", "metric"):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    assert not found
    assert NAME in (Path(ROOT) / "tfdist/training/private_keras.py").read_text()


@pytest.mark.parametrize(
    ("home", "names"),
    [
        (keras.Model, ["_maybe_symbolic_build", "save", "save_weights"]),
        (keras.optimizers.LossScaleOptimizer, ["check_finite"]),
        (keras.callbacks.CallbackList, ["set_model", "on_train_begin", "on_train_end"]),
    ],
)
def test_what_several_processes_change_is_where_it_was(home: type, names: list[str]) -> None:
    missing = [name for name in names if not hasattr(home, name)]
    assert not missing, f"Keras {keras.__version__} has no {home.__name__}.{missing[0]}. Adapt tfdist/as_one."
