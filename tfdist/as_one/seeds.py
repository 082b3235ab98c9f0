"""Random numbers, where every process of a job runs the same program.

What has no seed differs between processes, and two things go wrong then:

- Each process orders the rows of a dataset in another way before it takes its part of it, so some rows are read twice
  and others never. What orders rows in `tf.data` (its own shuffles, and `tf.random.shuffle` in a function of a dataset,
  as Keras has it for arrays) now has seeds that all processes share, and Python's and NumPy's global generators start
  from the chief's state.
- With `tf.random.set_seed`, the same operation draws the same numbers on every replica. In one process each replica
  has operations of its own. On each replica but the first, such an operation now gets another seed.
"""

from __future__ import annotations

import functools
import random
import secrets
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import private_tf

__all__ = ["share_seeds"]

_STRIDE = 1_000_003  # between the seeds of two replicas


def share_seeds(strategy: tf.distribute.Strategy) -> None:
    """From now on, what was given no seed is as in one process."""
    version, python, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    twister = numpy["state"]
    # Floats of 64 bits hold all of these exactly; NaN says None.
    state = [secrets.randbits(31), *python, float("nan") if gauss is None else gauss, *twister["key"]]
    state += [twister["pos"], numpy["has_gauss"], numpy["gauss"]]
    with strategy.scope():  # a variable takes rank 0's value
        taken = tf.Variable(tf.constant(state, tf.float64), trainable=False).numpy().tolist()
    numbers, gauss, rest = taken[1 : len(python) + 1], taken[len(python) + 1], taken[len(python) + 2 :]
    random.setstate((version, tuple(map(int, numbers)), None if np.isnan(gauss) else gauss))
    *keys, position, has_gauss, gauss = rest
    twister = {"key": np.array(keys, np.uint32), "pos": int(position)}
    np.random.set_state({**numpy, "state": twister, "has_gauss": int(has_gauss), "gauss": gauss})
    _hook(int(taken[0]))


@functools.cache
def _hook(base: int) -> None:
    at_site: Counter[str] = Counter()

    def key() -> int:
        site = _site()
        at_site[site] += 1
        return base ^ (zlib.crc32(f"{site} {at_site[site]}".encode()) >> 1)

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
        if seed is not None or [tf.get_static_value(number) for number in seeds] != [0, 0]:
            return seeds
        return tf.constant(key(), tf.int64), tf.constant(1, tf.int64) if tf.executing_eagerly() else _call_number()

    @functools.wraps(shuffle)
    def shuffle_alike(value: Any, seed: Any = 0, seed2: Any = 0, name: str | None = None) -> tf.Tensor:
        if seed or seed2 or not private_tf.dataset_function():
            return shuffle(value, seed=seed, seed2=seed2, name=name)
        seeds = tf.stack([tf.constant(key(), tf.int64), _call_number()])
        return tf.random.experimental.stateless_shuffle(value, seeds)

    @functools.wraps(draw)
    def draw_anew(seed: Any = None, rerandomize_each_iteration: bool | None = None, name: str | None = None) -> Any:
        return draw(seed, rerandomize_each_iteration or (seed is None), name)

    private_tf.random_op._random = draw_anew
    private_tf.random_seed.get_seed = operation_seed
    private_tf.data_random_seed.get_seed = dataset_seed
    private_tf.gen_random_ops.random_shuffle = shuffle_alike


def _call_number() -> tf.Tensor:
    """A number for each call of the function being traced: the same on all ranks, and another one in each epoch.

    Calls of a dataset's function may run in any order. So it is made from the element that the function is called
    with, and from how often that element has come.
    """
    function = private_tf.dataset_function()
    element = [x for x in function.inputs if x.dtype.is_numpy_compatible] if function is not None else []
    count = _counter()
    _counters.append(count)  # TensorFlow keeps it only as long as the function's graph, which Keras lets go
    return tf.numpy_function(count, element, tf.int64, stateful=True)


_counters: list[Callable[..., np.int64]] = []


def _counter() -> Callable[..., np.int64]:
    calls: Counter[int] = Counter()

    def count(*element: Any) -> np.int64:
        which = 0
        for part in element:
            array = np.asarray(part)
            which = zlib.crc32(repr(array.tolist()).encode() if array.dtype == object else array.tobytes(), which)
        calls[which] += 1
        return np.int64(which * 1_000_003 + calls[which])

    return count


def _replica() -> int:
    if not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context():
        return 0
    number = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
    return 0 if number is None else int(number)


def _site() -> str:
    """The program's own lines that led here, which are the same on all ranks even where one of them does more."""
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        own = name.partition(".")[0] not in ("tensorflow", "keras", "tfdist", "hvd_backend")
        if own and "__autograph_generated_file" not in frame.f_code.co_filename:
            lines.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back
    return " ".join(lines)
