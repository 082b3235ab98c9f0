"""Launches Horovod's operations so that all ranks run the same ones in the same order, eagerly or traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import tensorflow as tf

from tfdist import private_tf

__all__ = ["Launch", "by_dtype", "for_each_dtype", "in_order", "prepare"]

Launch: TypeAlias = Callable[[list[tf.Tensor], str], "tf.Tensor | list[tf.Tensor]"]


def by_dtype(tensors: Sequence[tf.Tensor], kind: str, single: Launch, grouped: Launch) -> list[tf.Tensor]:
    """Launch one collective per dtype: Horovod groups tensors of one dtype only."""

    def launch(group: list[tf.Tensor]) -> list[tf.Tensor]:
        return in_order(group, f"{kind}.{group[0].dtype.name}", single if len(group) == 1 else grouped)

    return for_each_dtype(tensors, launch)


def for_each_dtype(tensors: Sequence[tf.Tensor], fn: Callable[[list[tf.Tensor]], list[tf.Tensor]]) -> list[tf.Tensor]:
    """What `fn` makes of the tensors of one dtype, for each dtype."""
    groups: dict[tf.DType, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(i)
    results: list[tf.Tensor] = [None] * len(tensors)
    for members in groups.values():
        for i, output in zip(members, fn([tensors[i] for i in members]), strict=True):
            results[i] = output
    return results


def in_order(inputs: list[tf.Tensor], kind: str, launch: Launch) -> list[tf.Tensor]:
    """Launch one collective; in a graph, after all that were traced before it.

    TensorFlow does not know that Horovod's operations have an effect. It would run those of several
    iterations of a loop at a time, which Horovod refuses (one name, two tensors). Hence a token, read before
    and written after each.
    """
    # As on TensorFlow's own strategies, gradients stop here: ReplicaContext.all_reduce and all_gather have
    # their own.
    inputs = [tf.stop_gradient(x) for x in inputs]
    if tf.executing_eagerly():
        return _as_list(launch(inputs, f"eager.{kind}"))
    if private_tf.in_xla():
        raise NotImplementedError(
            "XLA cannot compile a function in which replicas talk to each other over Horovod (jit_compile=True). "
            "Compile what each replica computes for itself, such as the forward and backward pass, and "
            "leave strategy.reduce, all_reduce and the optimizer outside of that function."
        )
    private_tf.mark_as_unsaveable()
    token = _token()
    zero = token.read_value()
    inputs = [_not_constant(x, zero) for x in inputs]
    outputs = _as_list(launch(inputs, private_tf.name_in_function(kind)))
    with tf.control_dependencies(outputs):
        token.assign(zero, read_value=False)
    return outputs


def _not_constant(tensor: tf.Tensor, zero: tf.Tensor) -> tf.Tensor:
    """The same tensor from its row 0 on, where the graph optimizer does not know that it is row 0. Copies nothing.

    The optimizer would run a collective with a constant input once, and never again: on this rank only, where
    the others' input is not constant (a batch of a known size here, of an unknown size there).
    """
    rows = tensor if tensor.shape.rank else tf.reshape(tensor, [-1])
    same = tf.reshape(rows[zero:], tf.shape(tensor)) if rows is not tensor else rows[zero:]
    same.set_shape(tensor.shape)
    return same


@functools.cache
def _token() -> tf.Variable:
    # Made by HorovodStrategy(), outside its scope: an ordinary variable of this process.
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, trainable=False, name=private_tf.ORDER_OF_COLLECTIVES)


def prepare() -> None:
    """Make what traced collectives need. Call it outside any scope, before the first of them."""
    _token()


def _as_list(outputs: tf.Tensor | list[tf.Tensor]) -> list[tf.Tensor]:
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]
