"""From a task's examples to global batches that are the same on every backend and at every number of replicas.

Global batch k of a seed holds the same examples everywhere. Replica r of R holds a contiguous piece of it; where the
rows do not divide evenly, the first (rows mod R) replicas hold one more, and a piece may be empty. Every replica gets
one piece for every global batch, so the number of steps is known to all and never depends on an iterator's end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist import private_tf
from tfdist.cluster.causes import cause_of
from tfdist.errors import UsageError
from tfdist.training.randomness import refuse_stateful
from tfdist.training.shards import rows_between
from tfdist.training.task import Task

__all__ = ["Examples", "load_examples", "load_inputs", "row_count", "with_a_row"]

Batches = Iterator[Any]
Augment = Callable[[Any, tf.Tensor], Any]

_as_it_is = tf.autograph.experimental.do_not_convert
"""For our own functions: AutoGraph takes longer to convert them than TensorFlow to trace them."""


@dataclasses.dataclass(frozen=True)
class Examples:
    """The examples of one split."""

    split: str
    dataset: tf.data.Dataset
    size: int | None
    """Number of examples; None where the dataset never ends, or was not counted."""
    counted: bool = True
    """Whether the size is known, be it that there is no end."""
    tuned: bool = True
    """Whether TensorFlow tunes the pipeline while it runs. It makes no difference to arrays."""

    def steps_per_epoch(self, global_batch_size: int) -> int:
        """Global batches in one pass, the last one possibly smaller."""
        assert self.size is not None
        return -(-self.size // global_batch_size)

    def training_batches(
        self,
        strategy: tf.distribute.Strategy,
        *,
        global_batch_size: int,
        seed: int,
        shuffle_buffer: int,
        augment: Augment | None = None,
        first: int = 0,
        shards: int | None = None,
    ) -> Batches:
        """An endless iterator over the replicas' pieces of the global batches, epoch after epoch.

        Each epoch is shuffled by (seed, epoch) through a buffer of `shuffle_buffer` examples (0: not at all), and cut
        into global batches by itself. `augment` then changes the examples of each piece, with a seed that belongs to
        the example's place in the run.

        Args:
            first: global batches of the run that come before these.
            shards: virtual shards of a global batch; a piece then comes with the places at which its own begin and
                the last one ends.
        """
        # shuffle combines its seed with TensorFlow's global one, which must be the same on every rank whatever the
        # task's code did to it; and with a global seed of 0 it refuses a seed that is computed in the pipeline.
        tf.random.set_seed(1)
        change = None if augment is None else _augmented(augment, seed, self.dataset.element_spec)
        begun, done = (0, first) if self.size is None else divmod(first, self.steps_per_epoch(global_batch_size))
        start = begun, done * global_batch_size

        @_as_it_is
        def epoch(index: tf.Tensor) -> tf.data.Dataset:
            return self._epoch(index, seed, shuffle_buffer, start, places=augment is not None).batch(global_batch_size)

        batches = lambda: tf.data.Dataset.counter(begun).flat_map(epoch)  # noqa: E731
        return _distribute(strategy, batches, change, tuned=self.tuned, shards=shards)

    def numbered_batches(
        self,
        *,
        global_batch_size: int,
        seed: int,
        shuffle_buffer: int,
        epochs: int | None,
        augment: Augment | None = None,
        first: int = 0,
    ) -> tf.data.Dataset:
        """A dataset of (number, batch) for workers that take whole batches, each the next one that is free.

        Examples come in the order of `training_batches`, but batches go on over the end of an epoch, so that all are
        full but the last one of `epochs` (None: no end).

        Args:
            first: the number that the first batch has in the run.
        """
        tf.random.set_seed(1)  # as above
        change = None if augment is None else _augmented(augment, seed, self.dataset.element_spec)
        start = (0, 0) if self.size is None else divmod(first * global_batch_size, self.size)
        passes = tf.data.Dataset.counter(start[0]) if epochs is None else tf.data.Dataset.range(start[0], epochs)
        examples = passes.flat_map(
            _as_it_is(lambda index: self._epoch(index, seed, shuffle_buffer, start, places=augment is not None))
        )
        batches = examples.batch(global_batch_size)
        if self.size is None:
            batches = batches.skip(first)
        if change is not None:
            batches = batches.map(_as_it_is(lambda *batch: change(batch)), tf.data.AUTOTUNE)
        batches = batches.enumerate(first).prefetch(2)
        untuned = tf.data.Options()
        untuned.autotune.enabled = self.tuned
        return batches.with_options(untuned)

    def _epoch(
        self, index: tf.Tensor, seed: int, shuffle_buffer: int, start: tuple[int, int], *, places: bool
    ) -> tf.data.Dataset:
        """One pass in its own order; with each example's (epoch, number) before it, if asked for.

        Args:
            start: the epoch that the run goes on in, and how many of its examples are done.
        """
        examples = self.dataset
        if shuffle_buffer:
            buffer = min(shuffle_buffer, self.size or shuffle_buffer)
            both = tf.stack([tf.constant(seed, tf.int64), index])
            mixed = tf.random.stateless_uniform([], both, minval=1, maxval=2**31 - 1, dtype=tf.int64)
            examples = examples.shuffle(buffer, seed=mixed, reshuffle_each_iteration=False)
        if places:
            numbers = tf.data.Dataset.counter().map(_as_it_is(lambda i: tf.stack([index, i])))
            examples = tf.data.Dataset.zip(numbers, examples)
        if start[1]:
            examples = examples.skip(tf.where(tf.equal(index, start[0]), tf.constant(start[1], tf.int64), 0))
        return examples

    def inputs(self) -> Examples:
        """The inputs alone, of elements (inputs, labels) or (inputs, labels, weight)."""
        spread = isinstance(self.dataset.element_spec, tuple)
        alone = self.dataset.map(_as_it_is(lambda inputs, *_: inputs)) if spread else self.dataset
        return dataclasses.replace(self, dataset=alone)

    def evaluation_batches(
        self, strategy: tf.distribute.Strategy, *, global_batch_size: int, shards: int | None = None
    ) -> Batches:
        """The replicas' pieces of the global batches in the dataset's order; `shards` as in `training_batches`."""
        batches = lambda: self.dataset.batch(global_batch_size).repeat()  # noqa: E731
        return _distribute(strategy, batches, tuned=self.tuned, shards=shards)


def load_examples(task: Task, split: str, *, count: bool, notice: Callable[[str], None]) -> Examples:
    """Ask the task for a split, and find out its size.

    Args:
        count: whether the size is needed, so that a dataset which does not know its size must be read through.
        notice: told before that, since it may take long.

    Raises:
        UsageError: the split is empty or has a wrong structure, or its first examples cannot be read.
    """
    source = task.dataset(split)
    tuned = isinstance(source, tf.data.Dataset)
    if not tuned:
        source = _from_arrays(split, source)
    if not isinstance(source.element_spec, tuple) and type(task).train_step is Task.train_step:
        raise UsageError(
            f"the dataset of split {split!r} gives elements of type {type(source.element_spec).__name__}, but the "
            "default step needs (inputs, labels) or (inputs, labels, weight). Change Task.dataset, or write your own "
            "train_step."
        )
    if not _can_be_batched(split, source):
        raise UsageError(f"the dataset of split {split!r} is empty. Make Task.dataset({split!r}) give examples.")
    size = int(source.cardinality())
    if size == tf.data.UNKNOWN_CARDINALITY and count:
        notice(
            f"counting the examples of split {split!r}: its dataset does not know its size. To leave this out, "
            "use tf.data.experimental.assert_cardinality, or set steps (without accumulate)."
        )
        size = int(source.reduce(tf.constant(0, tf.int64), _as_it_is(lambda total, *_: total + 1)))
    return Examples(split, source, size if size > 0 else None, counted=size != tf.data.UNKNOWN_CARDINALITY, tuned=tuned)


def load_inputs(source: Any) -> Examples:
    """Inputs without labels, from a dataset of single ones or from arrays.

    Raises:
        UsageError: there are none, or they have a wrong structure.
    """
    tuned = isinstance(source, tf.data.Dataset)
    dataset = source if tuned else _from_arrays("predict", source)
    if not _can_be_batched("predict", dataset):
        raise UsageError("there are no examples to predict.")
    size = int(dataset.cardinality())
    if size == tf.data.UNKNOWN_CARDINALITY:
        size = int(dataset.reduce(tf.constant(0, tf.int64), _as_it_is(lambda total, *_: total + 1)))
    return Examples("predict", dataset, size if size > 0 else None, tuned=tuned)


def _can_be_batched(split: str, source: tf.data.Dataset) -> bool:
    """Read two examples, so that what is wrong with them shows now. False where there is none."""
    try:
        return any(True for _ in source.take(2).batch(2))
    except tf.errors.OpError as error:
        raise UsageError(
            f"the first examples of split {split!r} cannot be read and put into a batch: {cause_of(error)}. "
            f"Task.dataset({split!r}) must give single examples of one structure and shape."
        ) from None


def _from_arrays(split: str, arrays: Any) -> tf.data.Dataset:
    try:
        return tf.data.Dataset.from_tensor_slices(arrays)
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        raise UsageError(
            f"Task.dataset({split!r}) gave a {type(arrays).__name__} that is neither a tf.data.Dataset nor arrays with "
            f"one first axis ({str(error).splitlines()[0]}). Return a dataset of (inputs, labels)."
        ) from None


def _augmented(augment: Augment, seed: int, spec: Any) -> Callable[[Any], Any]:
    """A function of a piece, as ((epoch, number) of each example, examples), that changes each example."""

    def one(place_and_example: tuple[tf.Tensor, Any]) -> Any:
        place, example = place_and_example
        own = tf.random.experimental.stateless_fold_in(tf.stack([tf.constant(seed, tf.int64), place[0]]), place[1])
        changed = private_tf.with_autograph(augment)(example, own)
        try:
            tf.nest.assert_same_structure(spec, changed)
            return tf.nest.map_structure(_as_before, spec, changed)
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"Task.augment must return an example of the structure, shapes and types that it gets: "
                f"{str(error).splitlines()[0]}"
            ) from None

    # Tried by itself first: where its function fails, map_fn leaves TensorFlow's variable scope in disorder.
    tried = tf.function(one, autograph=False).get_concrete_function((tf.TensorSpec([2], tf.int64), spec))
    refuse_stateful(
        tried.graph, "Task.augment", "Use tf.random.stateless_normal and the like with the seed that it is given."
    )
    return lambda piece: tf.map_fn(one, piece, fn_output_signature=spec)


def _as_before(spec: tf.TypeSpec, value: Any) -> Any:
    """The value, which must be what `spec` says."""
    if isinstance(spec, tf.TensorSpec):
        return tf.ensure_shape(tf.convert_to_tensor(value, spec.dtype), spec.shape)
    if not spec.is_compatible_with(value):
        raise ValueError(f"{value} is not a {spec}")
    return value


def _distribute(
    strategy: tf.distribute.Strategy,
    global_batches: Callable[[], tf.data.Dataset],
    change: Callable[[Any], Any] | None = None,
    *,
    tuned: bool,
    shards: int | None = None,
) -> Batches:
    """An iterator that gives each replica its piece of each global batch, changed by `change`.

    The dataset is declared endless. Otherwise TensorFlow's multi-worker strategies ask all workers at every step
    whether anyone has data left, which is one more collective.
    """

    def pieces(context: tf.distribute.InputContext) -> tf.data.Dataset:
        replicas = context.num_replicas_in_sync
        here = replicas // context.num_input_pipelines
        first = context.input_pipeline_id * here
        batches = global_batches()
        # map spreads a plain tuple over its function's arguments.
        spread = type(batches.element_spec) is tuple

        def own(batch: tuple[Any, ...], replica: int | tf.Tensor) -> Any:
            piece, ends = _piece(batch if spread else batch[0], replica, replicas, shards or replicas)
            piece = piece if change is None else change(piece)
            return piece if shards is None else (piece, ends)

        def of_replica(batch: tuple[Any, ...]) -> Callable[[tf.Tensor], Any]:
            return _as_it_is(lambda replica: own(batch, replica))

        if here == 1:
            batches = batches.map(_as_it_is(lambda *batch: own(batch, first)), tf.data.AUTOTUNE)
            batches = batches.prefetch(tf.data.AUTOTUNE)
        else:
            batches = batches.flat_map(
                _as_it_is(lambda *batch: tf.data.Dataset.range(first, first + here).map(of_replica(batch)))
            )
            batches = batches.prefetch(2 * here)
        if here > 1 or not tuned:
            # An iterator over several devices, when it is deleted, waits for the tuning thread's next round, up to a
            # minute; others do at times. Of the parts on the devices, see untuned_device_datasets.
            untuned = tf.data.Options()
            untuned.autotune.enabled = False
            batches = batches.with_options(untuned)
        return batches.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))

    with private_tf.untuned_device_datasets():
        return iter(strategy.distribute_datasets_from_function(pieces))


def _piece(batch: Any, replica: int | tf.Tensor, replicas: int, shards: int) -> tuple[Any, tf.Tensor]:
    """Rows of a replica, and the ends of its shards in them, shape `[shards of a replica + 1]`.

    Shards are contiguous; the first (rows mod shards) of all shards get one row more.
    """
    rows, own = tf.cast(row_count(batch), tf.int64), shards // replicas
    even, extra = rows // shards, rows % shards
    numbers = tf.cast(replica, tf.int64) * own + tf.range(own + 1, dtype=tf.int64)
    ends = tf.ensure_shape(numbers * even + tf.minimum(numbers, extra), [own + 1])
    return batch if replicas == 1 else rows_between(batch, ends[0], ends[own]), ends - ends[0]


def row_count(batch: Any) -> tf.Tensor:
    """Number of examples in a batch, a scalar int32."""
    first = tf.nest.flatten(batch)[0]
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int32)
    if isinstance(first, tf.RaggedTensor):
        return first.nrows(tf.int32)
    return tf.shape(first)[0]


def with_a_row(batch: Any) -> Any:
    """The batch; where it has no rows, one row of zeros.

    TensorFlow's CPU kernels of convolutions and max-pooling fail on no rows, or end the process.
    """

    def row_of_zeros(value: Any) -> Any:
        if isinstance(value, tf.SparseTensor):
            return tf.SparseTensor(value.indices, value.values, tf.concat([[1], value.dense_shape[1:]], 0))
        if isinstance(value, tf.RaggedTensor):
            splits = [tf.zeros([2 if i == 0 else 1], value.row_splits.dtype) for i in range(value.ragged_rank)]
            return tf.RaggedTensor.from_nested_row_splits(value.flat_values[:0], splits)
        return tf.zeros(tf.concat([[1], tf.shape(value)[1:]], 0), value.dtype)

    return tf.cond(row_count(batch) > 0, lambda: batch, lambda: tf.nest.map_structure(row_of_zeros, batch))
