"""Horovod's collectives as a strategy needs them: lists of any dtype in, as few Horovod calls as possible out.

Every function runs on all ranks, in eager mode or traced, and every rank must call the same ones in the same
order with as many values. What each maps to:

- `all_reduce`: one (grouped) allreduce per dtype on the wire; for float16 and bfloat16 one alltoall of the numbers
  and one grouped allgather of the sums; for IndexedSlices one (grouped) allgather per dtype.
- `adasum`: one (grouped) allreduce with Horovod's Adasum per dtype.
- `all_gather`: one (grouped) allgather per dtype on the wire.
- `broadcast`: one broadcast from rank 0; strings go as an allgather to which the other ranks add nothing.
- `from_first`: one broadcast; for IndexedSlices as `all_gather`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvd_backend.launching import by_dtype, for_each_dtype, in_order

__all__ = ["adasum", "all_gather", "all_reduce", "broadcast", "from_first"]

Value: TypeAlias = tf.Tensor | tf.IndexedSlices

# Horovod would add float16 in float16, where 40000 + 40000 has no mean, and bfloat16 not at all: added here.
_HALVES = {tf.float16, tf.bfloat16}
# Horovod adds int8, int32, int64 and three float types. Other integers are added in a type with at least as
# many bits, which gives the same bits.
_ADDED_AS = {
    tf.int8: tf.int32,
    tf.int16: tf.int32,
    tf.uint8: tf.int32,
    tf.uint16: tf.int32,
}
# The same bits in a type that Horovod moves. A complex number is two floats in a last dimension of its own.
_SAME_BITS = {
    tf.bfloat16: tf.uint16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.float32,
    tf.complex128: tf.float64,
}
_ADDABLE = {tf.int32, tf.int64, tf.float32, tf.float64}
_MOVABLE = {*_ADDABLE, tf.uint8, tf.int8, tf.uint16, tf.int16, tf.float16, tf.bool}


def all_reduce(values: Sequence[Value], *, mean: bool, kind: str = "all_reduce") -> list[Value]:
    """The sum or mean over all ranks of each value, on every rank.

    Args:
        values: tensors, of equal shape on all ranks, or IndexedSlices of the same dense shape. float16 and bfloat16
            travel as they are, are added and divided in float32, and rounded once.
        mean: Divide by the number of ranks, as TensorFlow divides: the mean of integers is a float.
        kind: what it is for; a part of the collective's name in Horovod's messages and timeline.

    Returns:
        Values of the same shapes and dtypes (means of integers are floats). IndexedSlices hold the slices of
        all ranks in the order of the ranks; equal indices add up where they are used, as TensorFlow has it.

    Raises:
        TypeError: TensorFlow has no sum for the dtype.
    """
    results: list[Value] = list(values)
    dense = [i for i, v in enumerate(values) if not isinstance(v, tf.IndexedSlices)]
    sparse = [i for i, v in enumerate(values) if isinstance(v, tf.IndexedSlices)]
    tensors = [tf.convert_to_tensor(values[i]) for i in dense]
    for i, result in zip(dense, _all_reduce_tensors(tensors, mean, kind), strict=True):
        results[i] = result
    parts = [part for i in sparse for part in (values[i].values, values[i].indices)]
    gathered = all_gather(parts, axis=0, kind=kind) if parts else []
    for i, slices, indices in zip(sparse, gathered[::2], gathered[1::2], strict=True):
        results[i] = tf.IndexedSlices(slices / mpi_ops.size() if mean else slices, indices, values[i].dense_shape)
    return results


def adasum(tensors: Sequence[tf.Tensor], kind: str = "adasum") -> list[tf.Tensor]:
    """Horovod's Adasum of each tensor over all ranks, on every rank.

    That of two ranks' tensors a and b is (1 - a·b/(2|a|²)) a + (1 - a·b/(2|b|²)) b (Maleki et al. 2020): a if they are
    equal, a + b if they are orthogonal, and the other one if one of them is zero. With more ranks it is that of
    neighbours (0 and 1, 2 and 3), then that of their results, and so on. An infinite number makes NaN of the whole
    tensor.

    Args:
        tensors: float32 or float64, of equal shape on all ranks.
        kind: what it is for; a part of the collective's name in Horovod's messages and timeline.

    Raises:
        TypeError: a value of another dtype, or IndexedSlices.
        ValueError: the number of ranks is not a power of two.
    """
    if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        raise TypeError("IndexedSlices have no Adasum. Give it dense gradients: tf.convert_to_tensor(slices).")
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    for tensor in tensors:
        if tensor.dtype not in (tf.float32, tf.float64):
            raise TypeError(f"Adasum needs float32 or float64, not {tensor.dtype.name}. Cast it first.")
    size = mpi_ops.size()
    if size & (size - 1):
        below = 1 << (size.bit_length() - 1)
        raise ValueError(
            f"Adasum needs a power of two of ranks, and this job has {size}. Start it with {below} or {2 * below}, or "
            "take the mean of the gradients instead."
        )
    return tensors if size == 1 else by_dtype(tensors, kind, _adasum_one, _adasum_group)


def all_gather(values: Sequence[tf.Tensor], *, axis: int | tf.Tensor, kind: str = "all_gather") -> list[tf.Tensor]:
    """Each value of all ranks, concatenated along `axis` in the order of the ranks, on every rank.

    Args:
        values: tensors of rank 1 or more, of equal shape on all ranks but along `axis`.

    Raises:
        ValueError: a value is a scalar.
        TypeError: Horovod cannot move the dtype.
    """
    tensors = [tf.convert_to_tensor(value) for value in values]
    if any(tensor.shape.rank == 0 for tensor in tensors):
        raise ValueError("a scalar has no axis to gather along. Give it one first: tf.expand_dims(value, 0).")
    fronts = [_to_front(tensor, axis) for tensor in tensors]
    text = [i for i, tensor in enumerate(tensors) if tensor.dtype == tf.string]
    parts = [_movable(front) for i, front in enumerate(fronts) if i not in text]
    parts += [part for i in text for part in _letters(fronts[i])]
    gathered = by_dtype(
        parts,
        kind,
        lambda group, name: mpi_ops.allgather(group[0], name=name, ignore_name_scope=True),
        _gather_group,
    )
    results, rest = iter(gathered[: len(tensors) - len(text)]), gathered[len(tensors) - len(text) :]
    words = (_words(lengths, raw, fronts[i]) for i, lengths, raw in zip(text, rest[::2], rest[1::2], strict=True))
    return [
        _from_front(next(words) if i in text else _from_movable(next(results), tensor.dtype), axis)
        for i, tensor in enumerate(tensors)
    ]


def broadcast(value: tf.Tensor, *, name: str) -> tf.Tensor:
    """Rank 0's value, on every rank.

    Args:
        value: a tensor, of equal shape on all ranks.
        name: equal on all ranks, and not that of another broadcast under way.
    """
    if value.dtype == tf.string:
        return tf.ensure_shape(_broadcast_text(value, name), value.shape)
    moved = mpi_ops.broadcast(_movable(value), root_rank=0, name=name, ignore_name_scope=True)
    return tf.stop_gradient(tf.ensure_shape(_from_movable(moved, value.dtype), value.shape))


def from_first(value: Value) -> Value:
    """Rank 0's tensor or IndexedSlices, on every rank. The number of slices may differ between ranks."""
    if not isinstance(value, tf.IndexedSlices):
        value = tf.convert_to_tensor(value)
        return _from_movable(by_dtype([_movable(value)], "first", _broadcast_one, _broadcast_one)[0], value.dtype)
    rows = tf.shape(value.indices)[0] if mpi_ops.rank() == 0 else 0
    slices, indices = all_gather([value.values[:rows], value.indices[:rows]], axis=0, kind="first")
    return tf.IndexedSlices(slices, indices, value.dense_shape)


