"""What other ways of training give today, with two replicas, in cases whose right answer is known by hand.

    python docs/examples/elsewhere.py
    python docs/examples/elsewhere.py --json answers.json

Nothing of tfdist is used. The other ways, each as its own documentation says:

    fit           Keras `fit` under `tf.distribute.MirroredStrategy` on two logical CPU devices
    loop          the loop of TensorFlow's guide on the same strategy, with `tf.nn.compute_average_loss`
    Horovod fit   Keras `fit` with `hvd.DistributedOptimizer`, on two ranks that this program starts with mpirun
    Horovod tape  a loop with `hvd.DistributedGradientTape` there. It is given `v.value` of Keras variables, as it
                  takes TensorFlow's alone; a rank without rows calls `hvd.join` and then takes the other's weights.

Most cases train one weight w that starts at 1, on input 1 and target y with loss (w - y)². With learning rate 0.1 a
step on rows whose targets have mean m gives w + 0.2 (m - w).
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import keras
import numpy as np
import tensorflow as tf

PEERS = ("fit", "loop", "Horovod fit", "Horovod tape")
SECONDS = 100  # for Horovod's ranks
UNITS = 64  # of the model with dropout
Values = list[list[float]]  # of each replica that is asked


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained, and what must come out on every replica."""

    title: str
    right: tuple[float | str, ...]
    why: str
    targets: tuple[float, ...] = (0, 1, 2, 3, 4)
    batch: int = 4  # of both replicas together
    _: dataclasses.KW_ONLY
    inputs: tuple[float, ...] = ()  # ones
    weights: tuple[float, ...] = ()  # none
    rate: float = 0.1
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the optimizer
    layer: str = ""  # before the line
    l2: float = 0.0
    scale: float = 0.0  # of the loss
    run: str = "train"  # the peer's method

    def arrays(self) -> list[np.ndarray]:
        """Inputs, targets and, where there are some, weights."""
        x = np.array(self.inputs or [1] * len(self.targets), np.float32)[:, None]
        x = np.tile(x, UNITS) if "dropout" in self.layer else x
        y = np.array(self.targets, np.float32)[:, None]
        return [x, y, np.array(self.weights, np.float32)] if self.weights else [x, y]


# fmt: off
CASES = (
    Case("4 rows, then 1: w", (1.68,), "1 + 0.2 (1.5 - 1) = 1.1, then 1.1 + 0.2 (4 - 1.1)"),
    Case("3 + 2 rows: w", (1.4,), "1 + 0.2 (3 - 1)", (0, 1, 2, 3, 9), 5),
    Case("example weights: w", (1 + 0.2 * (21.5 / 7.5 - 1),), "the targets' weighted mean is 21.5 / 7.5 "
         "(Keras's mean_with_sample_weight; the loop's function is defined otherwise: it divides by the rows)",
         (0, 1, 2, 3, 4, 5), 6, weights=(1, 0, 2, 0.5, 4, 0)),
    Case("all weights zero: w", (1.0,), "there is nothing to learn from", (0, 1, 2, 3), weights=(0, 0, 0, 0)),
    Case("L2(0.5) on w: w", (1.4,), "1 - 0.1 (2 (1 - 3.5) + 1): the penalty counts once", (2, 3, 4, 5), l2=0.5),
    Case("global_clipnorm=1: w", (0.0,), "rate 1; the mean of gradients 6 and -2 is clipped to 1", (-2, 2), 2,
         rate=1.0, options={"global_clipnorm": 1.0}),
    Case("1 row each: w", (1.8,), "1 + 0.2 (5 - 1): the gradients' mean", (0, 10), 2),
    Case("2 batches of 2 accumulated: w", (1.1,), "1 + 0.2 (1.5 - 1), as one batch of 4", (0, 1, 2, 3), 2,
         options={"gradient_accumulation_steps": 2}),
    Case("loss scale 8, inf on one: w, scale", (1.0, 4.0), "no step, and half the scale (LossScaleOptimizer)",
         (0, math.inf), 2, scale=8.0),
    Case("BatchNormalization: moving mean", (2.375,), "momentum 0.5, from 0: on inputs 0 to 3 0.75, then on 4 "
         "0.375 + 2; replica 1 has no row then", inputs=(0, 1, 2, 3, 4), layer="batchnorm"),
    Case("the same, synchronized", (2.375,), "the same, with synchronized=True or hvd.SyncBatchNormalization",
         inputs=(0, 1, 2, 3, 4), layer="batchnorm synchronized"),
    Case("dropout: masks", ("differ",), "one mask for both would be half as random", (1, 3), 2, layer="dropout"),
    Case("the same, after set_random_seed(0)", ("differ",), "the same; every process sets seed 0 (Horovod's ranks "
         "could set others)", (1, 3), 2, layer="dropout seeded"),
    Case("float16 mean of 40000, 40000", (40000.0,), "float16 holds it, though not the sum", run="half_mean"),
    Case("3 and 2 rows: accuracy, AUC", (0.6, 5 / 6), "3 of 5 rows are right, and 5 of 6 pairs in order",
         (0, 0, 1, 1, 1), inputs=(0.1, 0.6, 0.8, 0.4, 0.9), rate=0.0, run="evaluate"),
)
# fmt: on


