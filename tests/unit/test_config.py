"""The settings: each is checked when they are made, and the message gives the value and the way out."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, Literal

import pytest

from tfdist.commands import CheckCommand, TrainCommand
from tfdist.config import Settings, save_interval
from tfdist.errors import UsageError, closest
from tfdist.strategies.table import BACKENDS, Options


def refusal(**settings: Any) -> str:
    with pytest.raises(UsageError) as caught:
        Settings.of(**settings)
    return str(caught.value)


PARTNERS: dict[str, dict[str, Any]] = {
    "loss_scale": {"precision": "float16"},
    "loss_scale_growth": {"precision": "float16"},
    "plateau_factor": {"plateau_patience": 1},
    "min_delta": {"patience": 1},
    "monitor_mode": {"patience": 1},
}
"""What makes a setting have an effect."""


def made(name: str, value: Any) -> Any:
    """The setting of this name, where nothing else is set but its partner."""
    return getattr(Settings.of(**{name: value}, **PARTNERS.get(name, {})), name)


def test_nothing_has_to_be_set() -> None:
    assert Settings.of() == Settings()
    assert Settings().steps_per_chunk == 10


def test_settings_cannot_be_changed_later() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "name",
    [
        "replicas",
        "epochs",
        "steps",
        "global_batch_size",
        "accumulate",
        "parameter_servers",
        "max_in_flight",
        "sync_every",
        "loss_scale_growth",
        "patience",
        "plateau_patience",
        "steps_per_chunk",
        "intra_op_threads",
    ],
)
def test_counts_start_at_1(name: str) -> None:
    assert refusal(**{name: 0}) == f"{name}=0 must be 1 or more."
    assert refusal(**{name: -3}) == f"{name}=-3 must be 1 or more."
    assert made(name, 1) == 1


@pytest.mark.parametrize("name", ["seed", "shuffle_buffer", "warmup_steps", "warmup_epochs", "validate_every"])
def test_these_may_be_0(name: str) -> None:
    assert refusal(**{name: -1}) == f"{name}=-1 must be 0 or more."
    assert getattr(Settings.of(**{name: 0}), name) == 0


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf"), float("-inf")])
def test_a_learning_rate_is_finite_and_not_negative(rate: float) -> None:
    assert refusal(learning_rate=rate).startswith(f"learning_rate={rate} must be a finite number")
    assert Settings.of(learning_rate=0.0).learning_rate == 0


@pytest.mark.parametrize("name", ["clip_value", "clip_norm", "clip_global_norm", "loss_scale", "plateau_factor"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_these_are_above_0(name: str, value: float) -> None:
    assert refusal(**{name: value}) == f"{name}={value!r} must be a finite number above 0."
    assert made(name, 0.5) == 0.5


@pytest.mark.parametrize(
    ("name", "high"), [("weight_decay", "inf"), ("min_delta", "inf"), ("ema", "1.0"), ("plateau_factor", "1.0")]
)
def test_these_have_a_range(name: str, high: str) -> None:
    for value in (-1, float("nan"), float(high), float("inf")):
        message = refusal(**{name: value})
        assert message.startswith(f"{name}={value!r} must be ")
        if name != "plateau_factor" or value == 1:
            assert message.endswith(f"must be at least 0.0 and below {high}.")
    assert made(name, 0.9) == 0.9
    if name != "plateau_factor":
        assert made(name, 0.0) == 0


@pytest.mark.parametrize(
    "setting",
    [
        {"steps": "3"},
        {"steps": 2.5},
        {"steps": True},
        {"backend": 3},
        {"learning_rate": "x"},
        {"clip_norm": True},
        {"seed": None},
        {"jit": 1},
        {"monitor": 1},
        {"lr_scaling": None},
        {"weight_decay_exclude": "bias"},
        {"weight_decay_exclude": (1,)},
    ],
    ids=str,
)
def test_a_value_of_another_type_is_refused(setting: dict[str, Any]) -> None:
    ((name, value),) = setting.items()
    assert refusal(**setting).startswith(f"{name}={value!r}")


CHOICES = {name: typing.get_args(kind) for name, kind in typing.get_type_hints(Settings).items()
           if typing.get_origin(kind) is Literal}  # fmt: skip


@pytest.mark.parametrize(("name", "choice"), [(name, choice) for name in CHOICES for choice in CHOICES[name]])
def test_a_typo_in_a_choice_gets_all_and_the_nearest(name: str, choice: str) -> None:
    message = refusal(**{name: choice[:-1]})
    assert message == (f"{name}={choice[:-1]!r} must be one of {', '.join(CHOICES[name])}. Did you mean {choice!r}?")
    assert made(name, choice) == choice


def test_what_is_near_no_choice_gets_all() -> None:
    assert refusal(precision="quad") == "precision='quad' must be one of float32, float16, bfloat16."
    assert "precision" in CHOICES


CONTRADICTIONS = [
    ({"epochs": 2, "steps": 3}, "each says when to end"),
    ({"clip_value": 1.0, "clip_norm": 2.0}, "clipped in one way"),
    ({"clip_value": 1.0, "clip_global_norm": 2.0}, "clipped in one way"),
    ({"clip_norm": 1.0, "clip_global_norm": 2.0}, "clipped in one way"),
    ({"warmup_steps": 1, "warmup_epochs": 1}, "each says how long to warm up"),
    ({"reduction": "adasum", "backend": "mirrored"}, "Use backend='horovod' under mpirun"),
    ({"reduction": "adasum", "compression": "float16"}, "whole gradients in full precision"),
    ({"reduction": "adasum", "sparse": "gather"}, "whole gradients in full precision"),
    ({"sparse": "gather", "accumulate": 2}, "gradients add up in dense form"),
    ({"jit": True, "backend": "central_storage"}, "where compiled code does not reach them"),
    ({"jit": True, "backend": "parameter_server"}, "where compiled code does not reach them"),
    ({"reduction": "adasum", "backend": "central_storage"}, "Use backend='horovod' under mpirun"),
    ({"reduction": "adasum", "sync_every": 3}, "no gradients go between the replicas"),
    ({"accumulate": 2, "sync_every": 3}, "no gradients go between the replicas"),
    ({"compression": "bfloat16", "sync_every": 3}, "no gradients go between the replicas"),
    ({"sparse": "gather", "sync_every": 3}, "no gradients go between the replicas"),
    ({"precision": "float16", "sync_every": 3}, "an overflow must skip the step on all replicas"),
    ({"batch_norm": "sync", "sync_every": 3}, "replicas train each by itself"),
    *(
        ({"sync_every": 3, "backend": backend}, "needs a copy of the weights on every replica that may differ")
        for backend in BACKENDS
        if backend != "horovod"
    ),
    *(
        ({name: 3, "backend": backend}, "has no effect with")
        for backend in BACKENDS
        if backend != "parameter_server"
        for name in ("max_in_flight", "parameter_servers")
    ),
    *(
        ({"collectives": "ring", "backend": backend}, "has no effect with")
        for backend in BACKENDS
        if backend != "multi_worker_mirrored"
    ),
    *(
        ({**setting, "backend": "parameter_server"}, "its gradients go straight to the parameter servers")
        for setting in ({"accumulate": 2}, {"compression": "float16"})
    ),
    ({"reduction": "adasum", "backend": "parameter_server"}, "is Horovod's"),
    ({"precision": "float16", "backend": "parameter_server"}, "steps run side by side"),
]


@pytest.mark.parametrize(("settings", "reason"), CONTRADICTIONS, ids=lambda value: str(value)[:60])
def test_settings_that_exclude_each_other(settings: dict[str, Any], reason: str) -> None:
    message = refusal(**settings)
    for name, value in settings.items():
        assert f"{name}={value!r}" in message
        Settings.of(**{name: value})
    assert reason in message
    ways_out = (
        "eave it out.",
        "Leave one of them out.",
        "leave sync_every out.",
        "Leave jit out.",
        "Use precision='bfloat16'.",
        "or use backend='parameter_server'.",
        "or use backend='multi_worker_mirrored'.",
    )
    assert message.endswith(ways_out)


@pytest.mark.parametrize(
    ("setting", "partners"),
    [
        ({"weight_decay_exclude": ("bias",)}, {"weight_decay": 0.1}),
        ({"warmup_from_zero": True}, {"warmup_steps": 1}),
        ({"warmup_from_zero": True}, {"warmup_epochs": 1}),
        ({"loss_scale": 8.0}, {"precision": "float16"}),
        ({"loss_scale_growth": 3}, {"precision": "float16"}),
        ({"plateau_factor": 0.5}, {"plateau_patience": 1}),
        *(
            (setting, partners)
            for setting in ({"min_delta": 0.1}, {"monitor_mode": "min"})
            for partners in ({"patience": 1}, {"plateau_patience": 1}, {"restore_best": True})
        ),
    ],
    ids=str,
)
def test_a_setting_that_has_no_effect_alone(setting: dict[str, Any], partners: dict[str, Any]) -> None:
    message = refusal(**setting)
    (name,), (partner,) = setting, partners
    assert message.startswith(f"{name}={setting[name]!r} has no effect without ")
    assert partner in message
    assert message.endswith("Set that, too.")
    Settings.of(**setting, **partners)


@pytest.mark.parametrize("setting", [{"min_delta": 0.1}, {"monitor_mode": "max"}], ids=str)
def test_a_monitor_alone_is_something_to_compare(setting: dict[str, Any]) -> None:
    Settings.of(monitor="test/accuracy", **setting)


def test_a_loss_scale_for_another_precision_has_no_effect() -> None:
    assert "without precision='float16'" in refusal(loss_scale=8.0, precision="bfloat16")


@pytest.mark.parametrize("name", ["patience", "plateau_patience"])
def test_patience_needs_evaluations_to_count(name: str) -> None:
    message = refusal(**{name: 2}, validate_every=0)
    assert message.startswith(f"{name}=2 compares evaluations, and validate_every=0 leaves one")
    assert message.endswith("Set validate_every to 1 or more.")
    Settings.of(**{name: 2}, validate_every=1)
    assert refusal(restore_best=True, validate_every=0).startswith("restore_best=True compares evaluations")


def test_adasum_needs_horovod_only_where_a_backend_is_set() -> None:
    assert Settings.of(reduction="adasum").reduction == "adasum"
    assert Settings.of(reduction="adasum", backend="horovod", accumulate=2, clip_norm=1.0).reduction == "adasum"


def test_what_goes_together_on_some_backend() -> None:
    Settings.of(backend="horovod", sync_every=3, precision="bfloat16", batch_norm="local", clip_norm=1.0)
    Settings.of(backend="parameter_server", parameter_servers=2, max_in_flight=8, precision="bfloat16", sparse="gather")
    Settings.of(backend="multi_worker_mirrored", collectives="nccl", replicas=2, gpu_memory="all")
    Settings.of(backend="central_storage", replicas=2, accumulate=2, precision="float16")


@pytest.mark.parametrize(
    "settings", [{"max_in_flight": 2}, {"sync_every": 2}, {"accumulate": 2}, {"precision": "float16"}], ids=str
)
def test_settings_are_checked_again_for_the_backend_that_was_chosen(settings: dict[str, Any]) -> None:
    """Without a backend in the settings it is known only once the launcher has been looked at."""
    (name,) = settings
    given = Settings.of(**settings)
    refused = set()
    for backend in BACKENDS:
        try:
            given.check_for(backend)
        except UsageError as error:
            assert f"{name}={settings[name]!r}" in str(error)
            refused.add(backend)
    right = {"max_in_flight": {"parameter_server"}, "sync_every": {"horovod"}}
    assert refused == set(BACKENDS) - right.get(name, set(BACKENDS) - {"parameter_server"})


def test_what_a_backend_is_opened_with_comes_from_settings_of_the_same_names() -> None:
    assert Settings().options == Options()
    given: dict[str, Any] = {"replicas": 2, "intra_op_threads": 3, "gpu_memory": "all"}
    assert Settings.of(**given, collectives="ring").options == Options(**given, collectives="ring")
    assert Settings.of(**given, parameter_servers=4).options == Options(**given, parameter_servers=4)


def test_a_seed_that_no_generator_takes_is_refused() -> None:
    assert refusal(seed=2**32).startswith(f"seed={2**32}")


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
    with pytest.raises(UsageError, match="clip_norm=2 are both set"):
        TrainCommand(task="digits", clip_value=1, clip_norm=2)


def test_what_a_check_runs_is_checked() -> None:
    assert CheckCommand().replicas == (2,)
    with pytest.raises(UsageError, match=r"backend='mirored' is unknown.*Did you mean 'mirrored'"):
        CheckCommand(backends=("one_device", "mirored"))
    for count, limit in ((0, "1 or more"), (65, "64 or less")):
        with pytest.raises(UsageError, match=f"replicas={count} must be {limit}"):
            CheckCommand(replicas=(2, count))


def test_the_documentation_of_backend_names_every_backend() -> None:
    import docstring_parser

    documented = {p.arg_name: p.description for p in docstring_parser.parse_from_object(Settings).params}
    assert all(name in documented["backend"] for name in BACKENDS)
    assert set(documented) == {field.name for field in dataclasses.fields(Settings)}


def test_closest() -> None:
    assert closest("filtres", ["epochs", "filters"]) == " Did you mean 'filters'?"
    assert closest("q", ["epochs", "filters"]) == ""


@pytest.mark.parametrize("name", ["checkpoint_dir", "resume", "init_from"])
def test_an_empty_path_is_refused(name: str) -> None:
    """As a variable of a job script gives it that nobody has set."""
    with pytest.raises(UsageError, match=f"{name}='' is no path"):
        Settings(**{name: ""})


@pytest.mark.parametrize("value", ["0", "0s", "x", "-1", "1.5", "10 s", "", "5d"])
def test_save_every_is_steps_or_a_time(value: str) -> None:
    with pytest.raises(UsageError, match="must be a number of steps, as 100, or a time"):
        Settings(checkpoint_dir="c", save_every=value)
    assert save_interval("100") == (100, None)
    assert [save_interval(text) for text in ("30s", "10m", "1h")] == [(None, 30.0), (None, 600.0), (None, 3600.0)]
    assert save_interval(None) == (None, None)
