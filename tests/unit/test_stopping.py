"""Decisions from evaluations, worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import keras
import numpy as np
import pytest

from tests.toy import ToyLine, ToyNet
from tests.unit.one_device import STRATEGY, trainer
from tfdist import Settings, UsageError
from tfdist.cluster.channel import Alone
from tfdist.training.metrics import MetricTotals
from tfdist.training.stopping import Best, Decision, Decisions


def decisions(*splits: str, **settings: Any) -> Decisions:
    return Decisions(Settings.of(**settings), Alone(), splits or ("test",))


def after(made: Decisions, *losses: float, name: str = "loss") -> list[Decision]:
    """What follows from evaluations at steps 10, 20 and so on, where epochs 1, 2 and so on end."""
    return [made.after(10 * i, i, {"test": {name: loss}}) for i, loss in enumerate(losses, 1)]


def improved(made: Decisions, *losses: float, name: str = "loss") -> list[bool]:
    return [decision.improved for decision in after(made, *losses, name=name)]


def stops(made: Decisions, *losses: float) -> list[bool]:
    return [decision.stop is not None for decision in after(made, *losses)]


def reductions(made: Decisions, *losses: float) -> list[bool]:
    return [decision.reduce_learning_rate for decision in after(made, *losses)]


class TestImprovement:
    def test_less_than_the_best_so_far(self) -> None:
        made = decisions(restore_best=True)
        assert improved(made, 3.0, 2.0, 2.0, 2.5, 1.0) == [True, True, False, False, True]
        assert made.best == Best("test/loss", 1.0, 50, 5)

    def test_more_where_more_is_better(self) -> None:
        made = decisions(monitor="test/accuracy")
        assert improved(made, 0.5, 0.4, 0.5, 0.6, name="accuracy") == [True, False, False, True]
        assert made.best == Best("test/accuracy", 0.6, 40, 4)

    def test_it_must_be_better_by_more_than_min_delta(self) -> None:
        # Better than 4 by more than 0.5 is below 3.5, then below 2.75.
        assert improved(decisions(patience=9, min_delta=0.5), 4.0, 3.5, 3.25, 2.75, 2.5) == [
            True,
            False,
            True,
            False,
            True,
        ]
        more = decisions(monitor="test/loss", monitor_mode="max", min_delta=0.5)
        assert improved(more, 4.0, 4.5, 4.75) == [True, False, True]

    def test_what_is_not_a_number_is_never_better(self) -> None:
        made = decisions(patience=3)
        assert improved(made, math.nan, 2.0, math.nan, 1.0) == [False, True, False, True]
        assert made.best == Best("test/loss", 1.0, 40, 4)
        never = after(decisions(patience=2), math.nan, math.nan)
        assert [d.stop for d in never] == [
            None,
            "test/loss was never a number and has not been better in 2 evaluation(s) since",
        ]

    def test_infinity_is_worse_than_any_number(self) -> None:
        assert improved(decisions(patience=9), math.inf, 1e30, math.inf) == [True, True, False]


class TestPatience:
    def test_it_stops_after_so_many_evaluations_in_a_row_that_were_not_better(self) -> None:
        made = decisions(patience=2)
        assert stops(made, 3.0, 4.0, 2.0, 2.0, 5.0) == [False, False, False, False, True]
        assert made.best == Best("test/loss", 2.0, 30, 3)

    def test_the_reason_names_the_best_step(self) -> None:
        (_, last) = after(decisions(patience=1), 3.0, 3.0)
        assert last.stop == "test/loss was best at step 10 and has not been better in 1 evaluation(s) since"

    def test_without_patience_it_never_stops(self) -> None:
        assert not any(stops(decisions(restore_best=True), *[1.0] * 20))

    def test_it_looks_at_the_loss_over_the_rows_of_all_ranks(self) -> None:
        # Rank 0 has one row, whose loss falls: 5, 4, 3, 2; rank 1 three rows of loss 1, 2, 3, 4. Over all rows:
        # (5 + 3)/4 = 2, (4 + 6)/4 = 2.5, 3, 3.5. Rank 0 alone would never stop; the mean of the two is always 3.
        with STRATEGY.scope():
            totals = MetricTotals({})
        made = decisions(patience=1)
        losses, told = [], []
        for i, (mine, theirs) in enumerate(zip((5, 4, 3, 2), (1, 2, 3, 4), strict=True), 1):
            of_ranks = [
                [
                    t.numpy()
                    for t in totals.added(None, None, np.full(rows, loss, np.float32), np.ones(rows, np.float32), None)
                ]
                for rows, loss in ((1, mine), (3, theirs))
            ]
            metrics = {"test": totals.results([a + b for a, b in zip(*of_ranks, strict=True)])}
            losses.append(metrics["test"]["loss"])
            told.append(made.after(i, i, metrics).stop)
        assert losses == [2.0, 2.5, 3.0, 3.5]
        assert [stop is not None for stop in told] == [False, True, True, True]
        assert made.best == Best("test/loss", 2.0, 1, 1)


class TestPlateau:
    def test_each_plateau_reduces_once_and_begins_anew(self) -> None:
        made = decisions(plateau_patience=2)
        assert reductions(made, 3.0, 3.0, 3.0, 3.0, 3.0, 2.0, 3.0, 3.0) == [
            False, False, True, False, True, False, False, True,
        ]  # fmt: skip
        assert not any(stops(made, *[3.0] * 9)), "it does not stop"

    def test_both_patiences_count_by_themselves(self) -> None:
        told = after(decisions(patience=3, plateau_patience=2), 1.0, 2.0, 2.0, 2.0)
        assert [(d.reduce_learning_rate, d.stop is not None) for d in told] == [
            (False, False),
            (False, False),
            (True, False),
            (False, True),
        ]


class TestMonitor:
    @pytest.mark.parametrize(
        "name",
        [
            "loss",
            "val_loss",
            "mean_squared_error",
            "MeanAbsoluteError",
            "kl_divergence",
            "Perplexity",
            "mask/loss",
            "mse",
            "val_mae",
            "RMSE",
            "CategoricalCrossentropy",
        ],
    )
    def test_names_of_which_less_is_better(self, name: str) -> None:
        assert improved(decisions(monitor=f"test/{name}"), 2.0, 1.0, 1.5, name=name) == [True, True, False]

    @pytest.mark.parametrize(
        "name",
        [
            "accuracy",
            "SparseCategoricalAccuracy",
            "top_5_acc",
            "AUC",
            "Precision",
            "recall",
            "f1",
            "MeanIoU",
            "cosine_similarity",
            "r2_score",
        ],
    )
    def test_names_of_which_more_is_better(self, name: str) -> None:
        assert improved(decisions(monitor=f"test/{name}"), 1.0, 2.0, 1.5, name=name) == [True, True, False]

    def test_other_names_need_the_mode(self) -> None:
        made = decisions(monitor="test/rows")
        with pytest.raises(UsageError) as caught:
            made.check({"test": {"loss": 0.0, "rows": 0.0}})
        assert str(caught.value) == (
            "monitor='test/rows' does not tell whether less is better. Set monitor_mode to min or max."
        )
        for mode, right in (("min", [True, True, False]), ("max", [True, False, False])):
            made = decisions(monitor="test/rows", monitor_mode=mode)
            made.check({"test": {"loss": 0.0, "rows": 0.0}})
            assert improved(made, 2.0, 1.0, 1.5, name="rows") == right

    @pytest.mark.parametrize("name", ["interrater", "x_score", "accurate", "lossy", "err"])
    def test_a_word_tells_only_by_its_end(self, name: str) -> None:
        with pytest.raises(UsageError, match="Set monitor_mode to min or max"):
            decisions(monitor=f"test/{name}").check({"test": {name: 0.0}})
        decisions(monitor=f"test/{name}", monitor_mode="max").check({"test": {name: 0.0}})

    def test_the_mode_overrules_the_name(self) -> None:
        assert improved(decisions(patience=1, monitor_mode="max"), 1.0, 2.0) == [True, True]

    def test_unset_it_is_the_loss_of_the_first_split(self) -> None:
        made = decisions("valid", "test", patience=1)
        made.after(1, 1, {"test": {"loss": 1.0}, "valid": {"loss": 2.0}})
        assert made.best == Best("valid/loss", 2.0, 1, 1)

    @pytest.mark.parametrize("monitor", ["test/acuracy", "train/loss", "loss", "test"])
    def test_what_is_not_there_is_refused_with_what_there_is(self, monitor: str) -> None:
        made = decisions("valid", "test", monitor=monitor, monitor_mode="min")
        with pytest.raises(UsageError) as caught:
            made.check({"valid": {"loss": 0.0}, "test": {"loss": 0.0, "accuracy": 0.0}})
        assert str(caught.value) == (
            f"monitor={monitor!r} is not a number that is evaluated. There are valid/loss, test/loss, test/accuracy."
        )

    def test_a_metric_of_several_numbers_is_refused(self) -> None:
        made = decisions(monitor="test/f1")
        with pytest.raises(UsageError, match="monitor='test/f1' is not a number"):
            made.check({"test": {"f1": [0.0, 0.0]}})
        with pytest.raises(UsageError, match="monitor='test/f1' is not a number"):
            made.after(1, 1, {"test": {"f1": [0.5, 1.0]}})  # type: ignore[dict-item]

    @pytest.mark.parametrize(
        "settings",
        [{"patience": 1}, {"plateau_patience": 1}, {"restore_best": True}, {"monitor": "test/loss"}],
        ids=str,
    )
    def test_without_evaluation_there_is_nothing_to_decide_on(self, settings: dict[str, Any]) -> None:
        assert decisions(**settings).active
        with pytest.raises(
            UsageError, match=r"the task evaluates nothing \(Task\.evaluation_splits\)\. Leave them out"
        ):
            Decisions(Settings.of(**settings), Alone(), ())
        quiet = Decisions(Settings(), Alone(), ())
        assert not quiet.active
        quiet.check({})


@dataclasses.dataclass(kw_only=True)
class Judged(ToyLine):
    """`ToyLine` towards 3 with a test split of target 1.5: w is 1.4, 1.72, 1.976 and the loss 0.01, 0.0484, 0.2266."""

    targets: list[float] = dataclasses.field(default_factory=lambda: [3.0])

    def evaluation_splits(self) -> tuple[str, ...]:
        return ("test",)

    def dataset(self, split: str) -> Any:
        inputs, labels = super().dataset(split)
        return inputs, labels if split == "train" else np.array([1.5], np.float32)

    def metrics(self) -> dict[str, keras.metrics.Metric]:
        return {"error": keras.metrics.MeanAbsoluteError()}


class TestThroughTheTrainer:
    def test_it_stops_early_with_the_best_weights_and_averages(self) -> None:
        # With an average of momentum 0.5: e = 1.4 and 1.56, whose loss 0.0036 is better than 0.01; then
        # (1.56 + 1.976)/2 = 1.768, loss 0.0718.
        made = trainer(Judged(), epochs=9, patience=1, restore_best=True, ema=0.5)
        report = made.fit()
        assert report.steps == 3
        assert report.stopped == "test/loss was best at step 2 and has not been better in 1 evaluation(s) since"
        assert report.best == {"monitor": "test/loss", "value": pytest.approx(0.0036, rel=1e-4), "step": 2, "epoch": 2}
        assert made.model.get_weights() == [[[pytest.approx(1.72)]]]
        assert made.evaluate("test")["loss"] == pytest.approx(0.0036, rel=1e-4)

    def test_without_restore_best_the_last_weights_stay(self) -> None:
        made = trainer(Judged(), epochs=9, patience=1, monitor="test/error")
        report = made.fit()
        assert (report.steps, report.best["step"]) == (2, 1)
        assert report.best["value"] == pytest.approx(0.1)
        assert made.model.get_weights() == [[[pytest.approx(1.72)]]]

    def test_patience_that_ends_with_the_run_does_not_stop_it_early(self) -> None:
        report = trainer(Judged(), epochs=2, patience=1).fit()
        assert (report.steps, report.stopped) == (2, None)

    def test_a_metric_of_several_numbers_is_found_before_training(self) -> None:
        class Classes(ToyNet):
            def dataset(self, split: str) -> Any:
                inputs, labels = super().dataset(split)
                return inputs, np.eye(3, dtype=np.float32)[labels]

            def losses(self, labels: Any, predictions: Any) -> Any:
                return keras.losses.categorical_crossentropy(labels, predictions, from_logits=True)

            def metrics(self) -> dict[str, keras.metrics.Metric]:
                return {"f1": keras.metrics.F1Score(average=None)}

        made = trainer(Classes(), monitor="test/f1")
        with pytest.raises(UsageError, match=r"monitor='test/f1' is not a number that is evaluated"):
            made.fit()
        assert made.step == 0

    def test_what_is_not_there_is_found_before_training(self) -> None:
        made = trainer(Judged(), monitor="test/acc")
        with pytest.raises(UsageError, match=r"monitor='test/acc'.*There are test/loss, test/error\."):
            made.fit()
        assert made.step == 0
