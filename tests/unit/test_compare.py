"""`tfdist compare` before and after its runs: plan and refusals, speed, an earlier file, the table."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.comparison_result import all_equal, result, without
from tfdist.cli import main
from tfdist.errors import UsageError
from tfdist.evidence import against, compare_table, speed
from tfdist.evidence.arms import Arm
from tfdist.evidence.compare import pairs_of, plan
from tfdist.evidence.speed import Timed

ONE, TWO, FOUR = Arm("one_device", 1), Arm("horovod", 2), Arm("horovod", 4)


def test_the_plan_has_one_device_once_and_first() -> None:
    arms = plan(["horovod", "one_device", "mirrored"], [2, 4])
    names = ["one_device x 1", "horovod x 2", "mirrored x 2", "horovod x 4", "mirrored x 4"]
    assert [arm.name for arm in arms] == names


def test_the_first_of_a_number_of_replicas_stands_for_it() -> None:
    arms = plan(["one_device", "horovod", "mirrored"], [1, 2])
    pairs = [(a.name, b.name) for a, b in pairs_of(arms)]
    assert pairs == [
        ("one_device x 1", "horovod x 1"),
        ("one_device x 1", "mirrored x 1"),
        ("one_device x 1", "horovod x 2"),
        ("horovod x 2", "mirrored x 2"),
    ]


REFUSED: dict[str, tuple[str, ...]] = {
    "backend='mirorred' is unknown": ("--backends", "mirorred,horovod"),
    "replicas='x' must be a whole number": ("--replicas", "2,x"),
    "replicas=0 must be 1 or more": ("--replicas", "0"),
    "rounds=-1 must be 0 or more": ("--rounds", "-1"),
    "steps=0 must be 1 or more": ("--steps", "0"),
    "only one_device x 1 is left to compare": ("--backends", "one_device"),
    "--backend belongs to tfdist compare": ("--", "--backend", "mirrored"),
    "--checkpoint-dir belongs to tfdist compare": ("--", "--checkpoint-dir=A"),
    "--lerning-rate is not a flag": ("--", "--lerning-rate", "1"),
    "network='fast'": ("--network", "fast"),
    "against='none.json' cannot be read": ("--against", "none.json"),
    "against='other.json' is no comparison": ("--against", "other.json"),
    "steps=50, but 'steps.json' was made with steps=7": ("--against", "steps.json"),
    "json='no/c.json' cannot be written": ("--json", "no/c.json"),
    "html='no/c.html' cannot be written": ("--html", "no/c.html"),
    "png='no/pictures' cannot be written": ("--png", "no/pictures"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_words_are_refused_before_anything_runs(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text('{"schema": 1}')
    made = {"schema": 1, "arms": [], "task": "digits", "task_args": [], "steps": 7, "seed": 0, "reproducible": False}
    Path("steps.json").write_text(json.dumps(made))
    assert main(["compare", *REFUSED[message]]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.out == ""


def reported(milliseconds: float, *, rank: tuple[float, float, float] = (0.1, 0.2, 0.3), **more: Any) -> dict[str, Any]:
    """A run of eleven steps, each but the first so long; a rank's seconds for input, computing and communication."""
    seconds = [9.0, *[milliseconds / 1e3] * 10]
    names = ("input_seconds", "compute_seconds", "collective_seconds")
    told = dict(zip(names, rank, strict=True)) | {"peak_memory_mb": 500.0, "startup_seconds": 6.0}
    ranks = [told, told | {"peak_memory_mb": 700.0}]
    report = {"step_seconds": seconds, "losses": [3.0] * 11, "global_batch_size": 16, "accumulate": 2, "ranks": ranks}
    return report | more


def rounds(*milliseconds: tuple[float, float, float]) -> list[Timed]:
    """Rounds of `TWO` (as it is, without communication) and of `FOUR`."""
    found = []
    for own, alone, other in milliseconds:
        runs = {(TWO, "as it is"): reported(own), (TWO, "alone"): reported(alone), (TWO, "again"): reported(own)}
        found.append(Timed(runs | {(FOUR, "as it is"): reported(other)}))
    return found


def test_speed_is_a_ratio_inside_of_rounds() -> None:
    # The second round is twice as slow for all; FOUR takes half of TWO's time in each.
    timed = rounds((100, 80, 50), (200, 160, 100), (100, 80, 50))
    two, four = speed.numbers(timed, TWO), speed.numbers(timed, FOUR)
    assert four["ratio"] == {"median": 2, "low": 2, "high": 2}
    assert two["ratio"]["median"] == 1
    assert two["efficiency"] == pytest.approx({"median": 0.8, "low": 0.8, "high": 0.8})
    assert four["efficiency"] is None
    assert two["step_ms"]["median"] == pytest.approx(100)
    assert two["examples_per_second"]["median"] == pytest.approx(32 / 0.1)
    assert two["memory_mb"] == 700
    assert two["startup_seconds"] == 6
    assert speed.noise(timed) == {"low": 1, "high": 1}


