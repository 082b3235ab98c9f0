"""Several global batches in one step: as one large batch, with what layers write carried on from batch to batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.toy import ToyLine
from tests.unit.one_device import trainer
from tfdist.evidence.tasks import Line, Normalized


def weight(made: Any) -> float:
    return float(made.model.trainable_variables[0].numpy().ravel()[0])


def fit(task: Any, **settings: Any) -> tuple[Any, Any]:
    made = trainer(task, shuffle_buffer=0, accumulate=2, **settings)
    return made, made.fit()


def test_two_batches_make_one_step_in_which_each_row_counts_alike() -> None:
    # Targets 0, 1 and 5: mean 2, w = 1 + 0.2·(2 − 1); the mean of the batches' means would be 2.75.
    made, report = fit(ToyLine(targets=[0, 1, 5], global_batch_size=2))
    assert weight(made) == pytest.approx(1.2)
    assert report.losses == [pytest.approx(17 / 3)]
    assert (report.steps, report.examples_seen, int(made.optimizer.iterations)) == (1, 3, 1)


def test_weights_add_up_over_the_batches() -> None:
    # Weights 0, 0 and 1, 3 of targets 9, 9 and 1, 3: mean 10/4 = 2.5, loss (0 + 3·4)/4.
    made, report = fit(ToyLine(targets=[9, 9, 1, 3], weights=[0, 0, 1, 3], global_batch_size=2))
    assert weight(made) == pytest.approx(1.3)
    assert report.losses == [3.0]


def test_penalties_enter_once() -> None:
    # Data gradient 2·(1 − 1.5) = −1; the penalties 0.25·w² on the weight and on the output have the gradient 0.5 each.
    made, report = fit(Line(global_batch_size=2, l2=0.25, activity=0.25))
    assert weight(made) == pytest.approx(1.0)
    assert report.penalties == [pytest.approx(0.5)]


def test_the_last_step_of_an_epoch_has_what_is_left() -> None:
    # Batches 0 1 | 2 3 | 4 in twos, two epochs: mean 1.5, then 4. w = 1.1, 1.68, 1.644, 2.1152.
    made, report = fit(ToyLine(targets=[0, 1, 2, 3, 4], global_batch_size=2), epochs=2, steps_per_chunk=3)
    assert weight(made) == pytest.approx(2.1152)
    assert (report.steps, report.examples_seen, report.traces["train"]) == (4, 10, 1)


@pytest.mark.parametrize("settings", [{"steps": 5}, {"epochs": 2}], ids=str)
def test_a_dataset_of_unknown_size_is_as_one_of_a_known(settings: dict[str, int]) -> None:
    # Batches 0 1 | 2 3 | 4 in twos: steps of 4 rows and of 1.
    class Filtered(ToyLine):
        def dataset(self, split: str) -> Any:
            rows = tf.data.Dataset.from_tensor_slices(super().dataset(split)).filter(lambda *_: True)
            assert rows.cardinality() == tf.data.UNKNOWN_CARDINALITY
            return rows

    (known, right), (unknown, got) = (fit(kind(targets=[0, 1, 2, 3, 4], global_batch_size=2), **settings)
                                      for kind in (ToyLine, Filtered))  # fmt: skip
    assert weight(unknown) == weight(known)
    assert (got.losses, got.steps, got.examples_seen) == (right.losses, right.steps, right.examples_seen)
    assert unknown.evaluate("train") == known.evaluate("train")


def test_what_was_not_counted_for_training_is_counted_for_evaluation() -> None:
    class Filtered(ToyLine):
        def dataset(self, split: str) -> Any:
            return tf.data.Dataset.from_tensor_slices(super().dataset(split)).filter(lambda *_: True)

    made = trainer(Filtered(targets=[1, 1, 1]), steps=2)
    made.fit()
    assert made.evaluate("train") == {"loss": 0}


def test_a_batch_that_is_not_finite_costs_its_step_and_no_other() -> None:
    # Step 1 has NaN in its second batch and is skipped; step 2 has targets 2 and 3, 2 and 3.
    task = ToyLine(targets=[0, 1, np.nan, 3, 2, 3, 2, 3], global_batch_size=2)
    made, report = fit(task, nan_policy="skip")
    assert report.skipped_steps == 1
    assert weight(made) == pytest.approx(1.3)


def test_statistics_go_on_from_batch_to_batch() -> None:
    # Inputs 1, 3 and 5, 7 have the means 2 and 6. With momentum 0.5, from 0: 1, then 3.5. Variances 1 and 1, from 1.
    made, _ = fit(Normalized(inputs=(1.0, 3.0, 5.0, 7.0), global_batch_size=2))
    mean, variance = (v.numpy().tolist() for v in made.model.non_trainable_variables)
    assert (mean, variance) == ([pytest.approx(3.5)], [pytest.approx(1)])


class Drops(ToyLine):
    """Dropout on 64 ones, times 64 weights; the loss is the sum, so that the gradient is the mask."""

    def build_model(self) -> keras.Model:
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        return keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5, seed=1), dense])

    def dataset(self, split: str) -> Any:
        return np.ones((2, 64), np.float32), np.zeros(2, np.float32)

    def losses(self, labels: Any, predictions: Any) -> Any:
        return predictions[:, 0]


def test_each_batch_draws_its_own_random_numbers() -> None:
    # One row in each of two batches: a weight that both masks keep goes down by 0.1·2, by one 0.1, by none 0.
    made, _ = fit(Drops(global_batch_size=1))
    lost = {round(1 - float(w), 4) for w in made.model.trainable_variables[0].numpy().ravel()}
    assert lost == {0.0, 0.1, 0.2}
    assert made.model.non_trainable_variables[0].numpy().tolist() == [1, 2], "one draw for each batch"
