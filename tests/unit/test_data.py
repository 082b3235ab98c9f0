"""From examples to global batches, and to the replicas' pieces of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.unit.one_device import STRATEGY
from tfdist import Task, UsageError
from tfdist.cluster.causes import unwrapped
from tfdist.training.data import Examples, _piece, load_examples


@dataclasses.dataclass(kw_only=True)
class Source(Task):
    """A task of which only the dataset counts."""

    make: Callable[[str], Any] = dataclasses.field(default=lambda split: None)

    def dataset(self, split: str) -> Any:
        return self.make(split)


class AnyStructure(Source):
    def train_step(self, replica: Any, batch: Any) -> None:
        raise NotImplementedError


class InputOnly:
    """Stands where the data meets a strategy and asks for one input pipeline, as TensorFlow's strategies do.

    Iterating gives the pieces of this pipeline's replicas in turn.
    """

    def __init__(self, replicas: int, pipelines: int, pipeline: int) -> None:
        self._context = tf.distribute.InputContext(pipelines, pipeline, replicas)

    def distribute_datasets_from_function(self, function: Callable[[Any], tf.data.Dataset]) -> tf.data.Dataset:
        return function(self._context)


def load(task: Task, split: str, *, count: bool = True) -> Examples:
    return load_examples(task, split, count=count, notice=lambda message: None)


def numbers(count: int) -> Examples:
    return load(AnyStructure(make=lambda split: tf.data.Dataset.range(count)), "train")


def take(batches: Iterator[Any], count: int) -> list[Any]:
    return [tf.nest.map_structure(lambda t: t.numpy().tolist(), batch) for batch in itertools.islice(batches, count)]


def order(examples: Examples, steps: int, *, seed: int = 0, buffer: int = 100, size: int = 4) -> list[list[int]]:
    batches = examples.training_batches(STRATEGY, global_batch_size=size, seed=seed, shuffle_buffer=buffer)
    return take(batches, steps)


def flat(batches: list[list[int]]) -> list[int]:
    return [i for batch in batches for i in batch]


class TestPieces:
    @pytest.mark.parametrize("replicas", range(1, 6))
    @pytest.mark.parametrize("rows", range(10))
    def test_pieces_are_contiguous_and_of_nearly_equal_size(self, rows: int, replicas: int) -> None:
        batch = {"a": tf.range(rows), "b": (tf.range(rows) * 10, tf.zeros([rows, 2]))}
        pieces = [_piece(batch, replica, replicas, replicas)[0] for replica in range(replicas)]
        sizes = [len(piece["a"]) for piece in pieces]
        assert sizes == [rows // replicas + (replica < rows % replicas) for replica in range(replicas)]
        assert np.concatenate([piece["a"] for piece in pieces]).tolist() == list(range(rows))
        assert np.concatenate([piece["b"][0] for piece in pieces]).tolist() == list(range(0, 10 * rows, 10))
        assert [piece["b"][1].shape.as_list() for piece in pieces] == [[size, 2] for size in sizes]

    @pytest.mark.parametrize(("replicas", "pipelines"), [(1, 1), (3, 1), (3, 3), (4, 2), (4, 4)])
    def test_every_layout_of_pipelines_gives_the_same_pieces(self, replicas: int, pipelines: int) -> None:
        # 10 rows in batches of 7: 7 and 3, and again.
        want = [
            np.array_split(np.arange(*ends), replicas)  # numpy has the same rule
            for ends in ((0, 7), (7, 10), (0, 7), (7, 10))
        ]
        here = replicas // pipelines
        for pipeline in range(pipelines):
            source = InputOnly(replicas, pipelines, pipeline)
            got = take(numbers(10).evaluation_batches(source, global_batch_size=7), 4 * here)  # type: ignore[arg-type]
            mine = range(pipeline * here, (pipeline + 1) * here)
            assert got == [step[replica].tolist() for step in want for replica in mine]

    def test_the_training_batches_are_cut_alike(self) -> None:
        whole = order(numbers(10), 6)
        for replicas in (2, 5):
            parts = []
            for pipeline in range(replicas):
                source: Any = InputOnly(replicas, replicas, pipeline)
                batches = numbers(10).training_batches(source, global_batch_size=4, seed=0, shuffle_buffer=100)
                parts.append(take(batches, 6))
            assert [flat(list(pieces)) for pieces in zip(*parts, strict=True)] == whole

    def test_the_dataset_never_ends_for_tensorflow(self) -> None:
        for replicas in (1, 2):
            seen: list[tf.data.Dataset] = []

            class Keeps(InputOnly):
                def distribute_datasets_from_function(self, function: Any) -> Any:
                    seen.append(super().distribute_datasets_from_function(function))  # noqa: B023
                    return seen[-1]  # noqa: B023

            numbers(10).evaluation_batches(Keeps(replicas, 1, 0), global_batch_size=4)  # type: ignore[arg-type]
            assert seen[0].cardinality() == tf.data.INFINITE_CARDINALITY


class TestEpochs:
    def test_without_a_buffer_the_order_is_that_of_the_dataset(self) -> None:
        assert order(numbers(5), 4, buffer=0, size=3) == [[0, 1, 2], [3, 4], [0, 1, 2], [3, 4]]

    def test_batches_never_cross_an_epoch(self) -> None:
        batches = order(numbers(10), 12)
        assert [len(batch) for batch in batches] == [4, 4, 2] * 4
        for epoch in range(4):
            assert sorted(flat(batches[3 * epoch : 3 * epoch + 3])) == list(range(10))

    def test_epochs_differ_in_order(self) -> None:
        batches = order(numbers(10), 12)
        epochs = [tuple(flat(batches[i : i + 3])) for i in range(0, 12, 3)]
        assert len(set(epochs)) == 4
        assert tuple(range(10)) not in epochs

    def test_a_batch_may_hold_more_than_all(self) -> None:
        assert [sorted(batch) for batch in order(numbers(3), 2, size=8)] == [[0, 1, 2]] * 2

    def test_equal_seeds_give_equal_orders_and_others_other_ones(self) -> None:
        # 0 is TensorFlow's own word for "no seed".
        orders = [order(numbers(10), 6, seed=seed) for seed in (0, 1, 2, 3, 2**31 - 1, 0)]
        assert orders[-1] == orders[0]
        assert len({str(o) for o in orders[:-2]}) == 4

    def test_large_seeds_differ_from_small_ones(self) -> None:
        assert order(numbers(10), 3, seed=2**31) != order(numbers(10), 3, seed=1)

    def test_every_seed_can_be_used(self) -> None:
        order(numbers(10), 3, seed=2**31 - 2)

    @pytest.mark.parametrize("user", [None, 0, 1, 12345])
    def test_the_global_seed_of_the_user_does_not_count(self, user: int | None) -> None:
        tf.random.set_seed(99)
        want = order(numbers(10), 6, seed=3)
        if user is None:
            tf.random.uniform([])
        else:
            tf.random.set_seed(user)
        assert order(numbers(10), 6, seed=3) == want

    def test_a_small_buffer_mixes_near_examples_only(self) -> None:
        first = flat(order(numbers(100), 25, buffer=5))
        assert sorted(first) == list(range(100))
        assert first != list(range(100))
        assert all(value < place + 5 for place, value in enumerate(first))

    def test_evaluation_keeps_the_order_and_starts_again(self) -> None:
        batches = numbers(5).evaluation_batches(STRATEGY, global_batch_size=2)
        assert take(batches, 6) == [[0, 1], [2, 3], [4]] * 2

    @pytest.mark.parametrize(("rows", "size", "steps"), [(1, 4, 1), (4, 4, 1), (5, 4, 2), (8, 4, 2), (9, 1, 9)])
    def test_steps_per_epoch(self, rows: int, size: int, steps: int) -> None:
        assert numbers(rows).steps_per_epoch(size) == steps


Pair = namedtuple("Pair", ["left", "right"])
ROWS = np.arange(3, dtype=np.float32)


def numbered(
    examples: Examples, *, epochs: int | None, seed: int = 0, buffer: int = 100, size: int = 4, augment: Any = None
) -> list[tuple[int, list[int]]]:
    batches = examples.numbered_batches(
        global_batch_size=size, seed=seed, shuffle_buffer=buffer, epochs=epochs, augment=augment
    )
    return take(iter(batches), 20)


class TestNumberedBatches:
    def test_batches_are_full_and_cross_epochs(self) -> None:
        assert numbered(numbers(5), epochs=2, buffer=0, size=3) == [
            (0, [0, 1, 2]),
            (1, [3, 4, 0]),
            (2, [1, 2, 3]),
            (3, [4]),
        ]

    def test_without_epochs_there_is_no_end(self) -> None:
        batches = numbered(numbers(5), epochs=None, buffer=0, size=3)
        assert [number for number, _ in batches] == list(range(20))
        assert flat([batch for _, batch in batches]) == [i % 5 for i in range(60)]

    @pytest.mark.parametrize(("buffer", "seed"), [(100, 0), (3, 7)])
    def test_examples_come_in_the_order_of_all_backends(self, buffer: int, seed: int) -> None:
        batches = numbered(numbers(10), epochs=4, buffer=buffer, seed=seed)
        want = flat(order(numbers(10), 12, buffer=buffer, seed=seed))
        assert flat([batch for _, batch in batches]) == want

    def test_two_that_read_get_the_same(self) -> None:
        """As workers do, whatever TensorFlow's global seed is there."""
        first = numbered(numbers(10), epochs=2)
        tf.random.set_seed(5)
        assert numbered(numbers(10), epochs=2) == first

    def test_an_example_is_changed_by_its_place_in_the_run(self) -> None:
        def change(example: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
            return example * 1000 + tf.random.stateless_uniform([], seed, maxval=1000, dtype=tf.int64)

        batches = numbers(10).training_batches(
            STRATEGY, global_batch_size=4, seed=3, shuffle_buffer=100, augment=change
        )
        want = flat(take(batches, 6))
        got = flat([batch for _, batch in numbered(numbers(10), epochs=2, seed=3, augment=change)])
        assert got == want
        assert len(set(got)) == 20, "each draws its own"

    def test_structures_stay(self) -> None:
        pairs = tf.data.Dataset.range(3).map(lambda i: {"a": i, "b": (i, i)})
        examples = load(AnyStructure(make=lambda split: pairs), "train")
        (number, batch), *_ = iter(examples.numbered_batches(global_batch_size=2, seed=0, shuffle_buffer=0, epochs=1))
        assert int(number) == 0
        assert tf.nest.map_structure(lambda t: t.numpy().tolist(), batch) == {"a": [0, 1], "b": ([0, 1], [0, 1])}

    @pytest.mark.parametrize("tuned", [True, False])
    def test_pipelines_of_arrays_are_not_tuned(self, tuned: bool) -> None:
        examples = dataclasses.replace(numbers(3), tuned=tuned)
        batches = examples.numbered_batches(global_batch_size=2, seed=0, shuffle_buffer=0, epochs=1)
        assert batches.options().autotune.enabled is tuned


class TestStructures:
    """An element of the task comes to its step as it went in, with one more axis."""

    @pytest.mark.parametrize(
        "element",
        [
            pytest.param(ROWS, id="one tensor"),
            pytest.param({"a": ROWS, "b": {"c": ROWS}}, id="dict"),
            pytest.param((ROWS, ROWS), id="pair"),
            pytest.param(({"a": ROWS, "b": (ROWS, ROWS)}, ROWS, ROWS), id="nested"),
            pytest.param(({"a": ROWS},), id="tuple of one dict"),
            pytest.param((ROWS,), id="tuple of one"),
            pytest.param(Pair(ROWS, ROWS), id="named tuple"),
        ],
    )
    @pytest.mark.parametrize("replicas", [1, 2])
    def test_structures_are_kept(self, element: Any, replicas: int) -> None:
        examples = load(AnyStructure(make=lambda split: element), "train")
        assert examples.size == 3
        source: Any = InputOnly(replicas, replicas, 0)
        rows = 3 if replicas == 1 else 2  # the first of two replicas has one more
        for batches in (
            examples.evaluation_batches(source, global_batch_size=3),
            examples.training_batches(source, global_batch_size=3, seed=0, shuffle_buffer=0),
        ):
            (got,) = take(iter(batches), 1)
            want = tf.nest.map_structure(lambda array: array[:rows].tolist(), element)
            assert got == want
            assert type(got) is type(want)

    def test_arrays_of_any_kind(self) -> None:
        for arrays in (
            (ROWS, ROWS),
            (tf.constant(ROWS), ROWS.tolist()),
            tf.data.Dataset.from_tensor_slices((ROWS,) * 2),
        ):
            examples = load(Source(make=lambda split, arrays=arrays: arrays), "train")
            assert take(examples.evaluation_batches(STRATEGY, global_batch_size=2), 2) == [
                ([0.0, 1.0], [0.0, 1.0]),
                ([2.0], [2.0]),
            ]

    def test_the_split_reaches_the_task(self) -> None:
        examples = load(Source(make=lambda split: (ROWS, [split] * 3)), "valid")
        assert examples.split == "valid"
        assert take(examples.evaluation_batches(STRATEGY, global_batch_size=1), 1) == [([0.0], [b"valid"])]


def augmented(
    augment: Callable[[Any, tf.Tensor], Any],
    steps: int,
    *,
    element: Any = ROWS,
    strategy: Any = STRATEGY,
    **changes: Any,
) -> list[Any]:
    """What training gets of `element` in batches of 2, in the dataset's order."""
    examples = load(AnyStructure(make=lambda split: element), "train")
    settings = {"global_batch_size": 2, "seed": 0, "shuffle_buffer": 0, **changes}
    return take(iter(examples.training_batches(strategy, augment=augment, **settings)), steps)


def draw(example: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """The example, and behind the point a number from the seed."""
    return example + tf.random.stateless_uniform([], seed, maxval=0.99)


class TestAugmentation:
    def test_each_example_is_changed_by_itself(self) -> None:
        def double(example: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
            assert example.shape == ()
            assert seed.shape == (2,)
            return 2 * example

        assert augmented(double, 4) == [[0, 2], [4], [0, 2], [4]]

    def test_seeds_differ_by_example_and_epoch_and_repeat_from_the_runs_seed(self) -> None:
        first = flat(augmented(draw, 4))
        assert [int(value) for value in first] == [0, 1, 2] * 2
        assert len({round(value % 1, 4) for value in first}) == 6
        assert flat(augmented(draw, 4)) == first
        other = flat(augmented(draw, 4, seed=1))
        assert all(a != b for a, b in zip(first, other, strict=True))

    def test_seeds_do_not_depend_on_the_batch_or_the_replicas(self) -> None:
        batches = augmented(draw, 4)
        assert flat(augmented(draw, 2, global_batch_size=3)) == flat(batches)
        parts = [augmented(draw, 4, strategy=InputOnly(2, 2, pipeline)) for pipeline in range(2)]
        assert [flat(list(pieces)) for pieces in zip(*parts, strict=True)] == batches

    def test_the_order_is_the_same_as_without(self) -> None:
        examples = numbers(10)
        settings: dict[str, Any] = {"global_batch_size": 4, "seed": 3, "shuffle_buffer": 100}
        changed = examples.training_batches(STRATEGY, **settings, augment=lambda example, seed: example)
        assert take(changed, 6) == take(examples.training_batches(STRATEGY, **settings), 6)

    @pytest.mark.parametrize(
        "element", [{"a": ROWS, "b": (ROWS,)}, (ROWS, ROWS), (ROWS,), Pair(ROWS, ROWS)], ids=["dict", "2", "1", "named"]
    )
    def test_structures_are_kept(self, element: Any) -> None:
        def negative(example: Any, seed: tf.Tensor) -> Any:
            return tf.nest.map_structure(tf.negative, example)

        (got,) = augmented(negative, 1, element=element)
        want = tf.nest.map_structure(lambda array: (-array[:2]).tolist(), element)
        assert got == want
        assert type(got) is type(want)

    def test_sparse_and_ragged_examples(self) -> None:
        sparse = tf.sparse.from_dense(np.array([[1, 0], [0, 2], [3, 0]], np.float32))
        ragged = tf.ragged.constant([[1.0, 2.0], [3.0], []])
        dataset = tf.data.Dataset.from_tensor_slices((sparse, ragged))
        examples = load(AnyStructure(make=lambda split: dataset), "train")

        def double(example: Any, seed: tf.Tensor) -> Any:
            return example[0] * 2.0, example[1] * 2.0

        batches = examples.training_batches(STRATEGY, global_batch_size=3, seed=0, shuffle_buffer=0, augment=double)
        left, right = next(batches)
        assert tf.sparse.to_dense(left).numpy().tolist() == [[2, 0], [0, 4], [6, 0]]
        assert right.to_list() == [[2, 4], [6], []]

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda example, seed: (example, example),
            lambda example, seed: example[None],
            lambda example, seed: tf.cast(example, tf.float64),
            lambda example, seed: None,
            lambda example, seed: tf.sparse.from_dense(example[None]),
        ],
        ids=["structure", "shape", "dtype", "nothing", "sparse"],
    )
    def test_another_structure_shape_or_type_is_refused(self, wrong: Any) -> None:
        with pytest.raises(UsageError) as caught:
            augmented(wrong, 1)
        assert str(unwrapped(caught.value)).startswith("Task.augment must return an example of the structure, shapes")

    def test_another_dataset_can_be_read_after_an_error_in_augment(self) -> None:
        def fall(example: Any, seed: tf.Tensor) -> Any:
            raise RuntimeError("the sky is falling")

        with pytest.raises(RuntimeError, match="the sky is falling"):
            augmented(fall, 1)
        assert augmented(lambda example, seed: example, 1) == [[0, 1]]


class TestSizes:
    def test_an_endless_dataset(self) -> None:
        endless = load(AnyStructure(make=lambda split: tf.data.Dataset.range(3).repeat()), "train")
        assert endless.size is None
        assert order(endless, 3, buffer=0) == [[0, 1, 2, 0], [1, 2, 0, 1], [2, 0, 1, 2]]
        mixed = order(endless, 50, buffer=10)
        assert {len(batch) for batch in mixed} == {4}
        assert set(flat(mixed)) == {0, 1, 2}

    def test_a_generator_of_unknown_size_is_counted_where_the_number_is_needed(self) -> None:
        def generate() -> Iterator[tuple[int, int]]:
            yield from ((i, -i) for i in range(7))

        spec = (tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.int64))
        task = Source(make=lambda split: tf.data.Dataset.from_generator(generate, output_signature=spec))
        notices: list[str] = []
        counted = load_examples(task, "train", count=True, notice=notices.append)
        assert counted.size == 7
        assert len(notices) == 1
        assert notices[0].startswith("counting the examples of split 'train'")
        not_counted = load_examples(task, "train", count=False, notice=notices.append)
        assert not_counted.size is None
        assert len(notices) == 1
        for examples in (counted, not_counted):  # epochs end where the generator does, whether counted or not
            batches = take(examples.training_batches(STRATEGY, global_batch_size=4, seed=0, shuffle_buffer=100), 4)
            for epoch in (batches[:2], batches[2:]):
                assert sorted(flat([left for left, _ in epoch])) == list(range(7))
                assert all(a == -b for left, right in epoch for a, b in zip(left, right, strict=True))

    def test_whether_the_size_is_known(self) -> None:
        filtered = tf.data.Dataset.range(10).filter(lambda i: i % 3 == 0)
        for rows, count, right in (
            (filtered, False, (None, False)),
            (filtered, True, (4, True)),
            (tf.data.Dataset.range(3), False, (3, True)),
            (tf.data.Dataset.range(3).repeat(), False, (None, True)),
        ):
            examples = load(AnyStructure(make=lambda split, rows=rows: rows), "train", count=count)
            assert (examples.size, examples.counted) == right

    def test_what_knows_its_size_is_not_counted_and_an_endless_generator_can_be_used(self) -> None:
        notices: list[str] = []
        for rows in (ROWS, tf.data.Dataset.from_tensor_slices(ROWS), tf.data.Dataset.range(3).repeat()):
            task = AnyStructure(make=lambda split, rows=rows: rows)
            load_examples(task, "train", count=True, notice=notices.append)
        assert notices == []
        endless = tf.data.Dataset.from_generator(itertools.count, output_signature=tf.TensorSpec([], tf.int64))
        examples = load(AnyStructure(make=lambda split: endless), "train", count=False)
        assert examples.size is None
        assert order(examples, 2, buffer=0) == [[0, 1, 2, 3], [4, 5, 6, 7]]

    def test_examples_that_cannot_be_read_or_batched_are_refused(self) -> None:
        def unequal() -> Iterator[np.ndarray]:
            yield from (np.zeros(1), np.zeros(2))

        def falls() -> Iterator[np.ndarray]:
            yield np.zeros(1)
            raise ValueError("the sky is falling")

        for generate, part in ((unequal, "Cannot batch tensors"), (falls, "ValueError: the sky is falling")):
            source = tf.data.Dataset.from_generator(generate, output_signature=tf.TensorSpec([None], tf.float64))
            with pytest.raises(UsageError) as caught:
                load(AnyStructure(make=lambda split, source=source: source), "valid")
            assert "the first examples of split 'valid' cannot be read and put into a batch" in str(caught.value)
            assert part in str(caught.value)

    @pytest.mark.parametrize("element", ["one", "dict", "pair"])
    def test_a_filtered_dataset_is_counted(self, element: str) -> None:
        structure: Callable[[Any], Any] = {
            "one": lambda i: i,
            "dict": lambda i: {"a": i, "b": i},
            "pair": lambda i: (i, i),
        }[element]
        filtered = tf.data.Dataset.range(10).filter(lambda i: i % 3 == 0).map(structure)
        assert load(AnyStructure(make=lambda split: filtered), "train").size == 4

    @pytest.mark.parametrize(
        "empty",
        [
            (ROWS[:0], ROWS[:0]),
            tf.data.Dataset.from_tensor_slices((ROWS, ROWS)).take(0),
            tf.data.Dataset.from_tensor_slices((ROWS, ROWS)).filter(lambda a, b: a < 0),
        ],
        ids=["arrays", "dataset", "filtered"],
    )
    def test_an_empty_split_is_refused(self, empty: Any) -> None:
        with pytest.raises(UsageError, match="the dataset of split 'train' is empty"):
            load(Source(make=lambda split: empty), "train")


