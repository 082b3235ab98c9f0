"""Checks of programs with Keras. Each yields (what, value); see strategy_program.py."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.contract import strategy_checks
from tests.contract.strategy_checks import FOLDER, some  # all ranks write the same files in the folder
from tests.full import full

SUM = tf.distribute.ReduceOp.SUM
rng = np.random.default_rng(3)
X = rng.normal(size=(52, 6)).astype("float32")
Y = (X[:, 0] + X[:, 1] * X[:, 2] > 0).astype("int64") + (X[:, 3] > 1)


def weights(model):
    return [w.numpy().tolist() for w in model.weights]


def dense(s, optimizer=lambda: keras.optimizers.Adam(0.05), **compiled):
    keras.utils.set_random_seed(11)
    with s.scope():
        model = keras.Sequential([keras.Input([6]), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])
        model.compile(
            **{
                "optimizer": optimizer(),
                "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                "metrics": ["accuracy"],
                **compiled,
            }
        )
    return model


def check_guide(s):
    """The program of TensorFlow's guide to custom training with a strategy."""
    keras.utils.set_random_seed(5)
    with s.scope():
        model = keras.Sequential([keras.Input([6]), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])
        optimizer = keras.optimizers.Adam(0.01)
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        # Native strategies fail on a function with collectives that makes variables.
        optimizer.build(model.trainable_variables)
        seen = keras.metrics.Mean()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    data = s.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8))

    def step(inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            out = model(x, training=True)
            each = loss_object(y, out)
            loss = tf.nn.compute_average_loss(each, global_batch_size=8)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        seen.update_state(each)
        accuracy.update_state(y, out)
        return loss

    @tf.function
    def train(x):
        return s.reduce(SUM, s.run(step, args=(x,)), axis=None)

    losses = [train(x) for _ in range(3) for x in data]
    yield "losses", losses
    yield "weights", weights(model)
    yield "metrics", [seen.result(), accuracy.result()]
    yield "iterations", optimizer.iterations


def check_fit(s):
    model = dense(s)
    history = model.fit(X, Y, batch_size=8, epochs=3, verbose=0, shuffle=False, validation_data=(X[:20], Y[:20]))
    yield "history", history.history
    yield "weights", weights(model)
    yield "evaluate", model.evaluate(X, Y, batch_size=8, verbose=0)
    yield "predict", model.predict(X[:13], batch_size=4, verbose=0)
    yield (
        "predict dataset",
        model.predict(tf.data.Dataset.from_tensor_slices(X[:13]).batch(4), verbose=0).shape,
    )
    yield "on batch", [model.train_on_batch(X[:4], Y[:4]), model.test_on_batch(X[:4], Y[:4])]
    yield "predict on batch", model.predict_on_batch(X[:4]).shape


def check_fit_shuffled(s):
    model = dense(s)
    history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    yield "history", history.history
    yield "weights", weights(model)


def check_fit_options(s):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    model = dense(s)
    yield "class weights", model.fit(data, epochs=1, verbose=0, class_weight={0: 1.0, 1: 2.0, 2: 0.5}).history
    model = dense(s, weighted_metrics=["accuracy"])
    w = np.linspace(0, 1, 52).astype("float32")
    yield "sample weights", model.fit(X, Y, sample_weight=w, batch_size=8, shuffle=False, verbose=0).history
    model = dense(s)
    yield "infinite", model.fit(data.repeat(), steps_per_epoch=5, epochs=2, verbose=0).history
    model = dense(s)
    yield (
        "validation split",
        model.fit(X, Y, batch_size=8, validation_split=0.25, shuffle=False, verbose=0).history,
    )
    model = dense(s, run_eagerly=True)
    yield "eager", model.fit(data.take(3), verbose=0).history
    if full():
        model = dense(s, jit_compile="auto")
        yield "jit auto", model.fit(data.take(3), verbose=0).history
    yield "generator", dense(s).fit(batches(), steps_per_epoch=3, verbose=0).history


def check_steps_per_execution(s):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    model = dense(s, steps_per_execution=3)
    yield "steps per execution", model.fit(data, epochs=2, verbose=0).history
    yield "steps per execution, evaluate", model.evaluate(data, verbose=0)
    yield "steps per execution, predict", model.predict(X[:40], batch_size=8, verbose=0).shape
    model = dense(s)
    yield "the same step by step", model.fit(data, epochs=2, verbose=0).history


def batches():
    while True:
        yield X[:8], Y[:8]


def check_callbacks(s):
    def fit(model, *callbacks, **options):
        return model.fit(X, Y, **{"batch_size": 8, "shuffle": False, "verbose": 0, "callbacks": callbacks, **options})

    stop = keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=1)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", min_delta=10.0, patience=1)
    log, events = FOLDER / "log.csv", FOLDER / "events"
    writers = keras.callbacks.CSVLogger(log), keras.callbacks.TensorBoard(events)
    yield "early stopping", fit(dense(s), stop, plateau, *writers, epochs=6).history
    yield "log", [line.split(",")[0] for line in log.read_text().splitlines()]
    yield "events", len(list(events.glob("train/*")))
    model = dense(s)
    best = FOLDER / "best.weights.h5"
    for _ in range(3 if full() else 1):  # ranks that write at one time fail now and then
        fit(model, keras.callbacks.ModelCheckpoint(best, save_weights_only=True))
        again = dense(s)
        again.load_weights(best)
        yield "checkpoint", weights(again) == weights(model)
    each = FOLDER / "epoch-{epoch}.keras"
    fit(dense(s), keras.callbacks.ModelCheckpoint(each, save_best_only=True, monitor="accuracy"), epochs=2)
    yield "checkpoints", sorted(path.name for path in FOLDER.glob("epoch-*"))
    for _ in range(5 if full() else 2):
        model.save(FOLDER / "model.keras")
        model.save_weights(FOLDER / "model.weights.h5")
        with s.scope():
            loaded = keras.saving.load_model(FOLDER / "model.keras")
        again.load_weights(FOLDER / "model.weights.h5")
        yield "saved model", [weights(loaded) == weights(model), weights(again) == weights(model)]
    yield "goes on", fit(loaded).history
    for name in some(["exported"], "exported"):
        model.export(FOLDER / name, verbose=False)
        s.reduce(
            SUM, s.run(lambda: tf.constant(1.0)), axis=None
        )  # a SavedModel is several files: read it when no rank writes any more
        exported = tf.saved_model.load(FOLDER / name)
        yield "exported", exported.serve(X[:3]).shape.as_list()
    backup = keras.callbacks.BackupAndRestore(FOLDER / "backup", delete_checkpoint=False)
    fit(dense(s), backup, epochs=2)
    model = dense(s)
    yield "backup", [fit(model, backup, epochs=4).epoch, weights(model)]
    yield "left behind", sorted(path.name for path in FOLDER.glob(".*"))


