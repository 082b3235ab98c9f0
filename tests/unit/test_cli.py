"""From words of the command line to a command, or to a message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tfdist.command_line import parse
from tfdist.commands import CheckCommand, CheckpointsCommand, TrainCommand
from tfdist.config import Settings
from tfdist.errors import UsageError


def refusal(*words: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(words)
    return str(caught.value)


def test_nothing_has_to_be_given() -> None:
    assert parse(["train"]) == TrainCommand()
    assert parse(["check"]) == CheckCommand()


def test_flags_of_each_kind() -> None:
    words = "train --task my.py:Mine --task-args a=1 b=2 --task-args c=3 --steps 3 --clip-norm 1e-3 --jit"
    decay = (
        "--precision float16 --weight-decay 0.1 --weight-decay-exclude bias gamma --monitor test/loss --report r.json"
    )
    assert parse([*words.split(), *decay.split()]) == TrainCommand(
        task="my.py:Mine",
        task_args=("a=1", "b=2", "c=3"),
        steps=3,
        clip_norm=0.001,
        jit=True,
        precision="float16",
        weight_decay=0.1,
        weight_decay_exclude=("bias", "gamma"),
        monitor="test/loss",
        report=Path("r.json"),
    )


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (
            "--backend parameter_server --parameter-servers 2 --max-in-flight 8",
            {"parameter_servers": 2, "max_in_flight": 8},
        ),
        ("--backend horovod --sync-every 4", {"sync_every": 4}),
        ("--backend multi_worker_mirrored --collectives ring --replicas 2", {"collectives": "ring", "replicas": 2}),
        ("--backend central_storage --gpu-memory all", {"gpu_memory": "all"}),
    ],
)
def test_flags_of_backends(words: str, settings: dict[str, Any]) -> None:
    assert parse(["train", *words.split()]) == TrainCommand(backend=words.split()[1], **settings)


def test_flags_of_check() -> None:
    words = "check --backends mirrored horovod --replicas 2 3 --cases uneven clip --json values.json"
    assert parse(words.split()) == CheckCommand(
        backends=("mirrored", "horovod"), replicas=(2, 3), cases=("uneven", "clip"), json=Path("values.json")
    )


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("runs/a", CheckpointsCommand(folder=Path("runs/a"))),
        ("runs/a --verify --json a.json", CheckpointsCommand(folder=Path("runs/a"), verify=True, json=Path("a.json"))),
        ("--diff 100 b runs/a", CheckpointsCommand(folder=Path("runs/a"), diff=("100", "b"))),
    ],
)
def test_flags_of_checkpoints(words: str, command: CheckpointsCommand) -> None:
    assert parse(["checkpoints", *words.split()]) == command


def test_a_file_gives_settings_and_later_flags_win(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("steps: 3\nema: 0.5\nweight_decay: 0.1\nweight_decay_exclude: [bias]\n")
    command = parse(["train", "--config", str(tmp_path / "run.yaml"), "--steps", "4"])
    assert isinstance(command, TrainCommand)
    assert (command.steps, command.ema, command.weight_decay_exclude) == (4, 0.5, ("bias",))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no command. Try: tfdist train --help"),
        ("train --stps 3", "--stps is not a flag. Did you mean 'steps'? See: tfdist train --help"),
        ("check --replcas 3", "--replcas is not a flag. Did you mean 'replicas'? See: tfdist check --help"),
        ("train --steps many", "steps=many must be a whole number."),
        ("train --ema much", "ema=much must be a number."),
        (
            "train --precision float61",
            "precision=float61 must be one of float32, float16, bfloat16. Did you mean 'float16'?",
        ),
        ("train --max-in-flight 0", "max_in_flight=0 must be 1 or more."),
        (
            "train --collectives rings",
            "collectives=rings must be one of auto, ring, nccl. Did you mean 'ring'?",
        ),
        ("train --clip-norm 0", "clip_norm=0.0 must be a finite number above 0."),
        ("train --clip-norm .nan", "clip_norm=nan must be a finite number above 0."),
        ("checkpoints", "no folder is given. Write: tfdist checkpoints FOLDER"),
        ("checkpoints a --verfy", "--verfy is not a flag. Did you mean 'verify'? See: tfdist checkpoints --help"),
        (
            "checkpoints a --verify --diff 1 2",
            "--diff and --verify are both set. Checksums are checked by --diff, too: leave one out.",
        ),
        ("check --replicas 0", "replicas=0 must be 1 or more."),
        ("check --replicas two", "replicas=two must be a whole number."),
    ],
)
def test_what_is_wrong_is_told_with_the_way_out(words: str, message: str) -> None:
    assert refusal(*words.split()) == message


def test_settings_that_contradict_each_other() -> None:
    assert "epochs=1 and steps=2 are both set" in refusal("train", "--epochs", "1", "--steps", "2")


def test_every_setting_is_a_flag() -> None:
    assert set(Settings.__dataclass_fields__) < set(TrainCommand.__dataclass_fields__)


def test_a_file_with_a_wrong_key_or_a_mapping_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("clip_globalnorm: 3\n")
    assert refusal("train", "--config", str(path)) == (
        "clip_globalnorm is not a setting of tfdist train. Did you mean 'clip_global_norm'?"
    )
    path.write_text("task_args:\n  epochs: 3\n")
    assert "task_args: [name=value]" in refusal("train", "--config", str(path))