def _all_reduce_tensors(tensors: list[tf.Tensor], mean: bool, kind: str) -> list[tf.Tensor]:
    results = list(tensors)
    halves = [i for i, tensor in enumerate(tensors) if tensor.dtype in _HALVES]
    others = [i for i, tensor in enumerate(tensors) if tensor.dtype not in _HALVES]
    sums = by_dtype(
        [_addable(tensors[i]) for i in others],
        kind,
        lambda group, name: mpi_ops._allreduce(group[0], name=name, op=mpi_ops.Sum, ignore_name_scope=True),
        lambda group, name: mpi_ops._grouped_allreduce(group, name=name, op=mpi_ops.Sum, ignore_name_scope=True),
    )
    for i, total in zip(others, sums, strict=True):
        total = _from_addable(total, tensors[i].dtype)
        results[i] = total / mpi_ops.size() if mean else total
    added = for_each_dtype([tensors[i] for i in halves], lambda group: _add_halves(group, mean, kind))
    for i, result in zip(halves, added, strict=True):
        results[i] = result
    return results


def _add_halves(tensors: list[tf.Tensor], mean: bool, kind: str) -> list[tf.Tensor]:
    """The sums or means of tensors of one half-precision dtype, of which two bytes a number travel.

    Each rank gets one part of all ranks' numbers, adds them in float32, and hands the rounded sums to the others.
    """
    size, dtype = mpi_ops.size(), tensors[0].dtype
    if size == 1:
        return tensors
    kind = f"{kind}.{dtype.name}"
    [mine] = in_order([_bits(_in_parts(tensors, size))], f"{kind}.parts", _exchange)
    parts = [tf.cast(part, tf.float32) for part in tf.unstack(tf.bitcast(mine, dtype), size)]
    total = functools.reduce(tf.add, parts)  # in the order of the ranks
    total = tf.cast(total / size if mean else total, dtype)
    shapes = _shapes(tensors)
    sums, all_shapes = in_order([_bits(total), shapes], f"{kind}.sums", _gather_group)
    # Horovod compares shapes itself, but has seen those of the parts only.
    alike = tf.reduce_all(tf.reshape(all_shapes, [size, -1]) == shapes)
    text = f"{dtype.name} tensors that are added have other shapes on another rank than here:"
    with tf.control_dependencies([tf.debugging.Assert(alike, [text, *(tf.shape(tensor) for tensor in tensors)])]):
        return _taken_apart(tf.bitcast(sums, dtype), tensors)


