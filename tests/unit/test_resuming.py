"""A run that is stopped and goes on ends as one that was never stopped, bit for bit; here on one device.

The other backends are in the contract suite, and what kills a process in tests/faults.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.resumable import Resumable, Twins
from tests.unit.one_device import trainer
from tfdist import TfdistError, UsageError
from tfdist.checkpoints.checkpoint import all_in, find
from tfdist.errors import CheckpointProblem, Interrupted, Preempted

CASES: dict[str, dict[str, Any]] = {
    "accumulate": {"accumulate": 2, "ema": 0.9, "lr_schedule": "cosine", "warmup_steps": 3, "warmup_from_zero": True},
    "float16": {"precision": "float16", "loss_scale": 2.0**17, "loss_scale_growth": 3, "clip_global_norm": 1.0},
    # Only the first evaluation counts as better: the rate falls after epoch 3, and the run ends after epoch 4.
    "decisions": {
        "plateau_patience": 2,
        "plateau_factor": 0.5,
        "patience": 3,
        "min_delta": 10.0,
        "restore_best": True,
        "epochs": 8,
    },
    "several optimizers": {},
}
"""Settings, of which each needs something else to be kept."""


def task(case: str = "plain") -> Resumable:
    return Twins() if case == "several optimizers" else Resumable()


def result(report: Any) -> dict[str, Any]:
    """What must be the same however often a run was stopped."""
    names = ("steps", "examples_seen", "skipped_steps", "metrics", "weights_sha256", "state_sha256", "stopped", "best")
    return {name: getattr(report, name) for name in names}


@pytest.mark.parametrize("case", CASES)
def test_it_ends_as_if_it_had_never_been_stopped(case: str, tmp_path: Path) -> None:
    straight = trainer(task(case), **CASES[case]).fit()
    losses: list[float] = []
    # In the middle of an epoch, and at its end; with decisions, also while they wait.
    for stop in (2, 3, *([5] if case == "decisions" else []), None):
        made = trainer(task(case), checkpoint_dir=tmp_path, stop_after_steps=stop, **CASES[case])
        report = made.fit()
        losses += report.losses
    assert losses == straight.losses
    assert result(report) == result(straight)
    assert report.resumed_from is not None
    if case == "decisions":
        assert straight.stopped is not None
        assert len(set(straight.learning_rates)) == 2


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGUSR1, Preempted), (signal.SIGTERM, Preempted), (signal.SIGINT, Interrupted)]
)
def test_a_signal_saves_after_the_next_step_and_the_run_goes_on(
    number: signal.Signals, error: type[TfdistError], tmp_path: Path
) -> None:
    straight = trainer(task()).fit()

    def send(moment: Any) -> None:
        if moment.kind == "chunk" and moment.step == 5:
            os.kill(os.getpid(), number)
            deadline = time.monotonic() + 30
            while not made._run._leaving.asked and time.monotonic() < deadline:
                time.sleep(0.01)

    made = trainer(task(), checkpoint_dir=tmp_path, steps_per_chunk=5, actions=[send])
    with pytest.raises(error, match="after step 6, which is saved in") as left:
        made.fit()
    assert left.value.shared
    assert find(tmp_path, print).manifest.step == made.step == 6, "the chunk ends with the step that is told"
    assert result(trainer(task(), checkpoint_dir=tmp_path).fit()) == result(straight)


def test_a_run_in_steps_over_a_dataset_of_unknown_size(tmp_path: Path) -> None:
    @dataclasses.dataclass(kw_only=True)
    class Filtered(Resumable):
        def dataset(self, split: str) -> Any:
            return tf.data.Dataset.from_tensor_slices(super().dataset(split)).filter(lambda inputs, label: label < 2)

    straight = trainer(Filtered(), steps=9).fit()
    trainer(Filtered(), steps=9, checkpoint_dir=tmp_path, stop_after_steps=5).fit()
    assert result(trainer(Filtered(), steps=9, checkpoint_dir=tmp_path).fit()) == result(straight)


def test_saves_at_steps_are_at_these_steps_and_the_newest_are_kept(tmp_path: Path) -> None:
    report = trainer(task(), checkpoint_dir=tmp_path, save_every="4", keep=3).fit()
    assert [find(path, print).manifest.step for path in all_in(tmp_path)] == [8, 12, 15]
    assert report.checkpoints is not None
    assert report.checkpoints["saved"] == 4
    assert report.checkpoints["last_step"] == 15


def test_the_best_is_kept(tmp_path: Path) -> None:
    best: list[tuple[float, int]] = []
    watch = [lambda m: best.append((m.metrics["test"]["loss"], m.step)) if m.kind == "evaluation" else None]
    trainer(task(), actions=watch, checkpoint_dir=tmp_path, keep=1, keep_best="test/loss", epochs=6).fit()
    loss, step = min(best)
    kept = {find(path, print).manifest.step: find(path, print).manifest.score for path in all_in(tmp_path)}
    assert kept[step] == loss
    assert set(kept) == {step, 30}


def test_more_epochs_go_on_and_a_finished_run_has_nothing_left(tmp_path: Path) -> None:
    straight = trainer(task(), epochs=3).fit()
    trainer(task(), epochs=2, checkpoint_dir=tmp_path).fit()
    assert result(trainer(task(), epochs=3, checkpoint_dir=tmp_path).fit()) == result(straight)
    again = trainer(task(), epochs=3, checkpoint_dir=tmp_path).fit()
    assert again.losses == []
    assert result(again) == result(straight)


def test_another_seed_or_batch_size_is_refused(tmp_path: Path) -> None:
    trainer(task(), checkpoint_dir=tmp_path, stop_after_steps=2).fit()
    for setting, value in (("seed", 1), ("global_batch_size", 4), ("shuffle_buffer", 0), ("accumulate", 2)):
        with pytest.raises(UsageError, match=rf"{setting}={value}, but the checkpoint .* was made with {setting}="):
            trainer(task(), checkpoint_dir=tmp_path, **{setting: value}).fit()
    with pytest.raises(UsageError, match=r"examples=36, but the checkpoint .* was made with examples=37"):
        trainer(Resumable(rows=36), checkpoint_dir=tmp_path).fit()


def test_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    trainer(task(), checkpoint_dir=tmp_path, stop_after_steps=2).fit()
    with pytest.raises(UsageError) as refused:
        trainer(Resumable(width=7), checkpoint_dir=tmp_path).fit()
    assert "kernel" in str(refused.value)
    assert "(4, 6)" in str(refused.value)
    assert "(4, 7)" in str(refused.value)


def test_never_refuses_to_write_over_what_is_there(tmp_path: Path) -> None:
    trainer(task(), checkpoint_dir=tmp_path, stop_after_steps=2).fit()
    with pytest.raises(UsageError, match=r"resume='never', but checkpoint_dir=.* holds checkpoints, up to step 2"):
        trainer(task(), checkpoint_dir=tmp_path, resume="never").fit()


def test_from_one_folder_to_another(tmp_path: Path) -> None:
    straight = trainer(task()).fit()
    trainer(task(), checkpoint_dir=tmp_path / "a", stop_after_steps=4).fit()
    report = trainer(task(), checkpoint_dir=tmp_path / "b", resume=str(tmp_path / "a")).fit()
    assert result(report) == result(straight)
    older = trainer(task(), checkpoint_dir=tmp_path / "b", resume=str(tmp_path / "a" / "step-000000004"))
    with pytest.raises(UsageError, match="has one of step 15, which the next start would take"):
        older.fit()


def test_a_damaged_checkpoint_is_passed_over_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    straight = trainer(task()).fit()
    trainer(task(), checkpoint_dir=tmp_path, save_every="3", stop_after_steps=8).fit()
    data = tmp_path / "step-000000008" / "variables.data-00000-of-00001"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(bytes(content))
    report = trainer(task(), checkpoint_dir=tmp_path, quiet=False).fit()
    assert report.resumed_from == 6
    assert result(report) == result(straight)
    assert "step-000000008" in capsys.readouterr().out


def test_where_all_are_damaged_it_does_not_begin_anew(tmp_path: Path) -> None:
    trainer(task(), checkpoint_dir=tmp_path, stop_after_steps=2).fit()
    (tmp_path / "step-000000002" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointProblem, match=r"all checkpoints in checkpoint_dir=.* are damaged"):
        trainer(task(), checkpoint_dir=tmp_path).fit()


def test_weights_alone(tmp_path: Path) -> None:
    first = trainer(task(), checkpoint_dir=tmp_path / "c", ema=0.5)
    first.fit()
    first.export(tmp_path / "m.keras")
    averages = [average.numpy() for average in first.averages.variables]
    weights = [v.numpy() for v in first.model.trainable_variables]
    of_file = trainer(task(), init_from=tmp_path / "m.keras")
    of_checkpoint = trainer(task(), init_from=str(tmp_path / "c"))
    for got, right in ((of_file, averages), (of_checkpoint, weights)):
        for variable, value in zip(got.model.trainable_variables, right, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)
        assert got.step == 0
        assert int(got.optimizer.iterations) == 0
    with pytest.raises(UsageError, match="there is no file"):
        trainer(task(), init_from=tmp_path / "none.keras")
    with pytest.raises(UsageError, match=r"m\.keras does not fit the model"):
        trainer(Resumable(width=7), init_from=tmp_path / "m.keras")


def test_code_in_a_model_file_is_not_run(tmp_path: Path) -> None:
    import keras

    sign = tmp_path / "code was run"
    layers = keras.layers
    touch = layers.Lambda(eval(f"lambda x: (__import__('pathlib').Path({str(sign)!r}).touch(), x)[1]"))
    keras.Sequential([keras.Input([4]), touch, layers.Dense(3)]).save(tmp_path / "m.keras")
    sign.unlink(missing_ok=True)  # made when the file was
    with pytest.raises(UsageError, match=r"m\.keras does not fit the model"):
        trainer(task(), init_from=tmp_path / "m.keras")
    assert not sign.exists()


def test_exported_models_say_what_the_trainer_says(tmp_path: Path) -> None:
    import keras

    made = trainer(task(), ema=0.5)
    made.fit()
    said = made.predict("test")
    inputs = task().dataset("test")[0]
    np.testing.assert_array_equal(made.predict(inputs), said)
    made.export(tmp_path / "m.keras")
    made.export(tmp_path / "saved")
    np.testing.assert_allclose(
        keras.models.load_model(tmp_path / "m.keras").predict(inputs, verbose=0), said, atol=1e-6
    )
    saved = tf.saved_model.load(tmp_path / "saved")
    np.testing.assert_allclose(saved.serve(inputs), said, atol=1e-6)
    with pytest.raises(UsageError, match="it is there already"):
        made.export(tmp_path / "saved")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.keras", "saved"]


def test_the_folder_is_given_back_whatever_happens(tmp_path: Path) -> None:
    for rows in (37, 36, 37):
        made = trainer(Resumable(rows=rows), checkpoint_dir=tmp_path, stop_after_steps=1)
        try:
            made.fit()
        except TfdistError:
            assert rows == 36


def test_what_a_checkpoint_says_of_its_run(tmp_path: Path) -> None:
    trainer(task(), checkpoint_dir=tmp_path, stop_after_steps=6).fit()
    saved = find(tmp_path, print)
    assert saved.manifest.state["epoch"] == 2
    assert saved.manifest.state["backend"] == "one_device"
    assert saved.manifest.state["task"]["class"] == "tests.resumable:Resumable"
    assert saved.manifest.state["course"]["examples"] == 37
    reader = tf.train.load_checkpoint(str(saved.path / "variables"))
    names = saved.manifest.state["names"]
    assert set(names) == set(reader.get_variable_to_shape_map())
    assert {name.split("/")[0] for name in names} == {"model", "optimizer", "trainer"}
    json.dumps(saved.manifest.state)
    shutil.copytree(saved.path, tmp_path / "elsewhere" / saved.path.name)
    assert find(tmp_path / "elsewhere", print).manifest.step == 6