def check_schedule(s):
    model = dense(
        s,
        optimizer=lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5), momentum=0.9),
    )
    yield "schedule", model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    yield "weights", weights(model)
    for name in some(["RMSprop", "Lamb"], "AdamW", "Adagrad", "Adafactor", "Lion", "Nadam", "Ftrl"):
        model = dense(s, optimizer=lambda name=name: getattr(keras.optimizers, name)(0.01))
        yield name, model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history
    model = dense(s, optimizer=lambda: keras.optimizers.Adam(0.01, use_ema=True, weight_decay=0.01))
    yield "ema", [model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history, weights(model)]


def fit(s, build, x, y, loss="mse", **options):
    keras.utils.set_random_seed(2)
    with s.scope():
        model = build()
        model.compile(optimizer=keras.optimizers.Adam(0.01), loss=loss, **options)
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return [history.history, weights(model)]


def check_layers(s):
    L = keras.layers
    image = rng.normal(size=(24, 8, 8, 1)).astype("float32")
    target = image.mean(axis=(1, 2))
    tokens = rng.integers(0, 50, size=(24, 7))

    def cnn(synchronized):
        return lambda: keras.Sequential(
            [
                keras.Input([8, 8, 1]),
                L.Conv2D(4, 3),
                L.BatchNormalization(synchronized=synchronized),
                L.ReLU(),
                L.Flatten(),
                L.Dense(1),
            ]
        )

    yield "synchronized batch normalization", fit(s, cnn(True), image, target)

    def embedded():
        return keras.Sequential(
            [keras.Input([7], dtype="int32"), L.Embedding(50, 4), L.GlobalAveragePooling1D(), L.Dense(1)]
        )

    yield "embedding", fit(s, embedded, tokens, target)

    def several():
        a, b = keras.Input([8], name="a"), keras.Input([8], name="b")
        h = L.Dense(4)(L.Concatenate()([a, b]))
        return keras.Model({"a": a, "b": b}, {"p": L.Dense(1, name="p")(h), "q": L.Dense(2, name="q")(h)})

    x = {"a": image[:, 0, :, 0], "b": image[:, 1, :, 0]}
    yield (
        "several inputs and outputs",
        fit(s, several, x, {"p": target, "q": np.repeat(target, 2, 1)}, loss={"p": "mse", "q": "mae"}),
    )

    def penalty():
        return keras.Sequential(
            [keras.Input([6]), L.Dense(4, kernel_regularizer="l2", activity_regularizer="l1"), L.Dense(1)]
        )

    yield "regularized", fit(s, penalty, X[:24], target)

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = L.Dense(4, "tanh")
            self.out = L.Dense(1)

        def call(self, x):
            return self.out(self.hidden(x))

    yield "subclassed", fit(s, Own, X[:24], target)

    if full():
        yield from sequences(s, image[..., 0], target)


