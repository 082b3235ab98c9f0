"""TensorFlow's guide to the strategy API as one program, on any strategy.

    mpirun -np 2 python docs/examples/strategy_guide.py --strategy horovod
    mpirun -np 2 python docs/examples/strategy_guide.py --strategy multi_worker_mirrored
    python docs/examples/strategy_guide.py --strategy mirrored --replicas 2

One line differs between them: the one that makes the strategy. Every rank prints the same last line, and with two
replicas all strategies do, bit for bit; with more, sums have another order on each.
The usual mistakes are marked with "Mistake:".
"""

import argparse
import hashlib

import tfdist

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--strategy", default="one_device")
parser.add_argument("--replicas", type=int)
parser.add_argument("--epochs", type=int, default=5)
options = parser.parse_args()

# The one line. Mistake: making it after other TensorFlow operations; devices, threads and servers are settled by then.
strategy = tfdist.strategy(options.strategy, replicas=options.replicas)

import keras  # noqa: E402
import numpy as np  # noqa: E402
import sklearn.datasets  # noqa: E402
import tensorflow as tf  # noqa: E402

GLOBAL_BATCH = 64

digits = sklearn.datasets.load_digits()
images, labels = (digits.images[..., None] / 16).astype(np.float32), digits.target.astype(np.int32)
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(labels), seed=0)
# Mistake: keeping a last batch that is smaller than GLOBAL_BATCH, by which the loss is divided below.
dataset = dataset.batch(GLOBAL_BATCH, drop_remainder=True)
# Mistake: iterating over `dataset` itself. Every replica would then train on every example.
distributed = strategy.experimental_distribute_dataset(dataset)

keras.utils.set_random_seed(0)
with strategy.scope():  # variables that are made here exist on every replica, with one initial value
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="silu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.Adam(3e-3)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    # Mistake: a loss that averages by itself. It would average over the rows of one replica.
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    optimizer.build(model.trainable_variables)


def step(inputs):
    """Runs on each replica, on its rows of the global batch."""
    x, y = inputs
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        # Mistake: dividing by the rows of this replica. The optimizer adds the gradients of all replicas up.
        loss = tf.reduce_sum(loss_object(y, logits)) / GLOBAL_BATCH
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    accuracy.update_state(y, logits)
    return loss


@tf.function
def distributed_step(inputs):
    """One step on all replicas; returns the loss of the global batch."""
    # Mistake: taking one replica's loss for the loss. MEAN would also be wrong: each is a part of the sum.
    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(step, args=(inputs,)), axis=None)


loss = 0.0
for _ in range(options.epochs):
    losses = [distributed_step(batch) for batch in distributed]
    loss = float(tf.add_n(losses)) / len(losses)

digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in model.trainable_variables)).hexdigest()
print(f"loss {loss:.6f}  accuracy {float(accuracy.result()):.6f}  weights_sha256 {digest}", flush=True)
