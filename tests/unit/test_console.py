"""What the chief shows: lines with a clock of the test, and the bar on a terminal of 80 columns in memory."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console as RichConsole

from tfdist.training.console import BarConsole, Console, LineConsole, Plan, SilentConsole, open_console

PLAN = Plan(
    backend="mirrored", replicas=2, steps=230, steps_per_epoch=23, global_batch_size=64, examples=1438, threads=1
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_headline_says_all_in_one_line() -> None:
    assert PLAN.headline() == (
        "training on mirrored, 2 replicas: 230 steps of 64 examples (1438 examples), 1 intra-op thread(s)"
    )
    endless = dataclasses.replace(PLAN, replicas=1, examples=None, steps_per_epoch=None)
    assert "mirrored, 1 replica: 230 steps of 64 examples (endless examples)" in endless.headline()
    assert "230 steps of 4 × 64 examples (1438 examples)" in dataclasses.replace(PLAN, accumulate=4).headline()


@pytest.mark.parametrize(
    ("step", "position"),
    [
        (1, "epoch 1/10 step 1/230"),
        (23, "epoch 1/10 step 23/230"),
        (24, "epoch 2/10 step 24/230"),
        (230, "epoch 10/10 step 230/230"),
    ],
)
def test_where_a_step_is(step: int, position: str) -> None:
    assert PLAN.position(step) == position
    assert PLAN.epoch(step) == int(position.split()[1].partition("/")[0])


def test_where_a_step_is_without_whole_epochs() -> None:
    assert dataclasses.replace(PLAN, steps=24).position(24) == "epoch 2/2 step 24/24"
    assert dataclasses.replace(PLAN, steps=5).position(5) == "epoch 1/1 step 5/5"
    endless = dataclasses.replace(PLAN, steps_per_epoch=None)
    assert endless.position(24) == "step 24/230"
    assert endless.epoch(24) is None


def test_lines_come_at_most_once_an_interval(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    console = LineConsole(interval=5, clock=clock)
    console.begin(PLAN)
    assert capsys.readouterr().out == PLAN.headline() + "\n"
    shown = []
    for step, seconds in ((10, 0.0), (20, 4.9), (30, 0.1), (40, 3.0), (50, 30.0), (60, 4.0)):
        clock.now += seconds
        console.progress(step, 0.123456, 1234.5, 0.0123456)
        shown.append((step, capsys.readouterr().out))
    assert [step for step, text in shown if text] == [10, 30, 50]
    assert shown[0][1] == "epoch 1/10 step 10/230  loss 0.1235  learning rate 0.01235  1234 examples/s\n"


def test_the_last_step_is_always_shown(capsys: pytest.CaptureFixture[str]) -> None:
    console = LineConsole(interval=5, clock=Clock())
    console.begin(PLAN)
    console.progress(229, 1.0, 1.0, 0.1)
    capsys.readouterr()
    console.progress(230, 1.0, 1.0, 0.1)
    assert "step 230/230" in capsys.readouterr().out


def test_evaluations_notes_and_the_end_are_always_shown(capsys: pytest.CaptureFixture[str]) -> None:
    console = LineConsole(interval=5, clock=Clock())
    console.begin(PLAN)
    capsys.readouterr()
    for _ in range(2):
        console.evaluated(23, "test", {"loss": 0.123456, "accuracy": 1.0, "per_class": [0.5, 1.0]})  # type: ignore[dict-item]
    line = "epoch 1/10 step 23/230  test: loss 0.1235  accuracy 1  per_class [0.5, 1.0]\n"
    assert capsys.readouterr().out == line * 2
    console.note("stopping early")
    assert capsys.readouterr().out == "stopping early\n"
    console.end("done")
    console.close()
    assert capsys.readouterr().out == "done\n"


def bar(columns: int = 80) -> tuple[BarConsole, io.StringIO]:
    screen = io.StringIO()
    return BarConsole(RichConsole(file=screen, force_terminal=True, width=columns, height=24, _environ={})), screen


def lines(screen: io.StringIO) -> list[str]:
    """All that was written, without colours and movements of the cursor; redrawn lines come again."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    return [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()]


