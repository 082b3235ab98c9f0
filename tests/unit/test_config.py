"""The settings: each is checked when they are made, and the message gives the value and the way out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tfdist.config import Settings, TrainCommand
from tfdist.errors import UsageError, closest
from tfdist.strategies.table import BACKENDS


def refusal(**settings: Any) -> str:
    with pytest.raises(UsageError) as caught:
        Settings.of(**settings)
    return str(caught.value)


def test_nothing_has_to_be_set() -> None:
    assert Settings.of() == Settings()
    assert Settings().steps_per_chunk == 10


def test_settings_cannot_be_changed_later() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "name", ["replicas", "epochs", "steps", "global_batch_size", "steps_per_chunk", "intra_op_threads"]
)
def test_counts_start_at_1(name: str) -> None:
    assert refusal(**{name: 0}) == f"{name}=0 must be 1 or more."
    assert refusal(**{name: -3}) == f"{name}=-3 must be 1 or more."
    assert getattr(Settings.of(**{name: 1}), name) == 1


@pytest.mark.parametrize("name", ["seed", "shuffle_buffer", "validate_every"])
def test_these_may_be_0(name: str) -> None:
    assert refusal(**{name: -1}) == f"{name}=-1 must be 0 or more."
    assert getattr(Settings.of(**{name: 0}), name) == 0


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf"), float("-inf")])
def test_a_learning_rate_is_finite_and_not_negative(rate: float) -> None:
    assert refusal(learning_rate=rate).startswith(f"learning_rate={rate} must be a finite number")
    assert Settings.of(learning_rate=0.0).learning_rate == 0


@pytest.mark.parametrize(
    "setting", [{"steps": "3"}, {"steps": 2.5}, {"backend": 3}, {"learning_rate": "x"}, {"seed": None}], ids=str
)
def test_a_value_of_another_type_is_refused(setting: dict[str, Any]) -> None:
    ((name, value),) = setting.items()
    assert refusal(**setting).startswith(f"{name}={value!r}")


def test_a_seed_that_no_generator_takes_is_refused() -> None:
    assert refusal(seed=2**32).startswith(f"seed={2**32}")


def test_epochs_and_steps_exclude_each_other() -> None:
    message = refusal(epochs=2, steps=3)
    assert "epochs=2" in message
    assert "steps=3" in message


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_of_the_table_can_be_set(backend: str) -> None:
    assert Settings.of(backend=backend).backend == backend


def test_an_unknown_backend_is_answered_with_all_and_the_nearest() -> None:
    message = refusal(backend="horovid")
    assert message.startswith("backend='horovid' is unknown.")
    assert all(name in message for name in BACKENDS)
    assert message.endswith("Did you mean 'horovod'?")
    assert "Did you mean" not in refusal(backend="zzz")


def test_an_unknown_setting_is_answered_with_the_nearest() -> None:
    assert refusal(stps=3) == "stps=3 is not a setting. Did you mean 'steps'?"
    assert refusal(zzz=3) == "zzz=3 is not a setting."
    assert "is not a setting" in refusal(report="x.json"), "flags of the command are not settings of the trainer"


def test_the_command_has_the_same_checks() -> None:
    with pytest.raises(UsageError, match="steps=0 must be 1 or more"):
        TrainCommand(task="digits", steps=0)


def test_the_documentation_of_backend_names_every_backend() -> None:
    import docstring_parser

    documented = {p.arg_name: p.description for p in docstring_parser.parse_from_object(Settings).params}
    assert all(name in documented["backend"] for name in BACKENDS)
    assert set(documented) == {field.name for field in dataclasses.fields(Settings)}


def test_closest() -> None:
    assert closest("filtres", ["epochs", "filters"]) == " Did you mean 'filters'?"
    assert closest("q", ["epochs", "filters"]) == ""