def _in_parts(tensors: list[tf.Tensor], parts: int) -> tf.Tensor:
    """The numbers of all tensors in so many rows, filled up with zeros."""
    count = tf.add_n([tf.size(tensor, tf.int64) for tensor in tensors])
    zeros = tf.zeros([-count % parts], tensors[0].dtype)
    return tf.reshape(tf.concat([*(tf.reshape(tensor, [-1]) for tensor in tensors), zeros], 0), [parts, -1])


def _taken_apart(flat: tf.Tensor, like: list[tf.Tensor]) -> list[tf.Tensor]:
    """Tensors of the shapes of those in `like`, whose numbers come first in `flat`."""
    sizes = tf.stack([tf.size(tensor, tf.int64) for tensor in like])
    pieces = tf.split(flat[: tf.reduce_sum(sizes)], sizes)
    shaped = [tf.reshape(piece, tf.shape(tensor)) for piece, tensor in zip(pieces, like, strict=True)]
    return [tf.ensure_shape(piece, tensor.shape) for piece, tensor in zip(shaped, like, strict=True)]


def _bits(halves: tf.Tensor) -> tf.Tensor:
    """In a dtype of two bytes that Horovod moves."""
    return tf.bitcast(halves, tf.uint16)


def _shapes(tensors: list[tf.Tensor]) -> tf.Tensor:
    """Four numbers that stand for the shapes of all tensors, to be compared between ranks."""
    lengths = tf.concat([part for tensor in tensors for part in (tf.shape(tensor), [-1])], 0)
    return tf.bitcast(tf.reshape(tf.fingerprint(lengths[tf.newaxis]), [4, 2]), tf.uint16)


def _exchange(group: list[tf.Tensor], name: str) -> tf.Tensor:
    """Row i goes to rank i, and row i comes from rank i."""
    return mpi_ops.alltoall(group[0], name=name, ignore_name_scope=True)


