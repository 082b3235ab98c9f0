"""Virtual shards: a global batch is cut into as many pieces at every number of replicas, and added up in one tree.

    global batch ─> V shards ─> each by itself, in one shape ─> sums of neighbours ─> … ─> one sum
                    (data.py)   (a loop over V/R shards)        (on the replica)   (over replicas)

What a step computes then does not depend on R, the number of replicas, nor on the backend: every shard is computed by
the same graph on the same rows with the same random numbers, and the sums are taken in the same order. The tree pairs
neighbours, 2i and 2i + 1, on each level, and hands on what is left over; so a replica can add up its own shards as far
as they pair off, and all replicas do the rest on what they have gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.training.reduction import in_float32, in_one_buffer

__all__ = ["for_each_shard", "sum_in_a_tree"]


def for_each_shard(function: Callable[[tf.Tensor, Any], Any], batch: Any, ends: tf.Tensor) -> Any:
    """Call a function for each of this replica's shards, one after the other. Inside the replica step (traced).

    Args:
        function: of the number of a shard on this replica, a scalar int32, and its rows; returns tensors.
        batch: the rows of all of them.
        ends: where each shard begins, and the last one ends, in `batch`; shape `[shards + 1]`.

    Returns:
        What it returned, each tensor with a first axis of shards.
    """

    def one(shard: tf.Tensor) -> Any:
        return function(shard, rows_between(batch, ends[shard], ends[shard + 1]))

    # A function of its own: its graph is the same at every number of shards, and tells what it returns.
    traced = tf.function(one, autograph=False).get_concrete_function(tf.TensorSpec([], tf.int32))
    like = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), traced.structured_outputs)
    count = ends.shape[0] - 1
    return tf.map_fn(traced, tf.range(count), fn_output_signature=like, parallel_iterations=1)


def rows_between(batch: Any, start: tf.Tensor, end: tf.Tensor) -> Any:
    """Some rows of each tensor of a batch."""

    def part(value: Any) -> Any:
        if isinstance(value, tf.SparseTensor):
            rest = value.dense_shape[1:]
            sliced = tf.sparse.slice(
                value, tf.concat([[start], tf.zeros_like(rest)], 0), tf.concat([[end - start], rest], 0)
            )
            return tf.SparseTensor(sliced.indices, sliced.values, tf.concat([[end - start], rest], 0))
        return value[start:end]

    return tf.nest.map_structure(part, batch)


def sum_in_a_tree(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Add up each tensor over all shards of all replicas, in the order of the tree. Runs inside the replica step.

    Args:
        tensors: with a first axis of this replica's shards; the same shapes and dtypes on all replicas.

    Returns:
        The sums, without that axis; half-precision ones in float32.
    """
    context = tf.distribute.get_replica_context()

    def total(nodes: tf.Tensor) -> tf.Tensor:
        count = nodes.shape[0]
        while count % 2 == 0:
            nodes, count = _next_level(nodes, count)
        if context.num_replicas_in_sync > 1:
            nodes = context.all_gather(nodes, axis=0)
            count *= context.num_replicas_in_sync
        while count > 1:
            nodes, count = _next_level(nodes, count)
        return nodes[0]

    return in_one_buffer(in_float32(tensors), total, first_axis=True)


def _next_level(nodes: tf.Tensor, count: int) -> tuple[tf.Tensor, int]:
    """Sums of neighbours. Slices of one tensor: TensorFlow would put a chain of `a + b` into an order of its own."""
    pairs = nodes[0 : count - count % 2 : 2] + nodes[1::2]
    return (pairs, count // 2) if count % 2 == 0 else (tf.concat([pairs, nodes[count - 1 :]], 0), count // 2 + 1)
