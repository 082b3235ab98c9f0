"""Checksums of what every step works on, for those who want to know where two runs part (`tfdist compare`).

For each piece of a step's global batch (a replica's rows, or a virtual shard's) and each variable:

    the rows ─> the piece's own gradients ─> the reduced gradients ─> the variables after the update

A checksum (int64, modulo 2^64, of all bits and their places) tells whether bits are equal. Beside it stand, in
float64, the sum of the elements, each with a sign of its own, and the sum of their sizes: those of several pieces add
up, so that runs with other numbers of replicas can be compared, too, and tell how far apart two values are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import EnvironmentProblem
from tfdist.strategies.session import Session
from tfdist.training.gradients import Gradient

__all__ = ["FIELDS", "Seen", "Trace", "row", "see", "see_batch"]

_ODD = np.int64(-7046029254386353131)  # 2^64 divided by the golden ratio


class Seen(NamedTuple):
    """Of some tensors: a row for each piece, a column for each tensor."""

    checksums: tf.Tensor
    """int64."""
    sums: tf.Tensor
    """float64, of the elements with signs."""
    sizes: tf.Tensor
    """float64, of the elements' absolute values."""


def see(values: Sequence[Gradient], pieces: int | None = None) -> Seen:
    """What there is to tell of tensors. Inside the replica step (traced).

    Args:
        pieces: of this replica, which are a first axis of all values; None: there is no such axis.
    """
    rows = [[tf.convert_to_tensor(v)] if pieces is None else tf.unstack(v, num=pieces) for v in values]
    columns = [[_tell(value) for value in of_one] for of_one in rows]
    return Seen(*(tf.stack([tf.stack([told[i] for told in of_one]) for of_one in columns], 1) for i in range(3)))


def see_batch(batch: Any) -> tf.Tensor:
    """A checksum of the rows of a batch that does not depend on their order or distribution; int64 (traced)."""
    total: tf.Tensor = tf.constant(0, tf.int64)
    for value in tf.nest.flatten(batch):  # what belongs to one example is mixed, so that it belongs together
        total = _mixed(total + _of_rows(value)) + 1
    return tf.reduce_sum(total)


def _of_rows(value: Any) -> tf.Tensor:
    """A number for each row of a dense, ragged or sparse tensor."""
    if isinstance(value, tf.RaggedTensor):
        # Not padded: how wide that makes a row would depend on the rows beside it.
        rows = value.value_rowids()
        places = tf.range(tf.size(rows, tf.int64)) - tf.cast(tf.gather(value.row_starts(), rows), tf.int64)
        parts = _mixed(_mixed((2 * places + 1) * _ODD) + _of_rows(value.values))
        sums = tf.math.unsorted_segment_sum(parts, rows, value.nrows())
        return sums + _mixed(tf.cast(value.row_lengths(), tf.int64))
    if isinstance(value, tf.SparseTensor):
        places = tf.reduce_sum(value.indices[:, 1:] * _weights(tf.shape(value.indices)[1] - 1), 1)
        return tf.math.unsorted_segment_sum(
            _mixed(_mixed(places) + _bits(value.values)), value.indices[:, 0], value.dense_shape[0]
        )
    flat = tf.reshape(_bits(value), [tf.shape(value)[0], -1])
    return tf.reduce_sum(flat * _weights(tf.shape(flat)[1]), 1)


