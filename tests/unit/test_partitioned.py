"""A table in pieces is the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist import PartitionedEmbedding
from tfdist.errors import UsageError

IDS = np.array([[0, 6, 3], [2, 2, 5]])


@pytest.mark.parametrize("partitions", [1, 2, 3, 7])
def test_it_gives_what_keras_gives_with_the_same_rows(partitions: int) -> None:
    layer = PartitionedEmbedding(7, 4, partitions=partitions)
    layer.build()
    table = np.concatenate(layer.get_weights())
    whole = keras.layers.Embedding(7, 4, weights=[table])
    assert [len(piece) for piece in layer.get_weights()] == [
        7 // partitions + (i < 7 % partitions) for i in range(partitions)
    ]
    assert np.array_equal(layer(IDS), whole(IDS))


@pytest.mark.parametrize("initializer", ["uniform", "glorot_uniform", "random_normal", keras.initializers.HeNormal(3)])
def test_all_rows_begin_differently(initializer: Any) -> None:
    layer = PartitionedEmbedding(12, 4, partitions=4, embeddings_initializer=initializer)
    layer.build()
    assert len(np.unique(np.concatenate(layer.get_weights()), axis=0)) == 12


def test_a_seed_gives_the_same_table_again_and_a_function_fills_it() -> None:
    tables = []
    for _ in range(2):
        keras.utils.set_random_seed(5)
        layer = PartitionedEmbedding(6, 2, partitions=3)
        layer.build()
        tables.append(np.concatenate(layer.get_weights()))
    assert np.array_equal(*tables)
    ones = PartitionedEmbedding(
        6, 2, partitions=3, embeddings_initializer=lambda shape, dtype=None: tf.ones(shape, dtype)
    )
    assert np.array_equal(ones(IDS % 6), np.ones((2, 3, 2)))


def test_gradients_are_rows_of_the_pieces() -> None:
    layer = PartitionedEmbedding(7, 2, partitions=2)  # ids 0 to 3, and 4 to 6
    layer.build()
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(layer(IDS))
    first, second = tape.gradient(total, [piece.value for piece in layer.pieces])
    assert np.array_equal(tf.convert_to_tensor(first)[:, 0], [1, 0, 2, 1])
    assert np.array_equal(tf.convert_to_tensor(second)[:, 0], [0, 1, 1])
    assert isinstance(first, tf.IndexedSlices) and isinstance(second, tf.IndexedSlices)


def test_it_is_saved_and_masks(tmp_path: Path) -> None:
    embedding = PartitionedEmbedding(7, 2, partitions=3, mask_zero=True, embeddings_initializer="ones")
    model = keras.Sequential([keras.Input((3,), dtype="int32"), embedding])
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert np.array_equal(again(IDS), model(IDS))
    assert np.array_equal(embedding.compute_mask(IDS), IDS != 0)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((7, 2, 8), "partitions=8 .* more than its 7 rows"),
        ((0, 2, 1), "input_dim=0"),
        ((7, True, 1), "output_dim=True"),
    ],
)
def test_what_cannot_be(arguments: tuple[int, int, int], told: str) -> None:
    rows, width, partitions = arguments
    with pytest.raises(UsageError, match=told):
        PartitionedEmbedding(rows, width, partitions=partitions)
