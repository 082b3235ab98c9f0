"""One job for test_strategy_jobs.py: python strategy_jobs_program.py BACKEND MODE. Each mode is a function below."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings

backend, mode = sys.argv[1:3]

if mode == "without_horovod":
    sys.modules["horovod"] = None  # as if it were not installed

if mode == "late":
    import tensorflow as tf

    tf.constant(1.0) + 1.0

if backend == "horovod":
    import hvd_backend

    assert "tensorflow" not in sys.modules or mode == "late", "importing hvd_backend imports TensorFlow"
    from tfdist.errors import TfdistError

    try:
        strategy = hvd_backend.HorovodStrategy()
    except TfdistError as error:
        sys.exit(f"{type(error).__name__}: {error}")
else:
    from tfdist.errors import TfdistError
    from tfdist.strategies.session import open_session

    try:
        strategy = open_session(backend, None, None).strategy
    except TfdistError as error:
        sys.exit(f"{type(error).__name__}: {error}")

import tensorflow as tf  # noqa: E402

resolver = strategy.cluster_resolver
rank = resolver.task_id or 0
size = strategy.num_replicas_in_sync


def total(value=1.0):
    return strategy.reduce("SUM", strategy.run(lambda: tf.constant(value)), axis=None).numpy().item()


def say(**values):
    print(json.dumps({"rank": rank, **values}), flush=True)


def late():
    say(total=total())


def without_horovod():
    say(total=total())


def sizes():
    import keras
    import numpy as np

    keras.utils.set_random_seed(rank)  # rank 0's values are taken
    with strategy.scope():
        v = tf.Variable(tf.random.normal([2]), aggregation=tf.VariableAggregation.SUM)
        text = tf.Variable(["a", str(rank)])
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
    data = np.arange(22.0).reshape(11, 2).astype("float32")
    history = model.fit(data, data[:, :1], batch_size=6, epochs=2, verbose=0, shuffle=False).history

    def fn():
        context = tf.distribute.get_replica_context()
        number = tf.cast(context.replica_id_in_sync_group, tf.float32)
        v.assign(tf.stack([number, 1.0]))
        return context.all_gather(tf.fill([context.replica_id_in_sync_group + 1], number), axis=0)

    gathered = strategy.run(fn)
    say(
        size=size,
        mean=strategy.reduce("MEAN", tf.constant([rank, 1]), axis=None).numpy().tolist(),
        gathered=gathered.numpy().tolist(),
        variable=v.numpy().tolist(),
        text=text.numpy().astype(str).tolist(),
        history=history,
        weights=[w.numpy().tolist() for w in model.weights],
        predicted=model.predict(data, batch_size=4, verbose=0).shape[0],
        threads=tf.config.threading.get_intra_op_parallelism_threads(),
        chief=strategy.extended.should_checkpoint,
        cluster=len(resolver.cluster_spec().as_dict().get("worker", [])),
        resident=os.environ.get("KERAS_BACKEND"),
    )


def fails():
    """The last rank raises while the others wait for it."""
    total()
    if rank == size - 1:
        raise ValueError("the first cause")
    time.sleep(0.5)
    total()


def leaves():
    """The last rank is done while the others wait for it in a collective."""
    total()
    if rank < size - 1:
        total()


def dies():
    total()
    if rank == size - 1:
        os._exit(0)  # without a word
    total()


def lags():
    """One rank still works, outside of collectives, while the others are done."""
    total()
    if rank == 0:
        time.sleep(7)
    say(done=True)


def different_shapes():
    with strategy.scope(), tf.name_scope("tower"):
        tf.Variable(tf.ones([2]), name="same")
        tf.Variable(tf.ones([3 + rank]), name="kernel")


def different_reduce():
    strategy.reduce("SUM", tf.ones([2 + rank]), axis=None)


def compiled():
    step = tf.function(lambda x: strategy.reduce("SUM", x, axis=None), jit_compile=True)
    try:
        step(tf.constant(1.0))
    except NotImplementedError as error:
        say(error=str(error), total=total())


def collectives():
    """How many collectives one Keras training step traces, and names."""
    import keras
    import numpy as np

    from tfdist import private_tf

    with strategy.scope():
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(3), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def train(x):
        strategy.run(step, args=(x,))

    train(tf.constant(np.ones([2, 2]), tf.float32))
    counts = {graph.name: dict(kinds) for graph, kinds in private_tf._collectives_of.items()}
    say(train=counts["train"], steps=optimizer.iterations.numpy().item())


def files():
    """Callbacks of `fit` whose folders only look the same on all ranks."""
    import keras
    import numpy as np

    folder = os.path.join(sys.argv[3], str(rank))  # as on hosts that do not share their disks
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = np.ones([8, 2], "float32")
    backup = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    model.fit(data, data[:, :1], epochs=2, verbose=2, callbacks=[backup])
    kept = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    try:
        model.fit(data, data[:, :1], epochs=4, verbose=2, callbacks=[backup])
    except TfdistError as error:
        said = {"kept": kept, "error": f"{type(error).__name__}: {error}"}
    try:
        model.fit(data, data[:, :1], epochs=2 + rank, verbose=2)
    except TfdistError as error:
        said["epochs"] = f"{type(error).__name__}: {error}"
    own_metric = keras.metrics.MeanSquaredError("own")
    with strategy.scope():
        model.compile("sgd", "mse", metrics=[own_metric])
    try:
        model.fit(data, data[:, :1], verbose=2)
    except TfdistError as error:
        said["metric"] = f"{type(error).__name__}: {error}"
    alone = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    alone.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        alone.fit(data, data[:, :1], verbose=0)
    said["warned"] = [str(warning.message) for warning in caught]
    shuffled = tf.data.Dataset.range(8).shuffle(8).batch(4)
    together = strategy.experimental_distribute_dataset(shuffled)
    said["read"] = len(list(together)) + len(list(shuffled)) + len(list(together))
    if rank == 0:
        next(iter(shuffled))
    try:
        iter(together)
    except TfdistError as error:
        said["order"] = f"{type(error).__name__}: {error}"
    tf.random.set_seed(5)
    numbers = strategy.run(lambda: [tf.random.normal([]), tf.random.stateless_normal([], [1, 2])])
    say(**said, numbers=[number.numpy().item() for number in numbers])


globals()[mode]()