def sequences(s, x, target):
    L = keras.layers
    yield "recurrent", fit(s, lambda: keras.Sequential([keras.Input([8, 8]), L.LSTM(5), L.Dense(1)]), x, target)
    both = lambda: keras.Sequential([keras.Input([8, 8]), L.Bidirectional(L.GRU(3)), L.Dense(1)])  # noqa: E731
    yield "gru", fit(s, both, x, target)

    def block():
        x = inputs = keras.Input([8, 8])
        x = L.LayerNormalization()(x + L.MultiHeadAttention(2, 4)(x, x))
        x = x + L.Dense(8, "gelu")(x)
        return keras.Model(inputs, L.Dense(1)(L.GlobalAveragePooling1D()(x)))

    yield "transformer", fit(s, block, x, target)


def check_mixed_precision(s):
    def mixed():
        return keras.Sequential([keras.Input([6]), keras.layers.Dense(4), keras.layers.Dense(1, dtype="float32")])

    for kind in some(["float16"], "bfloat16"):
        keras.mixed_precision.set_global_policy(f"mixed_{kind}")
        try:
            yield kind, fit(s, mixed, X[:24], X[:24, :1])
        finally:
            keras.mixed_precision.set_global_policy("float32")


def check_uneven_fit(s):
    """Batches that do not divide evenly, from the first on; MirroredStrategy cannot build the model from them."""
    for rows in some([1], 5):
        model = dense(s, optimizer=lambda: keras.optimizers.SGD(0.0))
        history = model.fit(X[:rows], Y[:rows], batch_size=5, epochs=2, shuffle=False, verbose=0).history
        logits = model.predict(X[:rows], batch_size=5, verbose=0)
        each = keras.losses.sparse_categorical_crossentropy(Y[:rows], logits, from_logits=True)
        loss, accuracy = float(np.mean(each)), float(np.mean(np.argmax(logits, 1) == Y[:rows]))
        yield f"{rows} rows", np.allclose([history["loss"], history["accuracy"]], [[loss] * 2, [accuracy] * 2])
        yield f"{rows} rows evaluated", np.allclose(model.evaluate(X[:rows], Y[:rows], 5, verbose=0), [loss, accuracy])
        model = dense(s)
        model.fit(X[:rows], Y[:rows], batch_size=5, verbose=0)
        yield (
            f"{rows} rows, weights",
            bool(np.isfinite(np.concatenate([w.numpy().ravel() for w in model.weights])).all()),
        )


