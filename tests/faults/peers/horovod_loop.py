"""A training loop on Horovod, written by hand as its examples do it.

    mpirun -np 2 python -m tests.faults.peers.horovod_loop FOLDER STEPS

Rank 0 saves and restores; all others get its values by a broadcast. Variables of Keras 3 are handed to Horovod as
TensorFlow's own, which it needs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from tests.faults.peers.data import (
    BATCH,
    KEEP,
    SAVE_EVERY,
    digest,
    epoch_of_batches,
    raise_if_asked,
    steps_per_epoch,
)
from tfdist.tasks.digits import Digits


def main(folder: Path, steps: int) -> None:
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.utils.set_random_seed(1)
    model = Digits().build_model()
    optimizer = keras.optimizers.Adam(3e-3)
    optimizer.build(model.trainable_variables)
    step = tf.Variable(0, dtype=tf.int64, trainable=False)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def train_step(images: Any, labels: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = cross_entropy(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        values = [variable.value for variable in model.trainable_variables]
        gradients = tape.gradient(loss, values)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, step=step)
    manager = tf.train.CheckpointManager(checkpoint, str(folder / "checkpoints"), max_to_keep=KEEP)
    newest = manager.latest_checkpoint
    if newest and hvd.rank() == 0:
        checkpoint.restore(newest).assert_existing_objects_matched()
    values = [variable.value for variable in (*model.variables, *optimizer.variables)]
    hvd.broadcast_variables([*values, step], root_rank=0)
    done = int(step.numpy())
    if hvd.rank() == 0:
        print(f"training on 2 ranks; resumed from {newest}: {done} of {steps} steps are done", flush=True)
    while done < steps:
        epoch, first = divmod(done, steps_per_epoch())
        batches = epoch_of_batches(epoch).shard(hvd.size(), hvd.rank()).batch(BATCH // hvd.size()).skip(first)
        for images, labels in batches.take(steps - done).prefetch(2):
            raise_if_asked(folder / "raise", hvd.rank())
            loss = train_step(images, labels)
            done += 1
            if done % 10 == 0 and hvd.rank() == 0:
                print(f"step {done} loss {float(loss):.4f}", flush=True)
            if done % SAVE_EVERY == 0:
                step.assign(done)
                if hvd.rank() == 0:
                    manager.save()
    if hvd.rank() == 0:
        result = {"steps": done, "sha256": digest([*model.variables, *optimizer.variables])}
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
