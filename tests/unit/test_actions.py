"""Actions: when they are called, what they see, and that they can stop the run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.toy import ToyLine
from tests.unit.one_device import STRATEGY, trainer
from tfdist import Moment, UsageError
from tfdist.training.actions import act


def moment(**changes: Any) -> Moment:
    fields: dict[str, Any] = {
        "kind": "chunk",
        "step": 1,
        "epoch": 1,
        "loss": 0.5,
        "learning_rate": 0.1,
        "examples_per_second": 10.0,
        "metrics": {},
        "is_chief": True,
    }
    return Moment(**{**fields, **changes})


def test_they_are_called_in_their_order_with_the_moment() -> None:
    seen: list[Any] = []
    now = moment()
    assert act([lambda m: seen.append(("first", m)), lambda m: seen.append(("second", m))], now, STRATEGY) is False
    assert [name for name, _ in seen] == ["first", "second"]
    assert all(m is now for _, m in seen)


def test_one_of_them_may_ask_to_stop() -> None:
    def stop(m: Moment) -> None:
        m.stop = True

    assert act([stop, lambda m: None], moment(), STRATEGY) is True
    assert act([], moment(stop=True), STRATEGY) is False, "nobody has asked"


def test_what_they_return_does_not_count() -> None:
    assert act([lambda m: True], moment(), STRATEGY) is False


@dataclasses.dataclass(kw_only=True)
class Judged(ToyLine):
    """`ToyLine` that is evaluated. With targets of 2, w is 1.2, 1.36 and so on, and the loss 1, 0.64, 0.4096."""

    targets: list[float] = dataclasses.field(default_factory=lambda: [2.0, 2.0])
    global_batch_size: int = 1

    def evaluation_splits(self) -> tuple[str, ...]:
        return ("test",)


def test_moments_of_a_run() -> None:
    # 2 steps an epoch, 3 at most in a chunk: with epochs to be told, chunks end with them.
    seen: list[Moment] = []
    trainer(Judged(), actions=[seen.append], epochs=4, validate_every=2, steps_per_chunk=3).fit()
    assert [(m.kind, m.step, m.epoch) for m in seen] == [
        ("chunk", 2, 1),
        ("epoch", 2, 1),
        ("chunk", 4, 2),
        ("evaluation", 4, 2),
        ("epoch", 4, 2),
        ("chunk", 6, 3),
        ("epoch", 6, 3),
        ("chunk", 8, 4),
        ("evaluation", 8, 4),
        ("epoch", 8, 4),
    ]
    # The loss before update n is 0.64ⁿ⁻¹ in training, and after it in evaluation.
    assert [m.loss for m in seen if m.kind == "chunk"] == [pytest.approx(0.64 ** (n - 1)) for n in (2, 4, 6, 8)]
    evaluated = [m.metrics["test"]["loss"] for m in seen if m.kind == "evaluation"]
    assert evaluated == [pytest.approx(0.64**n, rel=1e-5) for n in (4, 8)]
    assert seen[0].metrics == {}
    assert all(m.learning_rate == pytest.approx(0.1) for m in seen)
    assert all(m.is_chief and m.examples_per_second > 0 for m in seen)


def test_a_stop_ends_the_run_with_an_evaluation() -> None:
    seen: list[str] = []

    def stop(m: Moment) -> None:
        seen.append(f"{m.kind} {m.step}")
        m.stop = m.step == 3
        for values in m.metrics.values():
            values["loss"] = -1.0

    report = trainer(Judged(), actions=[stop], epochs=9, validate_every=0, steps_per_chunk=1).fit()
    assert report.steps == 3
    assert report.stopped == "an action asked for it after step 3"
    assert report.metrics["test"]["loss"] == pytest.approx(0.64**3), "what it has done to the metrics reaches nobody"
    assert seen == ["chunk 1", "chunk 2", "epoch 2", "chunk 3", "evaluation 3"]


def test_a_stop_at_the_end_of_an_epoch_has_its_evaluation() -> None:
    seen: list[str] = []

    def stop(m: Moment) -> None:
        seen.append(f"{m.kind} {m.step}")
        m.stop = m.kind == "epoch" and m.step == 4

    report = trainer(Judged(), actions=[stop], epochs=9, validate_every=0).fit()
    assert (report.steps, report.stopped) == (4, "an action asked for it after step 4")
    assert report.metrics["test"]["loss"] == pytest.approx(0.64**4, rel=1e-5)
    assert seen == ["chunk 2", "epoch 2", "chunk 4", "epoch 4", "evaluation 4"]


@pytest.mark.parametrize("kind", ["chunk", "evaluation", "epoch"])
def test_a_stop_at_the_last_step_ends_nothing(kind: str) -> None:
    seen: list[str] = []

    def stop(m: Moment) -> None:
        seen.append(f"{m.kind} {m.step}")
        m.stop = m.kind == kind and m.step == 4

    report = trainer(Judged(), actions=[stop], epochs=2).fit()
    assert (report.steps, report.stopped) == (4, None)
    assert seen[3:] == ["chunk 4", "evaluation 4", "epoch 4"], "evaluated once"


def test_an_error_in_one_tells_after_which_step() -> None:
    def fall(m: Moment) -> None:
        if m.step == 2:
            raise ValueError("the sky is falling")

    with pytest.raises(ValueError, match="the sky is falling") as caught:
        trainer(Judged(), actions=[fall], epochs=2).fit()
    assert caught.value.__notes__ == ["after step 2"]


def test_an_error_in_one_is_told_as_it_is() -> None:
    def fall(m: Moment) -> None:
        raise ValueError("the sky is falling")

    with pytest.raises(ValueError, match="the sky is falling"):
        trainer(Judged(), actions=[fall]).fit()


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(UsageError, match=r"actions=\['print'\] must be a list of functions of a tfdist\.Moment"):
        trainer(Judged(), actions=["print"])
