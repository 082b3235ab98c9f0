"""What a traced step tells: checksums of bits and places, sums that add up over pieces, and a file at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.toy import ToyNet
from tests.unit.one_device import SESSION, trainer
from tfdist import Settings, UsageError
from tfdist.training.trace import FIELDS, Trace, see, see_batch

VALUES = np.random.RandomState(0).randn(3, 4).astype(np.float32)


def checksum(value: Any) -> int:
    return int(see([tf.constant(value)]).checksums[0, 0])


def test_one_bit_or_another_order_changes_the_checksum() -> None:
    other = VALUES.copy()
    other[2, 3] = np.nextafter(other[2, 3], np.float32(9))
    assert len({checksum(v) for v in (VALUES, other, VALUES[::-1].copy(), -VALUES)}) == 4
    assert checksum(np.float32(0.0)) != checksum(np.float32(-0.0))
    assert checksum(VALUES) == checksum(VALUES.copy())


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64, tf.int32, tf.bool])
def test_types(dtype: tf.DType) -> None:
    a, b = tf.cast([0, 1, 1], dtype), tf.cast([1, 0, 1], dtype)
    assert int(see([a]).checksums[0, 0]) != int(see([b]).checksums[0, 0])
    assert float(see([a]).sizes[0, 0]) == 2


def test_sums_have_signs_and_sizes_have_none() -> None:
    seen = see([tf.constant(VALUES)])
    assert float(seen.sizes[0, 0]) == pytest.approx(np.abs(VALUES).sum(), rel=1e-6)
    signs = [float(see([tf.one_hot(i, 12)]).sums[0, 0]) for i in range(12)]
    assert set(signs) == {-1.0, 1.0}
    assert float(seen.sums[0, 0]) == pytest.approx(float(np.dot(signs, VALUES.ravel())), rel=1e-6)


def test_pieces_are_rows() -> None:
    stacked = see([tf.constant(np.stack([VALUES, 2 * VALUES])), tf.constant([[1.0], [2.0]])], 2)
    assert [part.shape for part in stacked] == [[2, 2]] * 3
    assert int(stacked.checksums[0, 0]) == checksum(VALUES)
    assert float(stacked.sums[1, 0]) == pytest.approx(2 * float(stacked.sums[0, 0]))


BATCHES: dict[str, Any] = {
    "floats": VALUES,
    "whole numbers": np.arange(12).reshape(3, 4),
    "texts": np.array([["a", "b"], ["c", "d"], ["e", ""]]),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_is_known_by_its_rows_in_any_order_and_split(kind: str) -> None:
    rows, labels = BATCHES[kind], np.array([1, 2, 3])

    def total(order: list[int]) -> int:
        return int(see_batch((tf.constant(rows[order]), tf.constant(labels[order]))))

    whole = total([0, 1, 2])
    assert whole == total([2, 0, 1]) == int(np.int64(total([0])) + np.int64(total([1, 2])))
    assert whole != total([0, 1, 1])
    swapped = see_batch((tf.constant(rows), tf.constant(labels[[1, 0, 2]])))
    assert whole != int(swapped)


def test_ragged_and_sparse_rows() -> None:
    ragged = [tf.ragged.constant([[1, 2], [3]]), tf.ragged.constant([[1], [2, 3]])]
    sparse = [tf.sparse.from_dense([[1, 0], [0, 2]]), tf.sparse.from_dense([[0, 1], [0, 2]])]
    for a, b in (ragged, sparse):
        assert int(see_batch(a)) == int(see_batch(a))
        assert int(see_batch(a)) != int(see_batch(b))


@pytest.mark.parametrize("rank", [1, 2])
def test_ragged_rows_do_not_depend_on_those_beside_them(rank: int) -> None:
    rows = [[[1, 2], [3]], [[4, 5, 6]], [[7], [], [8, 9]], []] if rank == 2 else [[1, 2], [3], [], [4, 5, 6]]
    values: Any = tf.ragged.constant(rows, ragged_rank=rank, dtype=tf.int32)

    def total(order: list[int]) -> int:
        return int(see_batch(tf.gather(values, order)))

    whole = total([0, 1, 2, 3])
    assert whole == total([3, 1, 0, 2]) == int(np.array([total(part) for part in ([0], [1, 3], [2])]).sum())
    assert whole != total([0, 1, 2, 2])


def test_ragged_rows_are_known_by_their_inner_parts() -> None:
    kinds = [
        [[1, 2], [3]],
        [[1], [2, 3]],
        [[1, 2, 3]],
        [[1, 2], [], [3]],
        [[3], [1, 2]],
        [[2, 1], [3]],
        [[0, 1, 2], [3]],
    ]
    sums = {int(see_batch(tf.ragged.constant([kind], ragged_rank=2, dtype=tf.int32))) for kind in kinds}
    assert len(sums) == len(kinds)


def test_values_of_bfloat16_come_back_as_numbers(tmp_path: Path) -> None:
    variable = tf.Variable(tf.cast([1.5, -2.0], tf.bfloat16))
    trace = Trace(tmp_path / "t.npz")
    trace.begin({"v": variable})
    trace.add([np.zeros((1, 1, 1), np.int64) for _ in FIELDS])
    trace.write(SESSION, [variable], {"v": variable}, np.zeros(1, np.float32), 1)
    with np.load(tmp_path / "t.npz") as told:
        assert told["value/v"].dtype == np.float32
        assert told["value/v"].tolist() == [1.5, -2.0]
        assert int(told["replicas"]) == 1


def test_a_traced_run_has_the_same_numbers_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.npz"
    traced = trainer(ToyNet(), steps=5, trace=file).fit()
    plain = trainer(ToyNet(), steps=5).fit()
    assert traced.state_sha256 == plain.state_sha256
    with np.load(file) as told:
        assert told["losses"].tolist() == traced.losses
        assert [told[name].shape[:2] for name in FIELDS] == [(5, 1)] * len(FIELDS)
        trained, variables = told["trained"].tolist(), told["variables"].tolist()
        assert set(trained) < set(variables)
        assert all(f"value/{name}" in told for name in variables)
        assert told["reduced sums"].shape[2] == len(trained)
        assert told["after checksums"].shape[2] == told["initial"].shape[1] == len(variables)
        assert int(told["addends"]) == 16  # rows of a batch; layers without places
        # Each step changes each weight, and the last checksums are those of the values at the end.
        assert all((np.diff(told["after checksums"][:, 0, variables.index(name)]) != 0).all() for name in trained)
        last = [checksum(told[f"value/{name}"]) for name in variables]
        assert told["after checksums"][-1, 0].tolist() == last


def test_the_rows_of_each_step_are_told(tmp_path: Path) -> None:
    batches = []
    for seed in (0, 0, 1):
        trainer(ToyNet(), steps=4, trace=tmp_path / "t.npz", seed=seed).fit()
        with np.load(tmp_path / "t.npz") as told:
            batches.append(told["batch"].ravel().tolist())
    assert batches[0] == batches[1]
    assert not set(batches[0]) & set(batches[2])


def test_local_steps_cannot_be_traced() -> None:
    with pytest.raises(UsageError, match="sync_every=2 and trace"):
        Settings.of(backend="horovod", sync_every=2, trace="t.npz")