def build(case: Case, sync_layer: Callable[..., keras.Layer] | None = None) -> keras.Model:
    """The case's model; sync_layer is the peer's own synchronized batch normalization."""
    random.seed()  # the last case's seed is over
    if "seeded" in case.layer:
        keras.utils.set_random_seed(0)
    layers: list[Any] = [keras.Input((UNITS if "dropout" in case.layer else 1,))]
    if "synchronized" in case.layer and sync_layer:
        layers.append(sync_layer(momentum=0.5))
    elif "batchnorm" in case.layer:
        layers.append(keras.layers.BatchNormalization(momentum=0.5, synchronized="synchronized" in case.layer))
    elif "dropout" in case.layer:
        layers.append(keras.layers.Dropout(0.5))
    start = "zeros" if "dropout" in case.layer else "ones"
    penalty = keras.regularizers.L2(case.l2) if case.l2 else None
    layers.append(keras.layers.Dense(1, use_bias=False, kernel_initializer=start, kernel_regularizer=penalty))
    return keras.Sequential(layers)


def sgd(case: Case, wrap: Callable[..., Any] = lambda optimizer: optimizer) -> Any:
    """The case's optimizer; wrap is the peer's own wrapper."""
    optimizer = wrap(keras.optimizers.SGD(case.rate, **case.options))
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=case.scale) if case.scale else optimizer


def mean_loss(case: Case) -> keras.Loss:
    """Keras's mean of the squared errors."""
    return keras.losses.MeanSquaredError("mean_with_sample_weight" if case.weights else "sum_over_batch_size")


def metrics() -> list[keras.Metric]:
    """Those of the evaluation."""
    return [keras.metrics.BinaryAccuracy(name="accuracy"), keras.metrics.AUC(name="auc")]


def fit(case: Case, model: keras.Model, optimizer: Any, arrays: list[np.ndarray], batch: int, **options: Any) -> dict:
    """Keras's compile and fit on these arrays; returns the history."""
    model.compile(optimizer, mean_loss(case), metrics=metrics() if case.run == "evaluate" else None)
    x, y, weights = [*arrays, None][:3]
    return model.fit(x, y, batch, sample_weight=weights, shuffle=False, verbose=0, **options).history


def state(case: Case, model: keras.Model, optimizer: Any) -> list[tf.Variable]:
    """The variables that hold the answer."""
    held = [model.layers[0].moving_mean if "batchnorm" in case.layer else model.layers[-1].kernel]
    return [v.value for v in held + ([optimizer.dynamic_scale] if case.scale else [])]


def flat(arrays: Any) -> list[float]:
    """All their numbers."""
    return [float(v) for array in arrays for v in np.ravel(array)]


class Fit:
    """Keras fit under MirroredStrategy."""

    def __init__(self, strategy: tf.distribute.Strategy):
        self.strategy = strategy

    def held(self, variables: list[tf.Variable]) -> Values:
        """What each replica holds."""
        return [flat(copies) for copies in zip(*map(self.strategy.experimental_local_results, variables), strict=True)]

    def train(self, case: Case) -> Values:
        """One epoch."""
        with self.strategy.scope():
            model, optimizer = build(case), sgd(case)
            fit(case, model, optimizer, case.arrays(), case.batch)
        return self.held(state(case, model, optimizer))

    def evaluate(self, case: Case) -> Values:
        """Metrics of all rows."""
        with self.strategy.scope():
            model = build(case)
            model.compile(loss="mse", metrics=metrics())
        logs = model.evaluate(*case.arrays(), batch_size=case.batch, verbose=0, return_dict=True)
        return [[logs["accuracy"], logs["auc"]]]


