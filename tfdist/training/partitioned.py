"""An embedding whose table is cut into pieces, so that several parameter servers can hold it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UsageError

__all__ = ["PartitionedEmbedding"]


@keras.saving.register_keras_serializable("tfdist")
class PartitionedEmbedding(keras.layers.Layer):
    """`keras.layers.Embedding` with its rows in `partitions` variables, each with a contiguous range of ids.

    Variables go to the parameter servers in turn, and a step reads and writes only the rows that it
    needs, there. (Keras's own Embedding is one variable on one server, and is read whole.) It is the same layer on
    every backend. With sparse="gather" the gradients stay rows, too.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *,
        partitions: int,
        embeddings_initializer: Any = "uniform",
        mask_zero: bool = False,
        **kwargs: Any,
    ) -> None:
        """Say what the table is.

        Args:
            input_dim: ids are 0 to `input_dim - 1`; one outside gives an error on a CPU.
            output_dim: numbers in a row.
            partitions: pieces of the table; the first `input_dim mod partitions` hold one row more.
            embeddings_initializer: fills each piece by itself, with another seed for each. Where it is a function, that
                must not give the same numbers each time.
            mask_zero: whether id 0 is padding.

        Raises:
            UsageError: there are more pieces than rows, or a number is below 1.
        """
        super().__init__(**kwargs)
        for name, value in (("input_dim", input_dim), ("output_dim", output_dim), ("partitions", partitions)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise UsageError(f"{name}={value!r} of PartitionedEmbedding must be a whole number, 1 or more.")
        if partitions > input_dim:
            raise UsageError(f"partitions={partitions} of PartitionedEmbedding is more than its {input_dim} rows.")
        self.input_dim, self.output_dim, self.partitions = int(input_dim), int(output_dim), int(partitions)
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.supports_masking = mask_zero
        self.mask_zero = mask_zero

    def build(self, input_shape: Any = None) -> None:
        """Make the pieces."""
        even, more = divmod(self.input_dim, self.partitions)
        self.pieces = [
            self.add_weight(
                name=f"embeddings_{i}",
                shape=(even + (i < more), self.output_dim),
                initializer=self._initializer(i),
            )
            for i in range(self.partitions)
        ]

    def call(self, inputs: Any) -> tf.Tensor:
        """Rows of the table, shape `[*inputs.shape, output_dim]`."""
        ids = tf.cast(inputs, tf.int64)
        rows = tf.nn.embedding_lookup([piece.value for piece in self.pieces], ids)  # the v2 function cuts as build does
        return tf.cast(rows, self.compute_dtype)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Which ids are not 0, with `mask_zero`."""
        return keras.ops.not_equal(inputs, 0) if self.mask_zero else None

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The shape of the ids, and the length of a row."""
        return (*input_shape, self.output_dim)

    def get_config(self) -> dict[str, Any]:
        """What Keras saves."""
        return super().get_config() | {
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "partitions": self.partitions,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "mask_zero": self.mask_zero,
        }

    def _initializer(self, piece: int) -> Any:
        """One that draws other numbers for each piece: the same initializer would draw the same again."""
        initializer = self.embeddings_initializer
        if not isinstance(initializer, keras.initializers.Initializer):
            return initializer  # a function, which may do as it likes
        seed = getattr(initializer, "seed", None)
        if not isinstance(seed, int):
            return initializer
        return type(initializer).from_config(initializer.get_config() | {"seed": seed + piece})
