"""What to train. A task is a set of recipes; the trainer decides where and when they are called."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tfdist.errors import UsageError

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from tfdist.training.replica import Replica

__all__ = ["Task", "in_float32", "unpack"]


@dataclasses.dataclass(kw_only=True)
class Task:
    """Base of all tasks. Subclass it as a dataclass; `--task-args name=value` sets its fields.

    The recipes are called on every process, inside the strategy's scope where that matters, so build things in
    them and not in `__init__`. Write them without regard to the number of replicas: the trainer shards, batches,
    sums over replicas and divides.
    """

    epochs: int = 1
    """Passes over the training split, where neither `epochs` nor `steps` is set for the run."""
    global_batch_size: int = 32
    """Examples per step over all replicas, where the run sets none."""
    learning_rate: float = 0.01
    """Base learning rate, where the run sets none."""

    def build_model(self) -> keras.Model:
        """The model with all its variables built. Called once, inside the strategy's scope."""
        raise NotImplementedError

    def build_optimizer(
        self, learning_rate: float
    ) -> keras.optimizers.Optimizer | dict[str, keras.optimizers.Optimizer]:
        """A Keras optimizer; plain SGD unless overridden. Called once, inside the strategy's scope.

        A task with several parts, such as a GAN, returns a dict of optimizers by name, and its `train_step` gives
        `replica.loss` and `replica.apply_gradients` these names.
        """
        import keras

        return keras.optimizers.SGD(learning_rate)

    def dataset(self, split: str) -> tf.data.Dataset | Any:
        """The examples of `split`, one by one: not shuffled, not batched, not sharded, not repeated.

        Returns:
            A `tf.data.Dataset` whose elements are `(inputs, labels)` or `(inputs, labels, weight)`, where inputs and
            labels may be nested; or a tuple of arrays of that structure, whose first axis counts the examples. It must
            give the same examples in the same order on every process. Tasks with their own `train_step` may
            use any structure.
        """
        raise NotImplementedError

    def losses(self, labels: Any, predictions: Any) -> tf.Tensor:
        """Loss of each example, shape `[rows]`. Do not average: the trainer does, over all replicas.

        Where the dataset gives weights of shape `[rows, tokens]`, or the model hands on a Keras mask of that shape,
        the losses may have it, too: each token then counts for itself. Predictions come in float32.
        """
        raise NotImplementedError

    def metrics(self) -> dict[str, keras.metrics.Metric]:
        """Fresh metrics by name, each updated with `(labels, predictions, sample_weight)` in evaluation.

        Their state must consist of sums over examples, as in Keras's own: it is added up over replicas and batches.
        """
        return {}

    def evaluation_splits(self) -> tuple[str, ...]:
        """Names of the splits that are evaluated; `dataset` is asked for each."""
        return ("test",)

    def augment(self, example: Any, seed: tf.Tensor) -> Any:
        """Change a training example at random; `example` is an element of `dataset("train")`. Optional.

        Called in the input pipeline (traced) on the rows of this process's replicas. Draw with `seed`, shape `[2]`, in
        TensorFlow's stateless operations: it is another one for each example and epoch, and the same on every backend
        and at every number of replicas. The structure and dtypes of the example must stay.
        """
        raise NotImplementedError

    def train_step(self, replica: Replica, batch: Any) -> None:
        """One step on this replica's rows. Runs inside the replica step (traced). Override it for your own step.

        Use `replica.loss(losses, weights)` for what the tape differentiates, and hand every gradient to
        `replica.apply_gradients`; the trainer reduces over replicas, divides and applies.
        """
        import tensorflow as tf

        from tfdist.private_tf import with_autograph
        from tfdist.training.private_keras import mask_of

        inputs, labels, weights = unpack(batch)
        with tf.GradientTape() as tape:
            outputs = replica.model(inputs, training=True)
            losses = with_autograph(self.losses)(labels, in_float32(outputs))
            loss = replica.loss(losses, weights, mask=mask_of(outputs))
        variables = replica.model.trainable_variables
        replica.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


def in_float32(values: Any) -> Any:
    """Half-precision tensors of a structure as float32: losses and metrics need more digits than layers do."""
    import tensorflow as tf

    half = (tf.float16, tf.bfloat16)
    return tf.nest.map_structure(lambda v: tf.cast(v, tf.float32) if getattr(v, "dtype", None) in half else v, values)


def unpack(batch: Any) -> tuple[Any, Any, Any]:
    """`(inputs, labels, weights)` of a batch; weights is None where the dataset gives none.

    Raises:
        UsageError: the batch has another structure.
    """
    if isinstance(batch, tuple) and len(batch) == 2:
        return batch[0], batch[1], None
    if isinstance(batch, tuple) and len(batch) == 3:
        return batch
    shape = f"a tuple of {len(batch)}" if isinstance(batch, tuple) else f"a {type(batch).__name__}"
    raise UsageError(
        f"the dataset's elements are {shape}, but the default step and evaluation need (inputs, labels) or "
        "(inputs, labels, weight). Change Task.dataset, or write your own train_step."
    )
