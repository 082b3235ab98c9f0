"""The private method of Keras optimizers that tfdist replaces while it traces.

That gradients are not reduced twice shows in the contract suite, where several replicas agree with one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.jobs import ROOT
from tests.unit.one_device import STRATEGY
from tfdist.training.private_keras import without_second_reduction

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