def check_overflow(s):
    """float16 gradients overflow on one replica only: no replica makes the step."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        for replica in (0, 1):
            with s.scope():
                model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, kernel_initializer="ones")])
                model.compile("sgd", "mse")
            x = np.ones([8, 1], "float32")
            x[4 * replica + 2] = 60000.0
            model.fit(x, np.zeros([8, 1]), batch_size=8, shuffle=False, verbose=0)
            optimizer = model.optimizer
            yield f"on {replica}", [weights(model), optimizer.dynamic_scale, optimizer.iterations]
            model.fit(np.ones([8, 1], "float32"), np.zeros([8, 1]), batch_size=8, shuffle=False, verbose=0)
            yield f"after {replica}", [weights(model), optimizer.dynamic_scale, optimizer.iterations]
    finally:
        keras.mixed_precision.set_global_policy("float32")


class Sum(keras.metrics.Metric):
    """The sum of all labels, whoever sees them."""

    def __init__(self):
        super().__init__(name="sum")
        self.total = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(tf.cast(y_true, tf.float32)))

    def result(self):
        return self.total


def check_rows(s):
    """Without any seed, `fit` sees every row once."""
    tf.random.set_seed(None)
    try:
        with s.scope():
            model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=[Sum()])
        rows = np.arange(64.0, dtype="float32")[:, None]
        yield "arrays", model.fit(0 * rows, rows, batch_size=8, epochs=3, verbose=0).history["sum"]
        data = tf.data.Dataset.from_tensor_slices((0 * rows, rows)).shuffle(64).batch(8)
        yield "dataset", model.fit(data, epochs=3, verbose=0).history["sum"]
    finally:
        tf.random.set_seed(1)


def check_metrics(s):
    names = {
        "auc": keras.metrics.AUC,
        "precision": keras.metrics.Precision,
        "recall": keras.metrics.Recall,
        "mean": keras.metrics.BinaryAccuracy,
        "iou": lambda: keras.metrics.BinaryIoU(target_class_ids=[0, 1]),
        "f1": keras.metrics.F1Score,
        "r2": keras.metrics.R2Score,
        "tp": keras.metrics.TruePositives,
        "mse": keras.metrics.RootMeanSquaredError,
    }
    with s.scope():
        metrics = {name: make() for name, make in names.items()}
    y, p = (Y[:, None] > 0).astype("float32"), 1 / (1 + np.exp(-X[:, :1]))
    data = s.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((y, p.astype("float32"))).batch(8))

    @tf.function
    def update(y, p):
        s.run(lambda y, p: [metric.update_state(y, p) for metric in metrics.values()] and None, args=(y, p))

    for batch in data:
        update(*batch)
    for name, metric in metrics.items():
        yield name, metric.result()
    for metric in metrics.values():
        metric.reset_state()
    yield "reset", metrics["tp"].result()


def check_gan(s):
    keras.utils.set_random_seed(4)
    with s.scope():
        g = keras.Sequential([keras.Input([2]), keras.layers.Dense(4, "tanh"), keras.layers.Dense(6)])
        d = keras.Sequential([keras.Input([6]), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        og, od = keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.01)
        og.build(g.trainable_variables)
        od.build(d.trainable_variables)
    entropy = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")

    def step(real, noise):
        with tf.GradientTape() as tg, tf.GradientTape() as td:
            fake = g(noise, training=True)
            yes, no = d(real, training=True), d(fake, training=True)
            lg = tf.nn.compute_average_loss(entropy(tf.ones_like(no), no), global_batch_size=8)
            ld = tf.nn.compute_average_loss(
                entropy(tf.ones_like(yes), yes) + entropy(tf.zeros_like(no), no), global_batch_size=8
            )
        og.apply_gradients(zip(tg.gradient(lg, g.trainable_variables), g.trainable_variables, strict=True))
        od.apply_gradients(zip(td.gradient(ld, d.trainable_variables), d.trainable_variables, strict=True))
        return lg, ld

    data = s.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X[:48], X[:48, :2])).batch(8))

    @tf.function
    def train(x, z):
        return [s.reduce(SUM, loss, axis=None) for loss in s.run(step, args=(x, z))]

    yield "losses", [train(*batch) for batch in data]
    yield "weights", [weights(g), weights(d)]


def check_checkpoint(s):
    A = tf.VariableAggregation
    READ = tf.VariableSynchronization.ON_READ
    with s.scope():
        total = tf.Variable(0.0, synchronization=READ, aggregation=A.SUM)
        mean = tf.Variable(0.0, synchronization=READ, aggregation=A.MEAN)
        plain = tf.Variable([1.0, 2.0])
    model = dense(s)
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)

    def step():
        number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        total.assign_add(number + 1)
        mean.assign_add(number + 1)

    s.run(step)
    checkpoint = tf.train.Checkpoint(total=total, mean=mean, plain=plain, model=model, optimizer=model.optimizer)
    for _ in range(5 if full() else 2):
        path = checkpoint.save(FOLDER / "c")
    reader = tf.train.load_checkpoint(path)
    names = sorted(n for n in reader.get_variable_to_shape_map() if "OBJECT_GRAPH" not in n)
    yield "names", names
    yield "values", [reader.get_tensor(n).tolist() for n in names]
    saved = weights(model)
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    s.run(step)
    plain.assign([5.0, 6.0])
    checkpoint.restore(path).assert_consumed()
    yield "restored", [total, mean, plain, weights(model) == saved]
    yield "restored locally", {"mine": [x.numpy().item() for x in s.experimental_local_results(total)]}
    new = dense(s)
    tf.train.Checkpoint(model=new, optimizer=new.optimizer).restore(path).expect_partial()
    yield "deferred", weights(new) == saved
    yield "goes on", new.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history


def check_dataset_per_replica(s):
    """The last of all: MirroredStrategy reads every later dataset once per replica after this."""
    options = tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
    )
    one_each = s.distribute_datasets_from_function(lambda c: tf.data.Dataset.range(2).batch(1), options)
    yield "per replica", strategy_checks.rows_of(s, one_each)
