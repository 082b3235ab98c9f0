"""Random numbers of a step: other ones for each replica, step and use; only such as repeat on every backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.toy import ToyLine
from tests.unit.one_device import STRATEGY, trainer
from tfdist import Settings, UsageError
from tfdist.training.local import LocalStep
from tfdist.training.randomness import is_seed, moved_on, refuse_stateful, seed_of_replica


def generator(seed: int = 7) -> keras.random.SeedGenerator:
    with STRATEGY.scope():
        return keras.random.SeedGenerator(seed)


class TestSeeds:
    def test_what_a_seed_is(self) -> None:
        with STRATEGY.scope():
            dropout = keras.layers.Dropout(0.5, seed=1)
            batch_norm = keras.layers.BatchNormalization()
            batch_norm.build((None, 2))
        assert [is_seed(v) for v in dropout.variables] == [True]
        assert not any(is_seed(v) for v in batch_norm.variables)

    def test_each_replica_draws_from_its_own_seed(self) -> None:
        # The seed plus rank · 0x9E3779B9, without the 33rd bit where layers draw; the counter is that of all.
        state = generator().state
        state.assign([7, 3])
        drawn = [seed_of_replica(state, tf.constant(rank)).numpy().tolist() for rank in range(3)]
        assert drawn == [[7, 3], [7 + 0x9E3779B9, 3], [7 + 2 * 0x9E3779B9, 3]]

    def test_seeds_that_people_choose_do_not_meet_on_other_replicas(self) -> None:
        state = generator().state
        seen = set()
        for seed in range(20):
            state.assign([seed, 0])
            seen |= {int(seed_of_replica(state, tf.constant(rank))[0]) % 2**32 for rank in range(20)}
        assert len(seen) == 400

    def test_the_counter_moves_on_and_the_seed_stays_that_of_all(self) -> None:
        state = generator().state
        mine = seed_of_replica(state, tf.constant(2))
        assert moved_on(state, mine + tf.constant([0, 5], mine.dtype)).numpy().tolist() == [7, 5]


@dataclasses.dataclass(kw_only=True)
class Drawing(ToyLine):
    """`ToyLine` with dropout, whose step is a function of (task, replica, batch)."""

    step: Callable[[Any, Any, Any], None] | None = None

    def build_model(self) -> keras.Model:
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        return keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5, seed=1), dense])

    def dataset(self, split: str) -> Any:
        return np.ones((4, 64), np.float32), np.zeros(4, np.float32)

    def train_step(self, replica: Any, batch: Any) -> None:
        if self.step is not None:
            self.step(self, replica, batch)
        super().train_step(replica, batch)


def masks(replica: int, places: list[int]) -> tuple[list[Any], list[int]]:
    """Which inputs a replica's dropout keeps in steps one after the other, and the generator's state after them."""
    task = Drawing()
    with STRATEGY.scope():
        model = task.build_model()
    local = LocalStep(task, model, ["optimizer"], Settings(), pieces=1)
    batch = tuple(map(tf.constant, task.dataset("train")))
    kept = []
    (state,) = (v for v in model.variables if is_seed(v))
    for place in places:
        sums = local(batch, replica=tf.constant(replica), place=tf.constant(place, tf.int64), factor=None, state=[])
        kept.append((sums.gradients[0].numpy() != 0).tolist())
        state.assign(moved_on(state, sums.state[0]))
    return kept, state.numpy().tolist()


class TestLayers:
    def test_masks_differ_between_steps_and_replicas_and_repeat(self) -> None:
        first, state = masks(0, [0, 1])
        second, other_state = masks(1, [0, 1])
        assert first[0] != first[1]
        assert first[0] != second[0]
        assert first[1] != second[1]
        assert masks(0, [0, 1])[0] == first
        assert state == other_state, "what is stored is alike on all replicas"
        assert state[0] == 1
        assert state[1] > 0

    def test_a_replica_without_rows_keeps_step_with_the_others(self) -> None:
        task = Drawing()
        with STRATEGY.scope():
            model = task.build_model()
        local = LocalStep(task, model, ["optimizer"], Settings(), pieces=1)
        ends = []
        for rows in (4, 0):
            batch = tuple(tf.constant(array[:rows]) for array in task.dataset("train"))
            place = {"replica": tf.constant(3), "place": tf.constant(0, tf.int64)}
            ends.append(local(batch, **place, factor=None, state=[]))
        full, empty = ends
        assert empty.gradients[0].numpy().tolist() == [[0.0]] * 64
        assert empty.tally.numpy().tolist() == [0.0] * local.layout.length
        assert empty.state[0].numpy().tolist() == full.state[0].numpy().tolist()
        assert int(full.state[0][1]) > 0


STATEFUL: dict[str, Callable[[], Any]] = {
    "RandomStandardNormal": lambda: tf.random.normal([2]),
    "RandomUniform": lambda: tf.nn.dropout(tf.ones([2]), 0.5),
    "RandomUniformInt": lambda: tf.random.uniform([2], maxval=3, dtype=tf.int32),
    "RandomShuffle": lambda: tf.random.shuffle([1.0, 2.0]),
    "TruncatedNormal": lambda: tf.random.truncated_normal([2]),
    "Multinomial": lambda: tf.random.categorical([[0.0, 0.0]], 1),
    "RandomGamma": lambda: tf.random.gamma([2], 1.0),
    "RandomPoissonV2": lambda: tf.random.poisson([2], 1.0),
    "LogUniformCandidateSampler": lambda: tf.random.log_uniform_candidate_sampler([[0]], 1, 1, True, 3)[0],
}


def graph(draw: Callable[[], Any]) -> tf.Graph:
    """A loop whose body draws, as the training loop is."""

    def loop() -> Any:
        return tf.while_loop(lambda i: i < 2, lambda i: (i + tf.cast(tf.size(draw()), tf.int32),), (tf.constant(0),))

    return tf.function(loop).get_concrete_function().graph


class TestStatefulOperations:
    @pytest.mark.parametrize("name", STATEFUL)
    def test_they_are_refused_by_name_with_the_way_out(self, name: str) -> None:
        with pytest.raises(UsageError) as caught:
            refuse_stateful(graph(STATEFUL[name]), "train_step", "Do otherwise.")
        message = str(caught.value)
        assert message.startswith(f"train_step draws random numbers with TensorFlow's stateful {name} (")
        assert message.endswith("Do otherwise.")

    def test_all_that_are_there_are_named(self) -> None:
        with pytest.raises(UsageError, match="stateful RandomStandardNormal, RandomUniform "):
            refuse_stateful(graph(lambda: tf.random.uniform([1]) + tf.random.normal([1])), "train_step", "")

    def test_those_with_a_generator_of_tensorflow_are_refused(self) -> None:
        made = tf.random.Generator.from_seed(1)
        with pytest.raises(UsageError, match="RngReadAndSkip"):
            refuse_stateful(graph(lambda: made.normal([2])), "train_step", "")

    def test_stateless_ones_pass(self) -> None:
        refuse_stateful(graph(lambda: tf.random.stateless_normal([2], [1, 2])), "train_step", "")
        refuse_stateful(graph(lambda: keras.random.shuffle([1.0, 2.0], seed=1)), "train_step", "")

    def test_a_training_step_is_refused_before_it_runs(self) -> None:
        made = trainer(Drawing(step=lambda task, replica, batch: tf.random.normal([2])))
        with pytest.raises(UsageError, match=r"^train_step draws random numbers with .* RandomStandardNormal"):
            made.fit()
        assert made.step == 0

    def test_an_augmentation_is_refused_before_anything_runs(self) -> None:
        class Augmenting(ToyLine):
            def augment(self, example: Any, seed: Any) -> Any:
                return example[0], example[1] + tf.random.normal([])

        with pytest.raises(UsageError, match=r"^Task\.augment draws random numbers .* RandomStandardNormal"):
            trainer(Augmenting()).fit()

    def test_keras_random_without_a_generator_is_refused(self) -> None:
        made = trainer(Drawing(step=lambda task, replica, batch: keras.random.normal([2])))
        with pytest.raises(UsageError, match=r"the global seed of keras\.random.*own keras\.random\.SeedGenerator"):
            made.fit()

    def test_draws_with_the_replicas_seed_pass(self) -> None:
        def step(task: Any, replica: Any, batch: Any) -> None:
            tf.random.stateless_normal([2], replica.seed())

        assert trainer(Drawing(step=step)).fit().steps == 1
