"""`tfdist compare` before and after its runs: plan and refusals, speed, an earlier file, the table."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.comparison_result import all_equal, result, without
from tfdist.cli import main
from tfdist.commands import TrainCommand
from tfdist.errors import UsageError
from tfdist.evidence import against, compare_table, speed
from tfdist.evidence.arms import Arm, Ran
from tfdist.evidence.compare import _require_equal_batches, plan
from tfdist.evidence.pairs import _pair, pairs_of, worst
from tfdist.evidence.speed import Timed

ONE, TWO, FOUR = Arm("one_device", 1), Arm("horovod", 2), Arm("horovod", 4)


def test_the_plan_has_one_device_once_and_first() -> None:
    arms = plan(["horovod", "one_device", "mirrored"], [2, 4])
    names = ["one_device x 1", "horovod x 2", "mirrored x 2", "horovod x 4", "mirrored x 4"]
    assert [arm.name for arm in arms] == names


def test_asynchronous_runs_come_last_so_that_the_others_are_compared() -> None:
    arms = plan(["parameter_server", "horovod", "mirrored"], [2])
    pairs = [(a.backend, b.backend) for a, b in pairs_of(arms)]
    assert pairs == [("horovod", "mirrored"), ("horovod", "parameter_server")]


def ran(arm: Arm, **report: Any) -> Ran:
    return Ran(arm, {"global_batch_size": 16, "accumulate": 1} | report, None, "")


def test_unequal_global_batches_are_refused_by_name() -> None:
    _require_equal_batches(
        [ran(ONE), ran(TWO), ran(FOUR, global_batch_size=8, accumulate=2), Ran(TWO, None, None, "x")]
    )
    with pytest.raises(UsageError, match=r"differs: 16 on one_device x 1, 32 on horovod x 4.*--global-batch-size"):
        _require_equal_batches([ran(ONE), ran(FOUR, accumulate=2)])


def traced(arm: Arm, *variables: str) -> Ran:
    """A run of one step whose loss depends on the number of replicas."""
    found: dict[str, Any] = {"variables": np.array(variables), "trained": np.array([], str)}
    found |= {f"value/{name}": np.zeros(1, np.float32) for name in variables}
    found |= {"losses": np.array([arm.replicas], np.float32), "batch": np.zeros((1, 1, 1), np.int64)}
    found |= {"initial": np.zeros((1, len(variables)), np.int64), "replicas": np.array(1), "addends": np.array(1)}
    for stage, columns in {"local": 0, "reduced": 0, "after": len(variables)}.items():
        found |= {f"{stage} {what}": np.zeros((1, 1, columns)) for what in ("checksums", "sums", "sizes")}
    return Ran(arm, {}, found, "")


@pytest.mark.parametrize("variable", ["model/dropout/seed_generator_state", "model/bn/moving_mean"])
def test_what_depends_on_the_number_of_replicas_does_not_compare(variable: str) -> None:
    train = TrainCommand()
    told = _pair(traced(TWO, variable), traced(FOUR, variable), None, train)
    assert told["verdict"] == "not comparable"
    assert "with --reproducible" in told["note"]
    # Neither where nothing depends on it, nor with --reproducible, nor at one number of replicas is that an excuse.
    other = traced(Arm("mirrored", 2), variable)
    other = dataclasses.replace(other, trace={**(other.trace or {}), "losses": np.array([9], np.float32)})
    for pair in (
        _pair(traced(TWO, "model/kernel"), traced(FOUR, "model/kernel"), None, train),
        _pair(traced(TWO, variable), traced(FOUR, variable), None, dataclasses.replace(train, reproducible=True)),
        _pair(traced(TWO, variable), other, None, train),
    ):
        assert pair["verdict"] == "different"


def test_the_verdict_is_that_of_the_worst_pair() -> None:
    verdicts = ["same bits", "different", "rounding", "not comparable"]
    assert [worst(verdicts), worst(verdicts[2:]), worst(verdicts[::3]), worst(verdicts[:1])] == [
        *("different", "rounding", "not comparable", "same bits")
    ]


def test_a_run_that_failed_is_different_and_says_why() -> None:
    told = _pair(traced(TWO, "v"), Ran(FOUR, None, None, "ended with exit code 4: no"), None, TrainCommand())
    assert (told["verdict"], told["note"]) == ("different", "horovod x 4 ended with exit code 4: no")
    told = _pair(traced(TWO, "v"), Ran(Arm("parameter_server", 2), {}, None, ""), None, TrainCommand())
    assert (told["verdict"], told["variables"]) == ("not comparable", [])


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
    "--task belongs to tfdist compare": ("--", "--task", "digits"),
    "--replicas belongs to tfdist compare. Write": ("--", "--repl", "2"),
    "--checkpoint-dir belongs to tfdist compare, whose": ("--", "--config", "own.yaml"),
    "--task-args belongs to tfdist compare. Write": ("--", "--config", "task.yaml"),
    "sync_every=2 and trace": ("--backends", "horovod,mirrored", "--", "--sync-every", "2"),
    "--lerning-rate is not a flag": ("--", "--lerning-rate", "1"),
    "network='fast'": ("--network", "fast"),
    "against='none.json' cannot be read": ("--against", "none.json"),
    "against='other.json' is no comparison": ("--against", "other.json"),
    "against='half.json' is no comparison": ("--against", "half.json"),
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
    Path("own.yaml").write_text("checkpoint_dir: A\n")
    Path("task.yaml").write_text("task_args: [a=1]\n")
    made = result() | {"task_args": [], "steps": 50}
    Path("half.json").write_text(json.dumps(made | {"arms": [{"name": "horovod x 2"}]}))
    Path("steps.json").write_text(json.dumps(made | {"steps": 7}))
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


def test_noise_counts_when_the_second_run_is_the_slower_one() -> None:
    timed = rounds((100, 80, 50))
    timed[0].runs[TWO, "again"] = reported(125)
    assert speed.noise(timed) == pytest.approx({"low": 0.8, "high": 1.25})


def test_examples_in_a_second_have_the_bounds_of_a_steps_time() -> None:
    told = speed.numbers(rounds((100, 80, 50), (200, 80, 50), (400, 80, 50)), TWO)
    milliseconds, examples = told["step_ms"], told["examples_per_second"]
    assert milliseconds["low"] < milliseconds["median"] < milliseconds["high"]
    assert examples["low"] == pytest.approx(32e3 / milliseconds["high"])
    assert examples["high"] == pytest.approx(32e3 / milliseconds["low"])


@pytest.mark.parametrize("reaching", [1, 2])
def test_a_quality_that_most_rounds_do_not_reach_has_no_time(reaching: int) -> None:
    worker = Arm("parameter_server", 2)
    reference = reported(20, losses=[1.0] * 20, step_seconds=[0.02] * 20)
    timed = []
    for number in range(3):
        other = reported(10, losses=[0.5 if number < reaching else 2.0] * 20, step_seconds=[0.01] * 20)
        timed.append(Timed({(TWO, "as it is"): reference, (TWO, "again"): reference, (worker, "as it is"): other}))
    arm: dict[str, Any] = {"name": worker.name, "backend": worker.backend, "replicas": 2, "asynchronous": True}
    speed.time_to_quality({"arms": [arm]}, timed)
    assert arm["seconds_to_quality"] == (pytest.approx(0.01) if reaching == 2 else None)


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


def test_the_interval_of_a_ratio_of_ratios_is_the_widest() -> None:
    was, now = result(), result()
    was["arms"][1]["ratio"] = {"median": 1.0, "low": 0.8, "high": 1.25}
    now["arms"][1]["ratio"] = {"median": 0.5, "low": 0.4, "high": 0.6}
    told = against.judge(None, was, now)["speed"][1]
    assert told["ratio"] == pytest.approx({"median": 0.5, "low": 0.32, "high": 0.75})
    assert told["verdict"] == "slower"
    # The noise of either run alone is enough to excuse it.
    for noisy in (was, now):
        before, noisy["noise"] = noisy["noise"], {"low": 0.7, "high": 1.4}
        assert against.judge(None, was, now)["speed"][1]["verdict"] == "as before"
        noisy["noise"] = before
    # Likewise of what seems faster: at least 1.36 times, where 1.4 may be noise.
    now["arms"][1]["ratio"] = {"median": 2.0, "low": 1.7, "high": 2.2}
    assert against.judge(None, was, now)["speed"][1]["verdict"] == "faster"
    for noisy in (was, now):
        before, noisy["noise"] = noisy["noise"], {"low": 0.7, "high": 1.4}
        assert against.judge(None, was, now)["speed"][1]["verdict"] == "as before"
        noisy["noise"] = before


def test_what_cannot_be_compared_with_the_earlier_file_is_left_out() -> None:
    now = result()
    now["arms"][1] |= {"asynchronous": True, "losses": [9.0], "state_sha256": "f" * 64}
    now["arms"][2]["name"] = "new x 2"
    told = against.judge(None, result(), now)
    assert told["numbers"] == []
    assert [line["arm"] for line in told["speed"]] == [now["arms"][0]["name"], now["arms"][3]["name"]]
    # A ratio to another reference is another ratio.
    assert against.judge(None, result() | {"reference": "mirrored x 2"}, result())["speed"] == []
    assert against.judge(None, without(result(), "speed"), result())["speed"] == []


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
    for pair in content["pairs"]:
        line = max(pair["variables"], key=lambda v: v["absolute"])
        assert f"{line['absolute']:.2g} " in text
        assert f" {max(v['ulps'] for v in pair['variables'])} " in text
        assert f"{max(pair['loss_difference']):.2g} " in text
    for head in ("verdict ", "rounding may", "of a variable", "in units of the", "last place", "start-up", "memory"):
        assert head in text
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
