"""Random numbers, where every process of a job runs the same program.

TensorFlow gives an operation without a seed one of its own in each process. Two things go wrong then:

- Each process shuffles a dataset in another order before it takes its part of it, so some rows are read twice and
  others never. What orders rows in `tf.data` (its own shuffles, and `tf.random.shuffle` in a function of a dataset,
  as Keras has it for arrays) now has seeds that all processes share.
- With `tf.random.set_seed`, the same operation draws the same numbers on every replica. In one process each replica
  has operations of its own. On each replica but the first, such an operation now gets another seed.
"""

from __future__ import annotations

import functools
import itertools
import secrets
import sys
import zlib
from collections import Counter
from typing import Any

import tensorflow as tf

from tfdist import private_tf

__all__ = ["share_seeds"]

_STRIDE = 1_000_003  # between the seeds of two replicas


def share_seeds(strategy: tf.distribute.Strategy) -> None:
    """From now on, operations that were given no seed have seeds as in one process."""
    with strategy.scope():  # a variable takes rank 0's value
        base = tf.Variable(tf.constant(secrets.randbits(31), tf.int64), trainable=False)
    _hook(int(base.numpy()))


@functools.cache
def _hook(base: int) -> None:
    at_site: Counter[str] = Counter()

    def key() -> int:
        site = _site()
        at_site[site] += 1
        return zlib.crc32(f"{site} {at_site[site]}".encode()) >> 1

    of_operation = private_tf.random_seed.get_seed
    of_dataset = private_tf.data_random_seed.get_seed
    shuffle = private_tf.gen_random_ops.random_shuffle
    draw = private_tf.random_op._random

    @functools.wraps(of_operation)
    def operation_seed(op_seed: Any) -> tuple[Any, Any]:
        first, second = of_operation(op_seed)
        if op_seed is None and first is not None:
            second = (second + _STRIDE * _replica()) % 2**31
        return first, second

    @functools.wraps(of_dataset)
    def dataset_seed(seed: Any) -> tuple[Any, Any]:
        seeds = of_dataset(seed)
        if seed is None and [tf.get_static_value(number) for number in seeds] == [0, 0]:
            return tuple(tf.constant(number, tf.int64) for number in (base, key()))
        return seeds

    @functools.wraps(shuffle)
    def shuffle_alike(value: Any, seed: Any = 0, seed2: Any = 0, name: str | None = None) -> tf.Tensor:
        if seed or seed2 or not private_tf.in_dataset_function():
            return shuffle(value, seed=seed, seed2=seed2, name=name)
        # Each epoch runs the function anew, and wants another order.
        epochs, first = itertools.count(), base ^ key()
        epoch = tf.numpy_function(lambda: next(epochs), [], tf.int64, stateful=True)
        return tf.random.experimental.stateless_shuffle(value, tf.stack([tf.constant(first, tf.int64), epoch]))

    @functools.wraps(draw)
    def draw_anew(seed: Any = None, rerandomize_each_iteration: bool | None = None, name: str | None = None) -> Any:
        return draw(seed, rerandomize_each_iteration or (seed is None), name)

    private_tf.random_op._random = draw_anew
    private_tf.random_seed.get_seed = operation_seed
    private_tf.data_random_seed.get_seed = dataset_seed
    private_tf.gen_random_ops.random_shuffle = shuffle_alike


def _replica() -> int:
    if not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context():
        return 0
    number = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
    return 0 if number is None else int(number)


def _site() -> str:
    """The program's own line that led here, which is the same on all ranks even where one of them does more."""
    frame = sys._getframe(1)
    while frame.f_back and (
        frame.f_globals.get("__name__", "").partition(".")[0] in ("tensorflow", "keras", "hvd_backend", "tfdist")
        or "__autograph_generated_file" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__')}:{frame.f_lineno}"