def _tell(value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    flat = tf.reshape(value, [-1])
    weights = _weights(tf.size(flat))
    wide = tf.cast(flat, tf.float64)
    signs = tf.where(_mixed(weights) < 0, tf.constant(-1.0, tf.float64), tf.constant(1.0, tf.float64))
    return tf.reduce_sum(_bits(flat) * weights), tf.reduce_sum(wide * signs), tf.reduce_sum(tf.abs(wide))


def _weights(count: tf.Tensor) -> tf.Tensor:
    """An odd number for each place."""
    return (2 * tf.range(count, dtype=tf.int64) + 1) * _ODD


def _mixed(numbers: tf.Tensor) -> tf.Tensor:
    """Numbers whose upper bits depend on all bits of those given."""
    return tf.bitwise.bitwise_xor(numbers, tf.bitwise.right_shift(numbers, tf.constant(29, tf.int64))) * _ODD


def _bits(value: tf.Tensor) -> tf.Tensor:
    """The bits of each element as an int64; of a text a hash."""
    if value.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(value, 2**62)
    if value.dtype.is_integer or value.dtype.is_bool:
        return tf.cast(value, tf.int64)
    kind = {2: tf.int16, 4: tf.int32, 8: tf.int64}[value.dtype.size]
    return tf.cast(tf.bitcast(value, kind), tf.int64)


class Trace:
    """Collects what the steps of a run tell, and writes it to a file. Every process calls it alike."""

    STAGES = ("local", "reduced", "after")

    def __init__(self, path: Path) -> None:
        """The file is written at the end, by the chief."""
        self._path = path
        self._chunks: list[tuple[np.ndarray, ...]] = []
        self._initial: list[list[int]] = []

    def begin(self, variables: Mapping[str, Any]) -> None:
        """Note the variables before the first step, by name."""
        own = see([tf.convert_to_tensor(_tensor(v)) for v in variables.values()])
        self._initial = own.checksums.numpy().tolist()

    def add(self, parts: Sequence[Any]) -> None:
        """A chunk's rows, as a loop returns them: `[steps, pieces here, columns]` of each field in turn."""
        self._chunks.append(tuple(np.asarray(part) for part in parts))

    def write(
        self, session: Session, trained: Sequence[Any], variables: Mapping[str, Any], losses: np.ndarray, addends: int
    ) -> None:
        """Bring together what all processes have seen, and write it.

        Args:
            trained: the variables that get gradients, in their order.
            variables: all variables, by name.
            losses: of each step.
            addends: of the longest sum over examples.
        """
        here = [np.concatenate(parts) for parts in zip(*self._chunks, strict=True)]
        everyone = session.channel.exchange("what the steps have seen", [part.tolist() for part in here])
        initial = session.channel.exchange("the checksums before the first step", self._initial)
        if not session.is_chief:
            return
        kinds = [part.dtype for part in here]
        together = {
            name: np.concatenate([np.array(process[i], kinds[i]) for process in everyone], axis=1)
            for i, name in enumerate(FIELDS)
        }
        together["initial"] = np.array([row for process in initial for row in process], np.int64)
        values = {f"value/{name}": _value(v) for name, v in variables.items()}
        names = {id(variable): name for name, variable in variables.items()}
        texts = {"trained": np.array([names[id(v)] for v in trained]), "variables": np.array(list(variables))}
        replicas = np.array(session.strategy.num_replicas_in_sync)
        about = {"losses": losses, "addends": np.array(addends), "replicas": replicas}
        try:
            with self._path.open("wb") as file:
                np.savez(file, allow_pickle=False, **together, **texts, **values, **about)
        except OSError as error:
            raise EnvironmentProblem(f"trace={str(self._path)!r} could not be written: {error.strerror}.") from None


_KINDS = {"checksums": tf.int64, "sums": tf.float64, "sizes": tf.float64}
FIELDS = {"batch": tf.int64} | {f"{s} {what}": dtype for s in Trace.STAGES for what, dtype in _KINDS.items()}
"""What a step tells, in this order, with its dtypes; the batch is one column."""


def row(
    strategy: tf.distribute.Strategy, batch: Any, local: Any, reduced: Any, variables: Callable[[], list[Any]]
) -> list[tf.Tensor]:
    """A step's `FIELDS`, each `[pieces here, columns]`, once it has updated (traced, outside of a replica).

    Args:
        batch: checksum of the rows of each replica; the others: what each replica has seen.
        variables: read inside the replica.
    """
    after = strategy.run(lambda: see(variables()))
    of_replicas = [strategy.experimental_local_results(value) for value in (batch, *local, *reduced, *after)]
    pieces = [int(part.shape[0]) for part in of_replicas[1]]

    def spread(values: Sequence[tf.Tensor]) -> tf.Tensor:
        rows = [v if v.shape.rank == 2 else v[None, None] for v in values]
        full = [tf.repeat(v, n, 0) if v.shape[0] != n else v for v, n in zip(rows, pieces, strict=True)]
        return tf.concat(full, 0)

    return [spread(values) for values in of_replicas]


def _value(variable: Any) -> np.ndarray:
    """Of a type that NumPy's files know; of bfloat16 float32, which has the same values."""
    value = np.asarray(_tensor(variable))
    return value.astype(np.float32) if value.dtype == tf.bfloat16.as_numpy_dtype else value


def _tensor(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable
