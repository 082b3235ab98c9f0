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

from tfdist.cluster.causes import cause_of
from tfdist.errors import UsageError
from tfdist.training.task import Task

__all__ = ["Examples", "load_examples", "row_count", "with_a_row"]

Batches = Iterator[Any]


@dataclasses.dataclass(frozen=True)
class Examples:
    """The examples of one split."""

    split: str
    dataset: tf.data.Dataset
    size: int | None
    """Number of examples; None where the dataset never ends, or was not counted."""

    def steps_per_epoch(self, global_batch_size: int) -> int:
        """Global batches in one pass, the last one possibly smaller."""
        assert self.size is not None
        return -(-self.size // global_batch_size)

    def training_batches(
        self, strategy: tf.distribute.Strategy, *, global_batch_size: int, seed: int, shuffle_buffer: int
    ) -> Batches:
        """An endless iterator over the replicas' pieces of the global batches, epoch after epoch.

        Each epoch is shuffled by (seed, epoch) through a buffer of `shuffle_buffer` examples (0: not at all), and cut
        into global batches by itself.
        """

        def epoch(index: tf.Tensor) -> tf.data.Dataset:
            examples = self.dataset
            if shuffle_buffer:
                buffer = min(shuffle_buffer, self.size or shuffle_buffer)
                both = tf.stack([tf.constant(seed, tf.int64), index])
                mixed = tf.random.stateless_uniform([], both, minval=1, maxval=2**31 - 1, dtype=tf.int64)
                examples = examples.shuffle(buffer, seed=mixed, reshuffle_each_iteration=False)
            return examples.batch(global_batch_size)

        # shuffle combines its seed with TensorFlow's global one, which must be the same on every rank whatever the
        # task's code did to it; and with a global seed of 0 it refuses a seed that is computed in the pipeline.
        tf.random.set_seed(1)
        return _distribute(strategy, lambda: tf.data.Dataset.counter().flat_map(epoch))

    def evaluation_batches(self, strategy: tf.distribute.Strategy, *, global_batch_size: int) -> Batches:
        """The replicas' pieces of the global batches in the dataset's order."""
        return _distribute(strategy, lambda: self.dataset.batch(global_batch_size).repeat())


def load_examples(task: Task, split: str, *, count: bool, notice: Callable[[str], None]) -> Examples:
    """Ask the task for a split, and find out its size.

    Args:
        count: whether the size is needed, so that a dataset which does not know its size must be read through.
        notice: told before that, since it may take long.

    Raises:
        UsageError: the split is empty or has a wrong structure, or its first examples cannot be read.
    """
    source = task.dataset(split)
    if not isinstance(source, tf.data.Dataset):
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
            f"counting the examples of split {split!r}: its dataset does not know its size. To leave this out, set "
            "steps, or use tf.data.experimental.assert_cardinality."
        )
        size = int(source.reduce(tf.constant(0, tf.int64), lambda total, *_: total + 1))
    return Examples(split, source, size if size > 0 else None)


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


def _distribute(strategy: tf.distribute.Strategy, global_batches: Callable[[], tf.data.Dataset]) -> Batches:
    """An iterator that gives each replica its piece of each global batch.

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

        def element(batch: tuple[Any, ...]) -> Any:
            return batch if spread else batch[0]

        if here == 1:
            batches = batches.map(lambda *batch: _piece(element(batch), first, replicas), tf.data.AUTOTUNE)
            batches = batches.prefetch(tf.data.AUTOTUNE)
        else:
            batches = batches.flat_map(
                lambda *batch: tf.data.Dataset.range(first, first + here).map(
                    lambda replica: _piece(element(batch), replica, replicas)
                )
            )
            batches = batches.prefetch(2 * here)
            # TensorFlow's iterator over several devices cannot wake the thread that tunes its pipeline: when it is
            # deleted, it waits for that thread's next round, up to a minute.
            untuned = tf.data.Options()
            untuned.autotune.enabled = False
            batches = batches.with_options(untuned)
        return batches.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))

    return iter(strategy.distribute_datasets_from_function(pieces))


def _piece(batch: Any, replica: int | tf.Tensor, replicas: int) -> Any:
    """Rows of `replica`: contiguous, the first (rows mod replicas) replicas get one more."""
    if replicas == 1:
        return batch
    rows = tf.cast(row_count(batch), tf.int64)
    replica = tf.cast(replica, tf.int64)
    even, extra = rows // replicas, rows % replicas
    start = replica * even + tf.minimum(replica, extra)
    end = start + even + tf.cast(replica < extra, tf.int64)

    def piece(value: Any) -> Any:
        if isinstance(value, tf.SparseTensor):
            rest = value.dense_shape[1:]
            sliced = tf.sparse.slice(
                value, tf.concat([[start], tf.zeros_like(rest)], 0), tf.concat([[end - start], rest], 0)
            )
            return tf.SparseTensor(sliced.indices, sliced.values, tf.concat([[end - start], rest], 0))
        return value[start:end]

    return tf.nest.map_structure(piece, batch)


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