def test_what_is_not_input_computing_or_communication_is_the_trainers() -> None:
    # Over ten steps of 100 ms: 10, 20 and 30 ms of each.
    split = speed.numbers(rounds((100, 80, 50)), TWO)["split_ms"]
    assert split == pytest.approx({"input": 10, "compute": 20, "communication": 30, "own": 40})


def test_nothing_that_was_timed_tells_nothing() -> None:
    assert set(speed.numbers([], TWO).values()) == {None}
    assert speed.noise([]) is None


def test_noise_is_as_wide_on_both_sides() -> None:
    timed = rounds((100, 80, 50))
    timed[0].runs[TWO, "again"] = reported(80)
    assert speed.noise(timed) == pytest.approx({"low": 0.8, "high": 1.25})


def test_time_to_quality() -> None:
    # The mean of the last ten losses falls from 3; the reference ends with 1.5 after 20 steps, the other gets there
    # with the loss of 0 in its steps 11 to 15: 15 steps of 10 ms.
    worker = Arm("parameter_server", 2)
    losses = [3.0] * 10 + [0.0] * 10
    reference = reported(20, losses=[2.0] * 10 + [1.5] * 10, step_seconds=[0.02] * 20)
    runs = {(TWO, "as it is"): reference, (TWO, "again"): reference}
    runs[worker, "as it is"] = reported(10, losses=losses, step_seconds=[0.01] * 20)
    content: dict[str, Any] = {
        "arms": [
            {"name": TWO.name, "backend": "horovod", "replicas": 2, "asynchronous": False},
            {"name": worker.name, "backend": "parameter_server", "replicas": 2, "asynchronous": True},
        ]
    }
    speed.time_to_quality(content, [Timed(runs)])
    assert [arm["seconds_to_quality"] for arm in content["arms"]] == pytest.approx([0.4, 0.15])


def test_against_an_equal_file_nothing_has_changed() -> None:
    told = against.judge(Path("old.json"), result(), result())
    assert told["numbers"] == []
    assert {s["verdict"] for s in told["speed"]} == {"as before"}
    assert not against.is_worse(told)


def test_changed_numbers_are_named() -> None:
    now = result()
    now["arms"][1]["losses"][3] += 1e-7
    now["arms"][0]["state_sha256"] = "f" * 64
    told = against.judge(Path("old.json"), result(), now)
    assert [line.partition(":")[0] for line in told["numbers"]] == ["horovod x 2", "multi_worker_mirrored x 2"]
    assert "the loss of step 4 was" in told["numbers"][1]
    assert against.is_worse(told)


@pytest.mark.parametrize(("factor", "verdict"), [(0.5, "slower"), (0.99, "as before"), (2.0, "faster")])
def test_speed_counts_beyond_the_noise(factor: float, verdict: str) -> None:
    now = result()
    now["arms"][1]["ratio"] = {name: value * factor for name, value in now["arms"][1]["ratio"].items()}
    told = against.judge(Path("old.json"), result(), now)
    assert next(s for s in told["speed"] if s["arm"] == now["arms"][1]["name"])["verdict"] == verdict
    assert against.is_worse(told) == (verdict == "slower")


@pytest.mark.parametrize("name", ["task", "steps", "global_batch_size", "seed", "reproducible"])
def test_another_training_does_not_compare(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}=.* do not compare"):
        against.judge(Path("old.json"), result() | {name: "other"}, result())


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_loses_nothing(width: int) -> None:
    content = result()
    console = Console(width=width, record=True, file=io.StringIO())
    compare_table.show(console, content, ["horovod x 2 ended with exit code 4"])
    text = console.export_text()
    for arm in content["arms"]:
        assert f"{arm['examples_per_second']['median']:.0f} (" in text
        assert f"{arm['memory_mb']:.0f}" in text
        assert arm["weights_sha256"][:8] in text
    for part in ("verdict: different", "FAILED horovod x 2 ended with exit code 4", "predicted efficiency"):
        assert part in text
    tables = text[: text.index("bits part")].splitlines()[:-1]
    assert max(len(line.rstrip()) for line in tables) <= width
    assert "…" not in text


def test_a_table_without_speed() -> None:
    content = all_equal(without(result(), "speed", "scaling", "against"))
    console = Console(width=120, record=True, file=io.StringIO())
    compare_table.show(console, content, [])
    assert "examples/s" not in console.export_text(clear=False)
    assert "verdict: same bits" in console.export_text()
