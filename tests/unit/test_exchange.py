"""What becomes of gradients between the replicas' sums and the update; here with one replica.

That it sums over several is for the contract suite, with real collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tensorflow as tf

from tests.unit.one_device import STRATEGY
from tfdist import Settings
from tfdist.training.exchange import Exchange
from tfdist.training.gradients import is_sparse
from tfdist.training.local import TallyLayout


def tally(*parts: tuple[float, float]) -> tf.Tensor:
    """Of parts with (Σ weight, number of losses)."""
    values = [value for weight, count in parts for value in (0.0, weight, count, 0.0)]
    return tf.constant(values + [0.0] * (TallyLayout(len(parts)).length - len(values)))


def exchanged(
    gradients: Sequence[Any], own: tf.Tensor, part_of: Sequence[int] = (), *, adasum: Any = None, **settings: Any
) -> list[Any]:
    """The gradients after the exchange."""
    layout = TallyLayout(max(part_of, default=0) + 1)
    exchange = Exchange(Settings.of(**settings), layout, adasum)
    state = [tf.constant([7.0])]

    def run() -> Any:
        return exchange(gradients, state, own, part_of or [0] * len(gradients))

    result, same_state, same_tally = STRATEGY.run(run)
    assert [value.numpy().tolist() for value in same_state] == [[7.0]]
    assert same_tally.numpy().tolist() == own.numpy().tolist(), "the tally travels as it is"
    return result


def rows(*values: float) -> tf.IndexedSlices:
    """Row 2 of a table of three rows, several times."""
    return tf.IndexedSlices(tf.constant([[v] for v in values]), tf.fill([len(values)], 2), tf.constant([3, 1]))


@pytest.mark.parametrize(("kind", "right"), [("weighted_mean", [2.0, 4.0]), ("sum_over_batch", [1.0, 2.0])])
def test_gradients_are_divided_by_weights_or_by_losses(kind: str, right: list[float]) -> None:
    (got,) = exchanged([tf.constant([8.0, 16.0])], tally((4, 8)), loss_reduction=kind)
    assert got.numpy().tolist() == right


def test_each_part_has_its_own_divisor() -> None:
    got = exchanged([tf.constant(8.0)] * 3, tally((2, 0), (4, 0)), part_of=[0, 1, 0])
    assert [float(g) for g in got] == [4, 2, 4]


def test_without_weight_there_is_no_gradient() -> None:
    (got,) = exchanged([tf.constant([8.0])], tally((0, 4)))
    assert got.numpy().tolist() == [0]


@pytest.mark.parametrize("settings", [{}, {"compression": "bfloat16"}], ids=str)
def test_rows_of_tables_stay_rows_in_their_place(settings: dict[str, Any]) -> None:
    got = exchanged([rows(2.0, 4.0), tf.constant(8.0), rows(8.0)], tally((2, 0)), sparse="gather", **settings)
    assert [is_sparse(g) for g in got] == [True, False, True]
    assert [tf.convert_to_tensor(g).numpy().tolist() for g in got] == [[[0], [0], [3]], 4, [[0], [0], [4]]]


@pytest.mark.parametrize(("compression", "right"), [("none", 2049), ("float16", 2048), ("bfloat16", 2048)])
def test_compression_rounds_what_is_divided_already(compression: str, right: float) -> None:
    # 100 · 2049 does not fit into float16, whose largest number is 65504.
    (got,) = exchanged([tf.constant(204900.0)], tally((100, 100)), compression=compression)
    assert (got.dtype, float(got)) == (tf.float32, right)


def test_adasum_gets_the_means_and_what_it_gives_is_taken() -> None:
    def double(means: list[tf.Tensor]) -> list[tf.Tensor]:
        assert [m.dtype for m in means] == [tf.float32, tf.float32]
        return [2 * m for m in means]

    gradients = [tf.constant(8.0), tf.constant([4.0], tf.float64)]
    got = exchanged(gradients, tally((4, 0)), reduction="adasum", adasum=double)
    assert [g.numpy().tolist() for g in got] == [4, [2]]
    (plain,) = exchanged([tf.constant(8.0)], tally((4, 0)), adasum=double)
    assert float(plain) == 2, "it is not asked for"
