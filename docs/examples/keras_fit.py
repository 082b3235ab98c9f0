"""Keras 3's compile, fit, evaluate and predict on any strategy.

    mpirun -np 2 python docs/examples/keras_fit.py --strategy horovod
    mpirun -np 2 python docs/examples/keras_fit.py --strategy multi_worker_mirrored
    python docs/examples/keras_fit.py --strategy mirrored --replicas 2

Losses and metrics are those of all replicas together. Every rank prints the same last line, and with two replicas all
strategies do, bit for bit; with more, sums have another order on each.
"""

import argparse
import hashlib

import tfdist

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--strategy", default="one_device")
parser.add_argument("--replicas", type=int)
parser.add_argument("--epochs", type=int, default=5)
options = parser.parse_args()

strategy = tfdist.strategy(options.strategy, replicas=options.replicas)  # before any other TensorFlow operation

import keras  # noqa: E402
import numpy as np  # noqa: E402
import sklearn.datasets  # noqa: E402

digits = sklearn.datasets.load_digits()
images, labels = (digits.images[..., None] / 16).astype(np.float32), digits.target.astype(np.int32)
test = np.arange(len(labels)) % 5 == 4

keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

# batch_size is the global one. The chief alone shows lines or bars, and alone writes what callbacks write.
model.fit(
    images[~test],
    labels[~test],
    batch_size=64,
    epochs=options.epochs,
    verbose=2,
    validation_data=(images[test], labels[test]),
    callbacks=[keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)],
)
loss, accuracy = model.evaluate(images[test], labels[test], batch_size=64, verbose=0)
# All rows, in their order, on every rank.
right = (model.predict(images[test], batch_size=64, verbose=0).argmax(1) == labels[test]).mean()

digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in model.trainable_variables)).hexdigest()
print(f"loss {loss:.6f}  accuracy {accuracy:.6f}  accuracy of predict {right:.6f}  weights_sha256 {digest}", flush=True)