def _gather_group(group: list[tf.Tensor], name: str) -> list[tf.Tensor]:
    return mpi_ops.grouped_allgather(group, name=name, ignore_name_scope=True)


# On the CPU: for tensors on GPUs, Horovod with NCCL averages those of one host, and knows Adasum between hosts alone.
def _adasum_one(group: list[tf.Tensor], name: str) -> tf.Tensor:
    with tf.device("CPU:0"):
        return mpi_ops._allreduce(group[0], name=name, op=mpi_ops.Adasum, ignore_name_scope=True)


def _adasum_group(group: list[tf.Tensor], name: str) -> list[tf.Tensor]:
    with tf.device("CPU:0"):
        return mpi_ops._grouped_allreduce(group, name=name, op=mpi_ops.Adasum, ignore_name_scope=True)


def _broadcast_one(group: list[tf.Tensor], name: str) -> tf.Tensor:
    return mpi_ops.broadcast(group[0], root_rank=0, name=name, ignore_name_scope=True)


def _broadcast_text(value: tf.Tensor, name: str) -> tf.Tensor:
    """Strings go as bytes of any number: all ranks but the first add none."""
    raw = tf.io.decode_raw(tf.io.serialize_tensor(value), tf.uint8)
    raw = raw if mpi_ops.rank() == 0 else raw[:0]
    return tf.io.parse_tensor(_joined(mpi_ops.allgather(raw, name=name, ignore_name_scope=True)), tf.string)


def _letters(text: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The lengths of strings, and all their bytes."""
    flat = tf.reshape(text, [-1])
    return tf.strings.length(flat), tf.io.decode_raw(tf.strings.reduce_join(flat), tf.uint8)


def _words(lengths: tf.Tensor, raw: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """The strings of all ranks, in rows of the shape of those of `like`."""
    flat = tf.strings.substr(_joined(raw), tf.cumsum(lengths, exclusive=True), lengths)
    return tf.reshape(flat, tf.concat([[-1], tf.shape(like)[1:]], 0))


def _joined(raw: tf.Tensor) -> tf.Tensor:
    byte = tf.constant([bytes([i]) for i in range(256)])
    return tf.strings.reduce_join(tf.gather(byte, tf.cast(raw, tf.int32)))


def _addable(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor in a dtype that Horovod adds."""
    if tensor.dtype in _ADDABLE:
        return tensor
    if tensor.dtype in _ADDED_AS:
        return tf.cast(tensor, _ADDED_AS[tensor.dtype])
    if tensor.dtype in _SAME_BITS:
        return tf.bitcast(tensor, _SAME_BITS[tensor.dtype])
    raise TypeError(
        f"{tensor.dtype.name} cannot be reduced: it has no sum. Cast it to a number first, such as tf.int32, "
        "or gather it."
    )


def _from_addable(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype in _ADDED_AS:
        return tf.cast(tensor, dtype)
    return _from_movable(tensor, dtype)


def _movable(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor's bits in a dtype that Horovod moves."""
    if tensor.dtype in _MOVABLE:
        return tensor
    if tensor.dtype in _SAME_BITS:
        return tf.bitcast(tensor, _SAME_BITS[tensor.dtype])
    raise TypeError(f"{tensor.dtype.name} cannot be sent to other ranks by Horovod. Encode it as numbers first.")


def _from_movable(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.bitcast(tensor, dtype) if dtype in _SAME_BITS else tensor


def _to_front(tensor: tf.Tensor, axis: int | tf.Tensor) -> tf.Tensor:
    if isinstance(axis, int) and axis == 0:
        return tensor
    rank = tf.rank(tensor)
    return tf.transpose(tensor, tf.concat([[axis], tf.range(axis), tf.range(axis + 1, rank)], 0))


def _from_front(tensor: tf.Tensor, axis: int | tf.Tensor) -> tf.Tensor:
    if isinstance(axis, int) and axis == 0:
        return tensor
    rank = tf.rank(tensor)
    return tf.transpose(tensor, tf.concat([tf.range(1, axis + 1), [0], tf.range(axis + 1, rank)], 0))
