"""What is made of a task's recipes, and what is refused before anything is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.toy import BatchNormNet, ToyLine
from tests.unit.one_device import STRATEGY, trainer
from tfdist import Settings, Task, UsageError
from tfdist.training.building import build_model, build_optimizers, check_task, digest, structure

SGD = keras.optimizers.SGD


@dataclasses.dataclass(kw_only=True)
class Made(ToyLine):
    """`ToyLine` with recipes of a test."""

    model: Callable[[], Any] | None = None
    optimizer: Callable[[], Any] = SGD

    def build_model(self) -> Any:
        return super().build_model() if self.model is None else self.model()

    def build_optimizer(self, learning_rate: float) -> Any:
        return self.optimizer()


def model_of(task: Task, **settings: Any) -> keras.Model:
    with STRATEGY.scope():
        return build_model(task, Settings.of(**settings))


def optimizers_of(optimizer: Callable[[], Any], model: keras.Model | None = None, **settings: Any) -> dict[str, Any]:
    task = Made(optimizer=optimizer)
    with STRATEGY.scope():
        return build_optimizers(task, model or task.build_model(), 0.1, Settings.of(**settings))


def refusal(build: Callable[..., Any], *arguments: Any, **settings: Any) -> str:
    with pytest.raises(UsageError) as caught:
        build(*arguments, **settings)
    return str(caught.value)


class TestModels:
    def test_what_is_no_model(self) -> None:
        message = refusal(model_of, Made(model=lambda: keras.layers.Dense(1)))
        assert message == "Made.build_model returned a Dense. Return a keras.Model."

    def test_a_model_that_is_not_built_or_has_nothing_to_train(self) -> None:
        frozen = [keras.Input((1,)), keras.layers.Dense(1, trainable=False)]
        for layers in ([keras.layers.Dense(1)], [keras.Input((1,)), keras.layers.ReLU()], frozen):
            message = refusal(model_of, Made(model=lambda layers=layers: keras.Sequential(layers, name="mine")))
            assert message.startswith("the model 'mine' has no trainable variables yet.")
            assert "keras.Input" in message

    @pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
    def test_layers_compute_in_the_precision_and_variables_stay_float32(self, precision: str) -> None:
        before = keras.mixed_precision.dtype_policy().name
        model = model_of(ToyLine(), precision=precision)
        assert {layer.compute_dtype for layer in model.layers} == {precision}
        assert {v.dtype for v in model.variables} == {"float32"}
        assert model(tf.ones([1, 1])).dtype == precision
        assert keras.mixed_precision.dtype_policy().name == before == "float32"

    def test_the_policy_comes_back_after_an_error(self) -> None:
        def fall() -> None:
            assert keras.mixed_precision.dtype_policy().name == "mixed_float16"
            raise ValueError("the sky is falling")

        with pytest.raises(ValueError, match="falling"):
            model_of(Made(model=fall), precision="float16")
        assert keras.mixed_precision.dtype_policy().name == "float32"

    def test_a_policy_of_the_program_stays(self) -> None:
        keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
        try:
            assert model_of(ToyLine()).layers[0].compute_dtype == "bfloat16"
            assert model_of(ToyLine(), precision="float16").layers[0].compute_dtype == "float16"
            assert keras.mixed_precision.dtype_policy().name == "mixed_bfloat16"
        finally:
            keras.mixed_precision.set_dtype_policy("float32")

    @pytest.mark.parametrize("own", [False, True])
    @pytest.mark.parametrize(("setting", "right"), [("model", None), ("local", False), ("sync", True)])
    def test_batch_norm_is_synchronized_as_set(self, own: bool, setting: Any, right: bool | None) -> None:
        def nested() -> keras.Model:
            inner = BatchNormNet(synchronized=own).build_model()
            return keras.Sequential([keras.Input((8,)), inner, keras.layers.BatchNormalization(synchronized=own)])

        model = model_of(Made(model=nested), batch_norm=setting)
        layers = [model.layers[0].layers[1], model.layers[1]]
        assert [layer.synchronized for layer in layers] == [own if right is None else right] * 2


class TestOptimizers:
    def test_one_has_a_name_and_all_its_slots(self) -> None:
        made = optimizers_of(lambda: keras.optimizers.Adam(0.1))
        assert list(made) == ["optimizer"]
        assert len(made["optimizer"].variables) == 4  # iterations, learning rate, and two moments of one weight

    def test_several_keep_their_names_and_order(self) -> None:
        made = optimizers_of(lambda: {"up": SGD(0.1), "down": SGD(0.2)})
        assert {name: float(optimizer.learning_rate) for name, optimizer in made.items()} == {
            "up": pytest.approx(0.1),
            "down": pytest.approx(0.2),
        }
        assert list(made) == ["up", "down"]
        assert all(optimizer.built for optimizer in made.values())

    @pytest.mark.parametrize("made", [{}, {1: SGD()}, {"": SGD()}], ids=["empty", "number", "no name"])
    def test_a_dict_without_names(self, made: Any) -> None:
        message = refusal(optimizers_of, lambda: made)
        assert message.startswith("build_optimizer returned the dict {")
        assert message.endswith("Return optimizers by name.")

    @pytest.mark.parametrize("wrong", ["sgd", None, 0.1, [SGD]], ids=str)
    def test_what_is_no_optimizer(self, wrong: Any) -> None:
        for made in (wrong, {"up": SGD(), "down": wrong}):
            message = refusal(optimizers_of, lambda made=made: made)
            assert message == (
                f"Made.build_optimizer returned a {type(wrong).__name__} from builtins. Return a "
                "keras.optimizers.Optimizer."
            )

    @pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1, "weight_decay_exclude": ("kernel",)}], ids=str)
    def test_one_optimizer_under_two_names(self, settings: dict[str, Any]) -> None:
        one = SGD()
        message = refusal(optimizers_of, lambda: {"up": one, "down": one}, **settings)
        assert message == "build_optimizer gave one optimizer two names. Make one for each."

    @pytest.mark.parametrize("own", ["clipvalue", "clipnorm", "global_clipnorm"])
    @pytest.mark.parametrize("setting", ["clip_value", "clip_norm", "clip_global_norm"])
    def test_clipping_twice(self, own: str, setting: str) -> None:
        message = refusal(optimizers_of, lambda: SGD(**{own: 2.0}), **{setting: 1.0})
        assert message == (
            f"{setting}=1.0 is set, and the optimizer SGD clips by itself ({own}=2.0). Leave one of them out."
        )
        optimizers_of(lambda: SGD(**{own: 2.0}))
        optimizers_of(SGD, **{setting: 1.0})

    @pytest.mark.parametrize(
        ("arguments", "instead"),
        [
            ({"gradient_accumulation_steps": 3}, "Leave it out, and set accumulate=3."),
            ({"loss_scale_factor": 8.0}, "Leave it out, and set precision='float16'."),
            ({"use_ema": True, "ema_momentum": 0.9}, "Leave it out, and set ema=0.9."),
        ],
        ids=str,
    )
    def test_what_an_optimizer_must_not_do_by_itself(self, arguments: dict[str, Any], instead: str) -> None:
        message = refusal(optimizers_of, lambda: {"up": SGD(), "down": SGD(**arguments)})
        (name, value), *_ = arguments.items()
        assert f"the optimizer SGD has {name}={value}" in message
        assert message.endswith(instead)

    def test_a_loss_scale_optimizer(self) -> None:
        message = refusal(optimizers_of, lambda: keras.optimizers.LossScaleOptimizer(SGD()))
        assert message.startswith("the optimizer is a LossScaleOptimizer")
        assert message.endswith("Return the inner optimizer, and set precision='float16'.")


def decayed(optimizer: Callable[[], Any], **settings: Any) -> list[float]:
    """Kernel and bias, from 1, after an update without gradient at learning rate 0.1."""
    with STRATEGY.scope():
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones", bias_initializer="ones")]
        )
    (made,) = optimizers_of(optimizer, model, **settings).values()
    variables = model.trainable_variables
    STRATEGY.run(lambda: made.apply([tf.zeros_like(v) for v in variables], variables))
    return [float(np.ravel(v.numpy())[0]) for v in variables]


class TestWeightDecay:
    def own(self) -> Any:
        """An optimizer with a decay of its own, which leaves biases out."""
        made = keras.optimizers.AdamW(0.1, weight_decay=0.5)
        made.exclude_from_weight_decay(var_names=["bias"])
        return made

    # 1 − 0.1·decay.
    @pytest.mark.parametrize(
        ("settings", "right"),
        [
            ({}, [1, 1]),
            ({"weight_decay": 0.5}, [0.95, 0.95]),
            ({"weight_decay": 0.5, "weight_decay_exclude": ("bias",)}, [0.95, 1]),
            ({"weight_decay": 0.5, "weight_decay_exclude": ("gamma", "kernel")}, [1, 0.95]),
            ({"weight_decay": 0.5, "weight_decay_exclude": ("dense",)}, [1, 1]),
        ],
        ids=str,
    )
    def test_the_settings_decay(self, settings: dict[str, Any], right: list[float]) -> None:
        assert decayed(lambda: SGD(0.1), **settings) == pytest.approx(right)

    @pytest.mark.parametrize("words", [("b.as",), ("gamma", "beta")], ids=str)
    def test_words_that_match_no_weight_are_refused_with_some_that_there_are(self, words: tuple[str, ...]) -> None:
        message = refusal(decayed, lambda: SGD(0.1), weight_decay=0.5, weight_decay_exclude=words)
        assert message.startswith(f"weight_decay_exclude={words!r} matches no weight, such as ")
        assert "/kernel, " in message
        assert "/bias" in message

    def test_the_optimizers_own_decay_stays_or_is_replaced(self) -> None:
        assert decayed(self.own) == pytest.approx([0.95, 1])
        assert decayed(self.own, weight_decay=0.25) == pytest.approx([0.975, 1]), "what it leaves out stays out"
        assert decayed(self.own, weight_decay=0.25, weight_decay_exclude=("kernel",)) == pytest.approx([1, 0.975])
        assert decayed(self.own, weight_decay=0.0) == [1, 1]


class TestTasks:
    def test_a_field_that_has_no_effect(self) -> None:
        class Forgotten(ToyLine):
            learning_rate = 0.5

        message = refusal(check_task, Forgotten())
        assert message.startswith("the task Forgotten sets learning_rate without being a dataclass")
        check_task(dataclasses.dataclass(kw_only=True)(type("Right", (ToyLine,), {}))())

    @pytest.mark.parametrize("splits", ["test", None, ("test", 1)])
    def test_splits_that_are_no_names(self, splits: Any) -> None:
        class Splits(ToyLine):
            def evaluation_splits(self) -> Any:
                return splits

        message = refusal(check_task, Splits())
        assert message == f"Splits.evaluation_splits returned {splits!r}. Return a tuple of names."

    def test_what_ranks_compare(self) -> None:
        model = model_of(BatchNormNet())
        found = structure(model.variables)
        assert [entry[1:] for entry in found[:3]] == [
            [[8, 16], "float32", True],
            [[16], "float32", True],
            [[16], "float32", True],
        ]
        assert [entry[3] for entry in found].count(False) == 2  # the moving statistics
        before = digest(model.variables)
        assert digest(model.variables) == before
        model.variables[1].assign(np.full(16, 1e-30, np.float32))
        assert digest(model.variables) != before
        assert digest(reversed(model.variables)) != digest(model.variables)


def test_the_trainer_has_these_checks() -> None:
    message = refusal(trainer, Made(optimizer=lambda: SGD(clipnorm=1.0)), clip_norm=1.0)
    assert "Leave one of them out." in message
