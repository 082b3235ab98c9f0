"""Shuffled datasets, which all ranks must read equally often, or they train on other rows than they should.

A shuffle has another order each time it is read, and counts that in the process. A rank that looks at a few rows of
a dataset on its own is one order ahead of the others. It would then take its part of other batches: some rows come
twice, others never, and nothing shows it. So each eager reading is counted, and ranks compare the counts when they
start to read a distributed dataset together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist import private_tf
from tfdist.cluster.channel import Channel, require_same

__all__ = ["watch_orders"]

_COUNT = "_tfdist_times_read"
_watched = False


def watch_orders(channel: Channel) -> None:
    """From now on, reading a distributed dataset raises RanksDisagree where ranks would read it in other orders."""
    global _watched
    if _watched:
        return
    _watched = True
    dataset, distributed = tf.data.Dataset, private_tf.DistributedDataset
    made, start = distributed.__init__, distributed.__iter__

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def read(self: Any, *args: Any, **options: Any) -> Any:
            if tf.executing_eagerly():
                for shuffle in _shuffles(self):
                    setattr(shuffle, _COUNT, getattr(shuffle, _COUNT, 0) + 1)
            return method(self, *args, **options)

        return read

    @functools.wraps(made)
    def make(self: Any, input_workers: Any, strategy: Any, dataset: Any = None, *more: Any, **options: Any) -> None:
        made(self, input_workers, strategy, dataset, *more, **options)
        policy = dataset.options().experimental_distribute.auto_shard_policy if dataset is not None else None
        # Without sharding the ranks' datasets need not be the same.
        self._tfdist_shuffles = [] if policy == tf.data.experimental.AutoShardPolicy.OFF else list(_shuffles(dataset))

    @functools.wraps(start)
    def start_alike(self: Any) -> Any:
        shuffles = getattr(self, "_tfdist_shuffles", ())
        if shuffles and tf.executing_eagerly():
            require_same(
                channel,
                "reading a distributed dataset",
                "how often this rank alone has read from a shuffled dataset",
                [getattr(shuffle, _COUNT, 0) for shuffle in shuffles],
                "Its order is now another one on each rank. Read from it on all ranks or on none, for instance from "
                "a dataset without the shuffle.",
            )
        return start(self)

    dataset.__iter__, dataset.reduce = counted(dataset.__iter__), counted(dataset.reduce)
    distributed.__init__, distributed.__iter__ = make, start_alike


def _shuffles(dataset: Any) -> Iterator[Any]:
    """The shuffles that a dataset is made of and that have a new order each time."""
    if isinstance(dataset, private_tf.ShuffleDataset) and dataset._reshuffle_each_iteration is not False:
        yield dataset
    for part in dataset._inputs() if isinstance(dataset, tf.data.Dataset) else ():
        yield from _shuffles(part)