class Loop(Fit):
    """The loop of TensorFlow's guide."""

    def each_batch(self, case: Case, step: Callable[..., None]) -> None:
        """Runs the step on all global batches, which the strategy splits."""
        run = tf.function(lambda batch: self.strategy.run(step, args=batch))
        dataset = tf.data.Dataset.from_tensor_slices(tuple(case.arrays())).batch(case.batch)
        for batch in self.strategy.experimental_distribute_dataset(dataset):
            run(batch)

    def train(self, case: Case) -> Values:
        """One epoch."""
        with self.strategy.scope():
            model, optimizer = build(case), sgd(case)
            loss_object = keras.losses.MeanSquaredError(reduction=None)
            optimizer.build(model.trainable_variables)

        def step(x: tf.Tensor, y: tf.Tensor, weights: tf.Tensor | None = None) -> None:
            with tf.GradientTape() as tape:
                losses = loss_object(y, model(x, training=True))
                loss = tf.nn.compute_average_loss(losses, sample_weight=weights, global_batch_size=case.batch)
                if model.losses:
                    loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
                loss = optimizer.scale_loss(loss)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        self.each_batch(case, step)
        return self.held(state(case, model, optimizer))

    def evaluate(self, case: Case) -> Values:
        """Metrics of all rows."""
        with self.strategy.scope():
            model, measures = build(case), metrics()

        def step(x: tf.Tensor, y: tf.Tensor) -> None:
            for metric in measures:
                metric.update_state(y, model(x, training=False))

        self.each_batch(case, step)
        return [[float(metric.result()) for metric in measures]]

    def half_mean(self, case: Case) -> Values:
        """The strategy's mean."""
        values = self.strategy.run(tf.function(lambda: tf.constant(40000, tf.float16)))
        return [[float(self.strategy.reduce(tf.distribute.ReduceOp.MEAN, values, axis=None))]]


class HorovodFit:
    """Keras fit with Horovod's optimizer, on this rank."""

    def __init__(self, hvd: Any):
        self.hvd = hvd

    def shard(self, case: Case) -> tuple[list[np.ndarray], int]:
        """This rank's rows, which are every second, and its part of the batch."""
        return [a[self.hvd.rank() :: self.hvd.size()] for a in case.arrays()], math.ceil(case.batch / self.hvd.size())

    def wrap(self, optimizer: Any) -> Any:
        """Horovod's optimizer, which accumulates by an argument of its own."""
        import horovod.tensorflow.keras as hvd

        options = {}
        if optimizer.gradient_accumulation_steps:
            options = {"backward_passes_per_step": optimizer.gradient_accumulation_steps}
            options["average_aggregated_gradients"] = True
            optimizer = keras.optimizers.SGD(float(optimizer.learning_rate))
        return hvd.DistributedOptimizer(optimizer, **options)

    def train(self, case: Case) -> Values:
        """One epoch."""
        model, optimizer = build(case, self.hvd.SyncBatchNormalization), sgd(case, self.wrap)
        fit(case, model, optimizer, *self.shard(case))
        return [flat(state(case, model, optimizer))]

    def evaluate(self, case: Case) -> Values:
        """Metrics of the validation rows, averaged by Horovod's callback."""
        import horovod.tensorflow.keras as hvd

        arrays, batch = self.shard(case)
        options = {"validation_data": arrays, "callbacks": [hvd.callbacks.MetricAverageCallback()]}
        history = fit(case, build(case), sgd(case, self.wrap), arrays, batch, **options)
        return [[float(history["val_accuracy"][-1]), float(history["val_auc"][-1])]]


class HorovodTape(HorovodFit):
    """A loop with Horovod's tape, on this rank."""

    evaluate = None  # type: ignore[assignment] # its documentation has no way

    def train(self, case: Case) -> Values:
        """One epoch."""
        model, optimizer = build(case, self.hvd.SyncBatchNormalization), sgd(case)
        loss_object = mean_loss(case)
        optimizer.build(model.trainable_variables)

        @tf.function
        def step(x: tf.Tensor, y: tf.Tensor, weights: tf.Tensor | None = None) -> None:
            with tf.GradientTape() as tape:
                loss = loss_object(y, model(x, training=True), sample_weight=weights)
                loss = optimizer.scale_loss(loss + sum(model.losses))
            tape = self.hvd.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        arrays, batch = self.shard(case)
        for rows in tf.data.Dataset.from_tensor_slices(tuple(arrays)).batch(batch):
            step(*rows)
        last = int(tf.function(lambda: self.hvd.join())())  # not eager: that waits but once per process
        self.hvd.broadcast_variables([v.value for v in model.trainable_variables], root_rank=last)
        return [flat(state(case, model, optimizer))]

    def half_mean(self, case: Case) -> Values:
        """Horovod's mean."""
        return [[float(self.hvd.allreduce(tf.constant(40000, tf.float16), op=self.hvd.Average))]]


def answer(peer: Any, case: Case) -> dict[str, Any]:
    """What the peer gives: values, an error, or nothing where it has no such method."""
    method = getattr(peer, case.run, None)
    if method is None:
        return {}
    try:
        return {"values": method(case)}
    except Exception as error:
        # Without colours, nodes' names, and the traceback and frame that TensorFlow and Keras put around the message.
        message = re.sub(r"\x1b\[\d+m|{{.*?}} *", "", str(error)).rsplit("Error: ", 1)[-1]
        message = re.sub(r"^\s*Exception encountered when calling .*?\(\)\.\s*", "", message)
        return {"error": type(error).__name__, "message": re.split(r"\. |\.?\n", message.strip())[0]}


