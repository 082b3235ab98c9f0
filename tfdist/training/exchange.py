"""The exchange of a step: gradients, layers' state and the tally of all replicas, in as few collectives as possible.

default       one collective for everything; the division comes after
compression   first the tally, in float32; then the gradients, divided, in two bytes a number
adasum        first the tally; then each replica's own mean gradients, combined by Adasum
sparse        rows of tables are gathered besides
sync_every    nothing: a replica keeps its own mean gradients (see local_sgd.py)
reproducible  one collective that gathers the sums of shards; they are added up in a tree (see shards.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import tensorflow as tf

from tfdist.config import Settings
from tfdist.training.gradients import Gradient, is_sparse, on_values
from tfdist.training.local import TallyLayout
from tfdist.training.reduction import gather_over_replicas, sum_over_replicas
from tfdist.training.shards import sum_in_a_tree

__all__ = ["Combine", "Exchange"]

Combine: TypeAlias = Callable[[list[tf.Tensor]], list[tf.Tensor]]


class Exchange:
    """Knows what goes over the network, and what gradients are divided by."""

    def __init__(
        self, settings: Settings, layout: TallyLayout, adasum: Combine | None, *, fixed_shapes: bool = False
    ) -> None:
        self._fixed_shapes = fixed_shapes
        self._layout = layout
        self._by_weight = settings.loss_reduction == "weighted_mean"
        self._wire = None if settings.compression == "none" else tf.as_dtype(settings.compression)
        self._adasum = adasum if settings.reduction == "adasum" else None
        self._alone = settings.sync_every is not None
        self._in_a_tree = settings.reproducible

    def __call__(
        self, gradients: Sequence[Gradient], state: list[tf.Tensor], own: tf.Tensor, part_of: Sequence[int]
    ) -> tuple[list[Gradient], list[tf.Tensor], tf.Tensor]:
        """Inside the replica step (traced).

        Args:
            gradients: this replica's sums.
            own: its tally, which may hold more than the layout has.
            part_of: the part that each gradient belongs to.

        Returns:
            The gradients of the mean loss, the sums of the state, and the sum of the tally.
        """
        if self._alone:
            return self._divided(gradients, own, part_of), state, own
        if self._in_a_tree:
            *sums, tally = sum_in_a_tree([*gradients, *state, own])
            return self._divided(sums[: len(gradients)], tally, part_of), sums[len(gradients) :], tally
        if self._adasum is None and self._wire is None:
            dense = [g for g in gradients if not is_sparse(g)]
            *sums, tally = sum_over_replicas([*dense, *state, own])
            summed = self._with_rows(gradients, sums[: len(dense)])
            return self._divided(summed, tally, part_of), sums[len(dense) :], tally
        *state, tally = sum_over_replicas([*state, own])
        if self._adasum is not None:
            means = [tf.cast(g, tf.float32) for g in self._divided(gradients, own, part_of)]
            return list(self._adasum(means)), state, tally
        # Divided before they are halved in precision: a sum over many rows would not fit into it.
        parts = self._divided(gradients, tally, part_of)
        sums = sum_over_replicas([g for g in parts if not is_sparse(g)], self._wire)
        return self._with_rows(parts, sums), state, tally

    def divisors(self, tally: tf.Tensor) -> tf.Tensor:
        """What the sums of each part are divided by."""
        _, weights, counts, _ = self._layout.of_parts(tally)
        return weights if self._by_weight else counts

    def _divided(self, gradients: Sequence[Gradient], tally: tf.Tensor, part_of: Sequence[int]) -> list[Gradient]:
        divisors = tf.unstack(self.divisors(tally))
        return [_over(g, divisors[part]) for g, part in zip(gradients, part_of, strict=True)]

    def _with_rows(self, gradients: Sequence[Gradient], dense: Sequence[tf.Tensor]) -> list[Gradient]:
        """The sums of dense gradients, and between them those of sparse ones."""
        sums = iter(dense)
        sparse = [g for g in gradients if is_sparse(g)]
        rows = iter(gather_over_replicas(sparse, self._wire, sums_first=not self._fixed_shapes))
        return [next(rows) if is_sparse(g) else next(sums) for g in gradients]


def _over(gradient: Gradient, divisor: tf.Tensor) -> Gradient:
    return on_values(gradient, lambda values: tf.math.divide_no_nan(values, tf.cast(divisor, values.dtype)))
