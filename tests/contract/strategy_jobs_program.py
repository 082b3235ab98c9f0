"""One job for test_strategy_jobs.py: python strategy_jobs_program.py BACKEND MODE. Each mode is a function below.

`several` does one after the other what leaves the processes in order: starting them is what takes time.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings

backend, mode = sys.argv[1:3]

if mode == "without_horovod":
    sys.modules["horovod"] = None  # as if it were not installed

if mode in ("late", "several"):
    import tensorflow as tf

    tf.constant(1.0) + 1.0

if backend == "horovod":
    import hvd_backend

    assert "tensorflow" not in sys.modules or mode in ("late", "several"), "importing hvd_backend imports TensorFlow"
    from tfdist.errors import TfdistError

    try:
        strategy = hvd_backend.HorovodStrategy()
    except TfdistError as error:
        sys.exit(f"{type(error).__name__}: {error}")
else:
    from tfdist.errors import TfdistError
    from tfdist.strategies.session import open_session
    from tfdist.strategies.table import Options

    try:
        strategy = open_session(backend, Options()).strategy
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

    def adasum():
        try:
            return strategy.run(lambda: strategy.extended.adasum([tf.ones([2])]))[0].numpy().tolist()
        except ValueError as error:
            return str(error)

    gathered = strategy.run(fn)
    say(
        size=size,
        mean=strategy.reduce("MEAN", tf.constant([rank, 1]), axis=None).numpy().tolist(),
        halves=strategy.reduce("MEAN", tf.constant([40000, rank, 1, 3], tf.float16), axis=None).numpy().tolist(),
        adasum=adasum(),
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
    try:
        strategy.reduce("SUM", tf.ones([2 + rank]), axis=None)
    except tf.errors.OpError as error:
        return str(error)


def compiled():
    step = tf.function(lambda x: strategy.reduce("SUM", x, axis=None), jit_compile=True)
    try:
        step(tf.constant(1.0))
    except NotImplementedError as error:
        return {"error": str(error), "total": total()}


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
    return {"train": counts["train"], "steps": optimizer.iterations.numpy().item()}


def ways(fn, inputs):
    """What `fn` gives on the replicas: eagerly, traced, traced for shapes of any length, and in a traced loop."""

    def run(*inputs):
        return strategy.run(fn, args=inputs)

    def loop(*inputs):
        outputs = [tf.zeros_like(x) for x in inputs]
        for _ in tf.range(3):
            outputs = run(*inputs)
        return outputs

    unknown = [tf.TensorSpec([None] * x.shape.rank, x.dtype) for x in inputs]
    yield "eager", run(*inputs)
    yield "traced", tf.function(run)(*inputs)
    yield "any shape", tf.function(run, input_signature=unknown)(*inputs)
    yield "loop", tf.function(loop)(*inputs)


def inputs_of(number, dtype):
    import numpy as np

    generator = np.random.default_rng(number)
    shapes = [(), (0,), (5,), (2, 3), (1, 4, 2)]
    return [tf.cast(generator.normal(size=shape) * 100, dtype) for shape in shapes]


def halves():
    """Sums and means of half precision, as bits: added in float32, then rounded."""
    wrong = []
    for dtype, op in ((tf.float16, "MEAN"), (tf.bfloat16, "SUM")):
        wide = [[tf.cast(x, tf.float32) for x in inputs_of(r, dtype)] for r in range(size)]
        sums = [tf.add_n(values) for values in zip(*wide, strict=True)]
        expected = [tf.cast(x / size if op == "MEAN" else x, dtype) for x in sums]

        def fn(*inputs, op=op):
            return tf.distribute.get_replica_context().all_reduce(op, list(inputs))

        for way, got in ways(fn, inputs_of(rank, dtype)):
            for x, y in zip(got, expected, strict=True):
                if (x.dtype, x.shape, x.numpy().tobytes()) != (y.dtype, y.shape, y.numpy().tobytes()):
                    wrong.append([dtype.name, op, way, str(x), str(y)])
    return {"wrong": wrong, "travels": traced_collectives(), "told": told()}


def traced_collectives():
    def step(*values):
        return strategy.reduce("SUM", list(values), axis=None)

    graph = tf.function(step).get_concrete_function(*inputs_of(rank, tf.bfloat16)).graph
    calls = [op for op in graph.get_operations() if op.type.startswith("Horovod")]
    return [[op.type, op.get_attr("T").name] for op in calls]


def told():
    """What ranks with other shapes hear: with parts of equal and of other sizes."""
    errors = []
    for shape in ([2 + rank, 3 - rank], [2 + 6 * rank]):
        try:
            strategy.reduce("SUM", tf.ones(shape, tf.float16), axis=None)
        except tf.errors.OpError as error:
            errors.append(str(error))
    return errors


def adasum_of(a, b):
    import numpy as np

    dot, a_squared, b_squared = np.sum(a * b), np.sum(a * a), np.sum(b * b)
    return (1 - dot / (2 * a_squared or 1)) * a + (1 - dot / (2 * b_squared or 1)) * b


def adasum():
    import numpy as np

    def fn(*inputs):
        return strategy.extended.adasum(list(inputs))

    def one(value, dtype="float32"):
        return strategy.run(fn, args=(tf.constant(value, dtype),))[0].numpy().tolist()

    said = {"equal": one([1, 2]), "orthogonal": one([1 - rank, 3 * rank]), "zero": one([rank, 2 * rank])}
    said["zeros"], said["angle"] = one([0, 0]), one([2, 2 * rank], "float64")
    worst = 0.0
    for dtype in (tf.float32, tf.float64):
        expected = [
            adasum_of(x.numpy(), y.numpy()) for x, y in zip(*(inputs_of(r, dtype) for r in (0, 1)), strict=True)
        ]
        for _, got in ways(fn, inputs_of(rank, dtype)):
            for x, y in zip(got, expected, strict=True):
                worst = max(worst, float(np.max(abs(x - y), initial=0) / np.finfo(x.dtype.as_numpy_dtype).eps))
    said["worst"] = worst
    for bad in (tf.constant(1.0, tf.bfloat16), tf.IndexedSlices(tf.constant([1.0]), [0], [2])):
        try:
            fn(bad)
        except TypeError as error:
            said[type(bad).__name__] = str(error)
    return said


def several():
    parts = (collectives, halves, adasum, compiled, different_reduce, callbacks)
    say(**{"total": total(), **{part.__name__: part() for part in parts}})
    lags()


def files():
    say(**callbacks())


def callbacks():
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
    return {**said, "numbers": [number.numpy().item() for number in numbers]}


globals()[mode]()