def run(console: Console) -> None:
    console.begin(PLAN)
    console.progress(23, 0.123456, 123456.7, 0.0123456)
    console.evaluated(23, "test", {"loss": 0.5, "accuracy": 0.25})
    console.note("step 23: no better; the learning rate is multiplied by 0.1")
    console.progress(230, 0.01, 123456.7, 1e-5)
    console.end("done: 230 steps")
    console.close()


def test_the_bar_fits_into_80_columns() -> None:
    console, screen = bar()
    run(console)
    shown = lines(screen)
    assert PLAN.headline() in shown
    assert "epoch 1/10 step 23/230  test: loss 0.5  accuracy 0.25" in shown
    assert "step 23: no better; the learning rate is multiplied by 0.1" in shown
    bars = [line for line in shown if "examples/s" in line and not line.startswith("training")]
    assert bars
    for line in bars:
        assert len(line) <= 80
        assert "…" not in line
    last = [line for line in bars if line.startswith("epoch 10/10  loss 0.01  lr 1e-05 ")]
    assert any(" 230/230 123457 examples/s" in line for line in last)
    assert shown[-1] == "done: 230 steps"


def test_lines_longer_than_the_terminal_are_not_cut() -> None:
    console, screen = bar(columns=40)
    run(console)
    # Left to the terminal to wrap, so that they can be copied whole.
    assert PLAN.headline() in lines(screen)
    assert "epoch 1/10 step 23/230  test: loss 0.5  accuracy 0.25" in lines(screen)


def test_the_bar_waits_with_the_first_step() -> None:
    console, screen = bar()
    console.begin(PLAN)
    console.close()
    assert lines(screen)[-1].startswith("first step ")
    assert "0/230" in lines(screen)[-1]


def test_the_cursor_comes_back_whatever_happens() -> None:
    console, screen = bar()
    console.begin(PLAN)
    assert "\x1b[?25l" in screen.getvalue()
    console.close()
    console.close()  # as after an error
    assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")


def test_a_run_that_never_began_shows_no_bar() -> None:
    console, screen = bar()
    console.close()
    assert lines(screen) == []


def test_nothing_is_shown_by_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    run(SilentConsole())
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("visible", "width", "kind"),
    [
        (False, None, SilentConsole),
        (False, 80, SilentConsole),
        (True, None, LineConsole),
        (True, 80, BarConsole),
        (True, 0, BarConsole),
    ],
)
def test_which_console(visible: bool, width: int | None, kind: type[Console]) -> None:
    assert type(open_console(visible=visible, width=width)) is kind


def plan_of(workers: int | None, examples: int, batch: int, epochs: int) -> Plan:
    steps = -(-epochs * examples // batch) if workers else epochs * -(-examples // batch)
    return Plan("x", 1, steps, -(-examples // batch), batch, examples, 1, workers=workers, epochs=epochs)


@pytest.mark.parametrize(
    ("workers", "examples", "batch", "ends"),
    [
        (None, 33, 32, [2, 4, 6, 8]),
        (2, 33, 32, [2, 3, 4, 5]),  # after 33, 66, 99 and 132 examples
        (2, 100, 8, [13, 25, 38, 50]),
        (2, 64, 16, [4, 8, 12, 16]),
    ],
)
def test_epochs_end_where_their_last_example_is(
    workers: int | None, examples: int, batch: int, ends: list[int]
) -> None:
    plan = plan_of(workers, examples, batch, epochs=4)
    assert plan.steps == ends[-1]
    assert [step for step in range(1, plan.steps + 1) if plan.ends_epoch(step)] == ends
    assert [step for step in range(1, plan.steps + 1) if plan.ends_epoch(step, 2)] == ends[1::2]
    assert [plan.epoch(step) for step in ends] == [1, 2, 3, 4]
    assert plan.next_end(0) == ends[0]
    assert [plan.next_end(step) for step in ends[:-1]] == ends[1:]
    assert plan.next_end(ends[0], 2) == ends[1]
    assert plan.next_end(ends[2], 3) == plan.steps


def test_several_short_epochs_may_end_in_one_step() -> None:
    plan = plan_of(1, 10, 32, epochs=7)
    assert [(step, plan.epoch(step)) for step in range(1, plan.steps + 1) if plan.ends_epoch(step)] == [
        (1, 3),
        (2, 6),
        (3, 7),
    ]
