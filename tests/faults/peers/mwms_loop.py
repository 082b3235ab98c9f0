"""A training loop on MultiWorkerMirroredStrategy, written by hand as TensorFlow's multi-worker guide does it.

    TF_CONFIG=… python -m tests.faults.peers.mwms_loop FOLDER STEPS

All workers save, since some variables are combined while they are read; the others to a folder of their own, which they
remove. After a restart the newest checkpoint is restored, and training goes on within the epoch.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before any other operation

from tests.faults.peers.data import (  # noqa: E402
    BATCH,
    KEEP,
    SAVE_EVERY,
    digest,
    epoch_of_batches,
    raise_if_asked,
    steps_per_epoch,
)
from tfdist.tasks.digits import Digits  # noqa: E402


def main(folder: Path, steps: int) -> None:
    keras.utils.set_random_seed(1)
    rank = strategy.cluster_resolver.task_id
    with strategy.scope():
        model = Digits().build_model()
        optimizer = keras.optimizers.Adam(3e-3)
        optimizer.build(model.trainable_variables)
        step = tf.Variable(0, dtype=tf.int64, trainable=False)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def replica_step(batch: Any) -> tf.Tensor:
        images, labels = batch
        with tf.GradientTape() as tape:
            losses = cross_entropy(labels, model(images, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    @tf.function
    def train_step(iterator: Any) -> tf.Tensor:
        losses = strategy.run(replica_step, args=(next(iterator),))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, step=step)
    own = folder / "checkpoints" if rank == 0 else folder / f"worker-{rank}"
    manager = tf.train.CheckpointManager(checkpoint, str(own), max_to_keep=KEEP)
    newest = tf.train.latest_checkpoint(str(folder / "checkpoints"))
    if newest:
        checkpoint.restore(newest).assert_existing_objects_matched()
    done = int(step.numpy())
    if rank == 0:
        print(f"training on 2 workers; resumed from {newest}: {done} of {steps} steps are done", flush=True)
    while done < steps:
        epoch, first = divmod(done, steps_per_epoch())
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
        batches = epoch_of_batches(epoch).batch(BATCH, drop_remainder=True).skip(first).with_options(options)
        iterator = iter(strategy.experimental_distribute_dataset(batches))
        for _ in range(min(steps - done, steps_per_epoch() - first)):
            raise_if_asked(folder / "raise", rank)
            loss = train_step(iterator)
            done += 1
            if done % 10 == 0 and rank == 0:
                print(f"step {done} loss {float(loss):.4f}", flush=True)
            if done % SAVE_EVERY == 0:
                step.assign(done)
                manager.save()
                if rank != 0:
                    shutil.rmtree(own)
    if rank == 0:
        result = {"steps": done, "sha256": digest([*model.variables, *optimizer.variables])}
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
