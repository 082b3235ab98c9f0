"""A strategy's scope in which variables are made in a way of our own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

__all__ = ["creating"]


class creating(contextlib.AbstractContextManager[tf.distribute.Strategy]):
    """The scope with a variable creator inside. Like TensorFlow's scopes, it can be entered again."""

    def __init__(self, scope: Any, creator: Callable[..., Any]) -> None:
        self._scope = scope
        self._creator = creator
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> tf.distribute.Strategy:
        with contextlib.ExitStack() as stack:
            inside = tf.distribute.has_strategy()
            strategy = stack.enter_context(self._scope)
            if not inside:
                stack.enter_context(tf.variable_creator_scope(self._creator))
            self._entered.append(stack.pop_all())
        return strategy

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