def on_devices() -> Iterator[tuple[str, int, dict]]:
    """The answers under MirroredStrategy: peer, case and answer."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    reduction = tf.distribute.ReductionToOneDevice()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=reduction)
    for name, peer in zip(PEERS[:2], (Fit(strategy), Loop(strategy)), strict=True):
        yield from ((name, number, answer(peer, case)) for number, case in enumerate(CASES))


def as_rank() -> None:
    """One of Horovod's ranks; the first prints each answer as a line of JSON."""
    import horovod.tensorflow as hvd

    hvd.init()
    for name, peer in zip(PEERS[2:], (HorovodFit(hvd), HorovodTape(hvd)), strict=True):
        for number, case in enumerate(CASES):
            own = answer(peer, case)
            ranks = hvd.allgather_object(own)
            if all("values" in rank for rank in ranks):
                own = {"values": [values for rank in ranks for values in rank["values"]]}
            else:
                own = next((rank for rank in ranks if "error" in rank), {})
            if hvd.rank() == 0:
                print(json.dumps([name, number, own]), flush=True)


def on_ranks() -> Iterator[tuple[str, int, dict]]:
    """The answers of Horovod, from two ranks that are started here."""
    mpirun = shutil.which("mpirun", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    if mpirun is None:
        print("Horovod is left out, as no mpirun was found.", file=sys.stderr)
        return
    command = [mpirun, "-np", "2", "--oversubscribe", sys.executable, __file__, "--rank"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # mpirun then ends its ranks
        out, err = process.communicate()
        print(f"Horovod was ended after {SECONDS} s; what it did not answer is missing.", file=sys.stderr)
    if process.returncode:
        print(*err.strip().splitlines()[-8:], sep="\n", file=sys.stderr)
    yield from (tuple(json.loads(line)) for line in out.splitlines() if line.startswith('["Horovod'))


def masks(values: Values) -> str:
    """Whether the replicas' masks differ: a weight moved by a, b or a + b, as replica 0, 1 or both kept it.

    Replicas that exchange no gradients have moved by their own alone.
    """
    kept = [[v != 0 for v in replica] for replica in values]
    mixed = any(len({round(v, 4) for v in replica}) > 2 for replica in values)
    return "differ" if mixed or kept[0] != kept[-1] else "same"


def cell(case: Case, given: dict[str, Any]) -> str:
    """An answer in the table, with "=" if it is right on all replicas."""
    if "error" in given:
        return f"✗ {given['error']}"
    if not given:
        return "–"
    if "dropout" in case.layer:
        right, texts = masks(given["values"]) == case.right[0], [masks(given["values"])]
    else:
        right = np.allclose(given["values"], [case.right] * len(given["values"]), rtol=1e-4, atol=1e-6)
        texts = [text(values) for values in given["values"]]
    return f"{'=' if right else '✗'} {' | '.join(dict.fromkeys(texts))}"


def text(values: Any) -> str:
    """Values in few characters."""
    return ", ".join(v if isinstance(v, str) else f"{v:.5g}" for v in values)


def main() -> None:
    """Asks all peers and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write all values to FILE")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    tf.get_logger().setLevel("ERROR")
    if options.rank:
        as_rank()
        return

    answers: list[dict[str, dict]] = [{} for _ in CASES]
    for name, number, given in itertools.chain(on_devices(), on_ranks()):
        answers[number][name] = given
    rows = [["", "case", "right", *PEERS]]
    for number, (case, given) in enumerate(zip(CASES, answers, strict=True), 1):
        cells = [cell(case, given[name]) if name in given else "missing" for name in PEERS]
        rows.append([str(number), case.title, text(case.right), *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    found = [name for name in ("keras", "horovod") if importlib.util.find_spec(name)]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in found)
    print(f"\ntensorflow {tf.__version__}, {versions}, two replicas")
    print('"=" is right, "✗" is wrong or raises, "a | b" is replica 0 | replica 1, "–" does not apply\n')
    for row in rows:
        print("  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip())
    print("\nWhy the right answers are right:")
    for number, case in enumerate(CASES, 1):
        print(f"{number:4}  {case.why}")
    print("\nWhat was raised:")
    for number, given in enumerate(answers, 1):
        for name in PEERS:
            if "error" in given.get(name, {}):
                print(f"{number:4}  {name}: {given[name]['error']}: {given[name]['message']}")
    if options.json:
        table = [{"case": c.title, "right": c.right, "answers": a} for c, a in zip(CASES, answers, strict=True)]
        # JSON has no NaN and Infinity: they are written as strings.
        table = json.loads(json.dumps(table), parse_constant=str)
        options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