class Pipelines(InputOnly):
    """Keeps the pipelines that it asks for."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas, 1, 0)
        self.seen: list[tf.data.Dataset] = []

    def distribute_datasets_from_function(self, function: Callable[[Any], tf.data.Dataset]) -> tf.data.Dataset:
        self.seen.append(super().distribute_datasets_from_function(function))
        return self.seen[-1]


class TestTuning:
    @pytest.mark.parametrize(("arrays", "replicas", "off"), [(True, 1, True), (False, 1, False), (False, 2, True)])
    def test_arrays_and_several_devices_are_not_tuned(self, arrays: bool, replicas: int, off: bool) -> None:
        rows: Any = (ROWS, ROWS) if arrays else tf.data.Dataset.from_tensor_slices((ROWS, ROWS))
        examples = load(AnyStructure(make=lambda split: rows), "train")
        assert examples.tuned is not arrays
        strategy: Any = Pipelines(replicas)
        examples.training_batches(strategy, global_batch_size=2, seed=0, shuffle_buffer=0)
        examples.evaluation_batches(strategy, global_batch_size=2)
        assert [dataset.options().autotune.enabled is False for dataset in strategy.seen] == [off, off]


class TestRefusals:
    @pytest.mark.parametrize("element", [ROWS, {"a": ROWS}], ids=["one tensor", "dict"])
    def test_the_default_step_needs_tuples(self, element: Any) -> None:
        with pytest.raises(UsageError) as caught:
            load(Source(make=lambda split: element), "train")
        assert "the default step needs (inputs, labels) or (inputs, labels, weight)" in str(caught.value)
        load(AnyStructure(make=lambda split: element), "train")

    @pytest.mark.parametrize("value", [7, None, (ROWS, ROWS[:2]), object()], ids=["int", "None", "lengths", "object"])
    def test_what_is_no_data_is_refused(self, value: Any) -> None:
        with pytest.raises(UsageError) as caught:
            load(Source(make=lambda split: value), "test")
        assert str(caught.value).startswith(f"Task.dataset('test') gave a {type(value).__name__} that is neither")
