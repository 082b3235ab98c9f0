"""What training must give, case by case, with the right values worked out by hand.

A step of `Line` on rows with mean target m gives w ← w + 0.2·(m − w), from w = 1; where a case has another rule, it
says so. A right value may depend on the number of replicas R. Cases without one must give what the first backend
gives at the same R, or what one device gives.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.evidence.tasks import Augmented, Drops, Line, Net, Noisy, Normalized, Pair, Table, Twins
from tfdist.strategies.table import BACKENDS
from tfdist.training.reduction import sum_over_replicas
from tfdist.training.report import Report
from tfdist.training.task import Task
from tfdist.training.trainer import Trainer

__all__ = ["CASES", "Case", "Run"]

Value: TypeAlias = list[float | str]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A finished run."""

    trainer: Trainer
    report: Report

    @property
    def weights(self) -> list[float]:
        """All trainable weights."""
        return [float(x) for v in self.trainer.model.trainable_variables for x in np.ravel(v.numpy())]

    @property
    def state(self) -> list[float]:
        """All other variables of the model."""
        return [float(x) for v in self.trainer.model.non_trainable_variables for x in np.ravel(v.numpy())]

    @property
    def updates(self) -> int:
        """Updates that were applied."""
        return int(self.trainer.optimizer.iterations.numpy())


@dataclasses.dataclass(frozen=True)
class Run:
    """One backend at one number of replicas."""

    backend: str
    replicas: int

    def fit(self, task: Task, **settings: Any) -> Outcome:
        """Train in the order of the data."""
        kind = BACKENDS[self.backend]
        local = {"replicas": self.replicas} if kind.devices and not kind.processes else {}
        # One thread: equal bits need equal threads, and several replicas share the cores.
        common = {"backend": self.backend, "shuffle_buffer": 0, "intra_op_threads": 1, "quiet": True}
        trainer = Trainer(task, **{**common, **local, **settings})
        return Outcome(trainer, trainer.fit())

    def error(self, task: Task, **settings: Any) -> str:
        """The error that every rank must raise."""
        try:
            self.fit(task, **settings)
        except TfdistError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing that must be right."""

    name: str
    says: str
    """What it shows, for people."""
    run: Callable[[Run], Value]
    right: Callable[[int], Value] | str
    """The right value by the number of replicas; or `one device` or `equal` (on all backends at that number)."""
    tolerance: float
    only: Callable[[str, int], bool]
    """Whether there is something to check on a backend at a number of replicas."""
    asynchronous: bool
    """Whether it is about asynchronous backends, or about the others."""

    def applies(self, backend: str, replicas: int) -> bool:
        """Whether there is something to check on a backend at a number of replicas (workers, if asynchronous)."""
        reference = self.right == "one device" and backend == "one_device"
        return (reference or self.asynchronous == BACKENDS[backend].asynchronous) and self.only(backend, replicas)


CASES: dict[str, Case] = {}


def case(
    says: str,
    right: Callable[[int], Value] | Value | str,
    tolerance: float = 1e-5,
    applies: Callable[[str, int], bool] = lambda backend, replicas: True,
    asynchronous: bool = False,
) -> Callable[[Callable[[Run], Value]], Callable[[Run], Value]]:
    """Make a function a case; its name is the case's."""

    def add(run: Callable[[Run], Value]) -> Callable[[Run], Value]:
        name = run.__name__.replace("_", "-")
        fixed = (lambda _: list(right)) if isinstance(right, list) else right
        CASES[name] = Case(name, says, run, fixed, tolerance, applies, asynchronous)
        return run

    return add


FIVE = (0.0, 1.0, 2.0, 3.0, 4.0)


@case("w after 5 and after 6 rows in batches of 4: each row counts alike", [1.68, 1.78])
def uneven_rows(run: Run) -> Value:
    return [run.fit(Line(targets=tuple(map(float, range(n))))).weights[0] for n in (5, 6)]


@case("the loss of 8 rows is their mean, Σ(1 − i)²/8", [11.5])
def reported_loss(run: Run) -> Value:
    return [*run.fit(Line(targets=tuple(map(float, range(8))), global_batch_size=8)).report.losses]


@case("targets 0 and 10 on other replicas: all take the mean step", [1.8])
def mean_step(run: Run) -> Value:
    return [*run.fit(Line(targets=(0.0, 10.0), global_batch_size=2)).weights]


WEIGHTED = Line(targets=FIVE, weights=(1.0, 0.0, 2.0, 0.5, 4.0), global_batch_size=5)


@case("w and loss with example weights: Σwl/Σw", [1 + 0.2 * (21.5 / 7.5 - 1), 41 / 7.5])
def weighted_mean(run: Run) -> Value:
    done = run.fit(WEIGHTED)
    return [*done.weights, *done.report.losses]


@case("w and loss with loss_reduction=sum_over_batch: Σwl/5", [1.56, 8.2])
def sum_over_batch(run: Run) -> Value:
    done = run.fit(WEIGHTED, loss_reduction="sum_over_batch")
    return [*done.weights, *done.report.losses]


@case("a batch without weight changes nothing, momentum included: w, losses, updates", [1.1, 0.0, 0.5, 1.0])
def no_weight(run: Run) -> Value:
    rows = Line(targets=(9.0, 9.0, 1.0, 2.0), weights=(0.0, 0.0, 1.0, 1.0), global_batch_size=2)
    done = run.fit(dataclasses.replace(rows, optimizer={"momentum": 0.9}))
    return [*done.weights, *done.report.losses, done.updates]


@case("masked words count for nothing: the table's first two numbers, and the loss of three words", [1.0, 1.2, 11 / 3])
def masked_words(run: Run) -> Value:
    words, targets = ((1, 1, 0), (1, 0, 0)), ((0.0, 2.0, 9.0), (4.0, 9.0, 9.0))
    done = run.fit(Table(words=words, targets=targets, masked=True))
    return [*done.weights[:2], *done.report.losses]


@case("an L2 penalty 0.5·w² enters once: w, loss without it, penalty", [1.1, 3.0, 0.5])
def weight_penalty(run: Run) -> Value:
    done = run.fit(Line(targets=FIVE, global_batch_size=5, l2=0.5))
    return [*done.weights, *done.report.losses, *done.report.penalties]


@case("a penalty on outputs is their mean over all rows: w, loss, penalty", [1.1, 3.0, 0.5])
def output_penalty(run: Run) -> Value:
    done = run.fit(Line(targets=FIVE, global_batch_size=5, activity=0.5))
    return [*done.weights, *done.report.losses, *done.report.penalties]


OPPOSITE = Line(targets=(-2.0, 2.0), global_batch_size=2, learning_rate=1.0)


@case("gradients 6 and −2 clipped to 1 after their mean: the optimizer's own clipping, and none", [0.0, -1.0], 1e-6)
def clip_after_reduction(run: Run) -> Value:
    return [run.fit(dataclasses.replace(OPPOSITE, optimizer=o)).weights[0] for o in ({"global_clipnorm": 1.0}, {})]


@case(
    "gradient (2, 2) clipped to 0.5 by value, by norm of each, and by global norm",
    [0.5, -0.5, 0.5, -0.5, 1 - 0.5 / math.sqrt(2), -0.5 / math.sqrt(2)],
    1e-6,
)
def clip_kinds(run: Run) -> Value:
    kinds = ("clip_value", "clip_norm", "clip_global_norm")
    return [w for kind in kinds for w in run.fit(dataclasses.replace(OPPOSITE, bias=True), **{kind: 0.5}).weights]


@case("2 batches of 2 make one step of 4: w, steps, updates", [1.1, 1.0, 1.0], 1e-6)
def accumulate(run: Run) -> Value:
    done = run.fit(Line(global_batch_size=2), accumulate=2)
    return [*done.weights, done.report.steps, done.updates]


@case("5 rows in batches of 2, 2 at a time, twice: the epoch's last step has what is left; w and steps", [2.1152, 4.0])
def accumulate_leftover(run: Run) -> Value:
    done = run.fit(Line(targets=FIVE, global_batch_size=2), accumulate=2, epochs=2)
    return [*done.weights, done.report.steps]


@case("accumulated batches equal a large one: a net's losses, Adam", "one device")
def accumulate_net(run: Run) -> Value:
    small = run.backend != "one_device"
    return [*run.fit(Net(global_batch_size=4 if small else 16), steps=4, accumulate=4 if small else 1).report.losses]


@case("one step in float16 and one in bfloat16: w", [1.1, 1.1], 1e-6)
def half_precision(run: Run) -> Value:
    return [run.fit(Line(), precision=kind).weights[0] for kind in ("float16", "bfloat16")]


@case(
    "an overflow on one replica skips the step on all: w, skipped steps, updates, loss scale",
    [1.1, 1.0, 1.0, 16384.0],
    1e-6,
)
def overflow(run: Run) -> Value:
    task = Line(targets=(0.0, 1.0, 2.0, 3.0) * 2, inputs=(1.0, 1.0, 1.0, 60000.0, 1.0, 1.0, 1.0, 1.0))
    done = run.fit(task, precision="float16")
    return [*done.weights, done.report.skipped_steps, done.updates, done.report.loss_scale or 0.0]


@case("the loss scale doubles after 2 clean steps: 8 after 5 steps", [32.0])
def loss_scale_growth(run: Run) -> Value:
    return [run.fit(Line(), precision="float16", loss_scale=8.0, loss_scale_growth=2, steps=5).report.loss_scale or 0]


@case("learning rate 0.1 by none, linear, sqrt", lambda r: [0.1, 0.1 * r, 0.1 * math.sqrt(r)], 1e-6)
def learning_rate_scaling(run: Run) -> Value:
    kinds = ("none", "linear", "sqrt")
    return [run.fit(Line(), lr_scaling=kind).report.learning_rates[0] for kind in kinds]


def rising(replicas: int) -> list[float]:
    """The learning rates of five steps of a linear warm-up over four."""
    return [0.1 * (1 + (replicas - 1) * min(1, (step + 1) / 4)) for step in range(5)]


def line_after(rates: Sequence[float], mean: float = 1.5) -> float:
    """W of `Line` after steps with these learning rates."""
    w = 1.0
    for rate in rates:
        w += 2 * rate * (mean - w)
    return w


@case(
    "warm-up over 4 steps to 0.1·R: the rates of 5 steps, and w after them",
    lambda r: [*rising(r), line_after(rising(r))],
)
def warm_up(run: Run) -> Value:
    done = run.fit(Line(), lr_scaling="linear", warmup_steps=4, steps=5)
    return [*done.report.learning_rates, *done.weights]


@case(
    "warm-up from zero over 2 of 6 steps, then half a cosine: the rates",
    [0.1 * min(1, (s + 1) / 2) * 0.5 * (1 + math.cos(math.pi * max(0, s - 2) / 4)) for s in range(6)],
    1e-6,
)
def cosine(run: Run) -> Value:
    settings = {"warmup_epochs": 2, "warmup_from_zero": True, "lr_schedule": "cosine"}
    return [*run.fit(Line(), epochs=6, **settings).report.learning_rates]


BATCHES = ((1.0, 3.0, 5.0, 7.0), (9.0,))


def moments(replicas: int) -> Value:
    """Moving mean and variance of `BATCHES`, of momentum 0.5: the mean over replicas that have rows of their own."""
    mean, variance = 0.0, 1.0
    for batch in BATCHES:
        pieces = [piece for piece in np.array_split(np.array(batch), replicas) if len(piece)]
        mean = 0.5 * mean + 0.5 * float(np.mean([p.mean() for p in pieces]))
        variance = 0.5 * variance + 0.5 * float(np.mean([p.var() for p in pieces]))
    return [mean, variance]


def normalized(run: Run, kind: str) -> Value:
    inputs = BATCHES[0] + BATCHES[1]
    return [*run.fit(Normalized(targets=FIVE, inputs=inputs), batch_norm=kind).state]


@case("local BatchNorm's moving statistics, replicas without rows left out", moments)
def batch_norm_local(run: Run) -> Value:
    return normalized(run, "local")


@case("synchronized BatchNorm's moving statistics are those of one device", moments(1))
def batch_norm_sync(run: Run) -> Value:
    return normalized(run, "sync")


@case("the same over three batches in one step, one of them with rows on some replicas only", [6.25, 0.5])
def batch_norm_accumulated(run: Run) -> Value:
    task = Normalized(targets=FIVE, inputs=(1.0, 3.0, 5.0, 7.0, 9.0), global_batch_size=2)
    return [*run.fit(task, batch_norm="sync", accumulate=3).state]


@case("dropout's masks are another for each row and step", ["rows differ", "steps differ"])
def dropout_differs(run: Run) -> Value:
    once, twice = (run.fit(Drops(), steps=n).weights for n in (1, 2))
    rows = {round(1 - w, 6) for w in once}
    differ = len(rows) > 2 or run.replicas > 8
    steps = any(abs((1 - a) - (a - b)) > 1e-3 for a, b in zip(once, twice, strict=True))
    return ["rows differ" if differ else "rows are alike", "steps differ" if steps else "steps are alike"]


@case("dropout's masks repeat from the seed, on every backend", "equal", 1e-6)
def dropout_repeats(run: Run) -> Value:
    return [*run.fit(Drops(), steps=2, seed=7).weights[:8]]


@case("augmentation: losses of 2 shuffled epochs, at every number of replicas alike", "one device")
def augmentation(run: Run) -> Value:
    done = run.fit(Augmented(targets=FIVE), epochs=2, shuffle_buffer=10, seed=3)
    return [*done.report.losses]


@case("random numbers drawn in the step repeat from the seed, on every backend", "equal", 1e-6)
def drawn_in_the_step(run: Run) -> Value:
    return [*run.fit(Noisy(), steps=3).report.losses]


@case("embedding gradients, dense and gathered, replicas without rows: the table", [1 - 0.2 / 3, 1.0, 1 - 0.2 / 3] * 2)
def sparse_gradients(run: Run) -> Value:
    return [w for kind in ("dense", "gather") for w in run.fit(Table(), sparse=kind).weights[:3]]


@case("gathered, 4 words in one batch and 2 in the next: the table", [0.855, 0.95, 0.905, 1.0])
def sparse_changing(run: Run) -> Value:
    task = Table(words=(0, 1, 2, 3, 0, 0, 2, 2), targets=(0.0, 0.0, 0.0, 1.0) * 2, global_batch_size=4)
    return [*run.fit(task, sparse="gather").weights]


@case(
    "of words 2, 0, 2: clipped by global norm 0.5, and with Adam",
    [1 - 0.05 / math.sqrt(2), 1.0, 1 - 0.05 / math.sqrt(2), 0.9, 1.0, 0.9],
)
def sparse_clipped(run: Run) -> Value:
    clipped = run.fit(Table(), sparse="gather", clip_global_norm=0.5).weights[:3]
    return [*clipped, *run.fit(Table(adam=True), sparse="gather").weights[:3]]


class Rows(keras.metrics.Metric):
    """A whole number that counts rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.add_variable((), "zeros", dtype="int64", name="rows")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count."""
        self.rows.assign(self.rows + tf.shape(y_true, tf.int64)[0])

    def result(self) -> Any:
        """The count."""
        return self.rows


@dataclasses.dataclass(kw_only=True)
class Scores(Line):
    """Seven rows of scores x with labels 0 and 1, weighted, judged by many metrics."""

    global_batch_size: int = 3
    inputs: tuple[float, ...] = (0.1, 0.9, 0.4, 0.6, 0.8, 0.3, 0.7)
    targets: tuple[float, ...] = (0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0)
    weights: tuple[float, ...] = (1.0, 2.0, 0.0, 0.5, 1.0, 3.0, 1.0)

    def evaluation_splits(self) -> tuple[str, ...]:
        return ("train",)

    def metrics(self) -> dict[str, keras.metrics.Metric]:
        kinds = keras.metrics
        metrics = [kinds.AUC(), kinds.Precision(), kinds.Recall(), kinds.TruePositives(), kinds.FalseNegatives()]
        metrics += [kinds.BinaryAccuracy(), kinds.MeanSquaredError(), Rows()]
        return {type(m).__name__: m for m in metrics}


def judged_whole() -> Value:
    """Keras's own metrics over all rows at once."""
    task = Scores()
    inputs, labels, weights = task.dataset("train")
    values: Value = [float(np.sum(weights * (inputs[:, 0] - labels) ** 2) / weights.sum())]
    for metric in task.metrics().values():
        metric.update_state(labels, inputs, sample_weight=weights)
        values.append(float(metric.result()))
    return values


@case("metrics of 7 weighted rows in batches of 3 are Keras's over all rows at once", lambda _: judged_whole())
def metrics(run: Run) -> Value:
    done = run.fit(Scores(), learning_rate=0.0, steps=1)
    return [*map(float, done.report.metrics["train"].values())]


RISING = Line(targets=(3.0,), tests=(1.5,))
"""w goes 1.4, 1.72, …, so that the test loss is 0.01, 0.0484, …"""


@case("early stopping after 1 evaluation that was no better, best restored: w, steps, best epoch", [1.4, 2.0, 1.0])
def early_stopping(run: Run) -> Value:
    done = run.fit(RISING, epochs=9, patience=1, restore_best=True)
    return [*done.weights, done.report.steps, (done.report.best or {})["epoch"]]


@case("the learning rate halves at a plateau: the rates of 4 epochs", [0.1, 0.1, 0.05, 0.025], 1e-6)
def plateau(run: Run) -> Value:
    done = run.fit(RISING, epochs=4, plateau_patience=1, plateau_factor=0.5)
    return [*done.report.learning_rates]


BROKEN = Line(targets=(0.0, 1.0, 1.0, math.nan, 2.0, 3.0), global_batch_size=2)


@case("a NaN in step 2: skipped (w and skipped steps), applied, or all stop", [1.22, 1.0, "nan", "stop at step 2"])
def not_a_number(run: Run) -> Value:
    skip = run.fit(BROKEN, nan_policy="skip")
    ignored = run.fit(BROKEN, nan_policy="ignore").weights[0]
    error = run.error(BROKEN)
    stop = "stop at step 2" if error.startswith("NonFiniteError: step 2:") else error
    return [*skip.weights, skip.report.skipped_steps, "nan" if math.isnan(ignored) else ignored, stop]


@case("gradients travel in float16, though their sum over rows is 160000: w", [-1.0], 1e-3)
def compression_float16(run: Run) -> Value:
    task = Line(targets=(-9999.0,) * 8, global_batch_size=8, learning_rate=1e-4)
    return [*run.fit(task, compression="float16").weights]


@case("gradients travel in bfloat16: w", [-1.0], 1e-2)
def compression_bfloat16(run: Run) -> Value:
    task = Line(targets=(-9999.0,) * 8, global_batch_size=8, learning_rate=1e-4)
    return [*run.fit(task, compression="bfloat16").weights]


@case("40000 in float16 on every replica: the mean", [40000.0])
def mean_of_halves(run: Run) -> Value:
    strategy = run.fit(Line()).trainer.session.strategy

    def mean() -> tf.Tensor:
        return sum_over_replicas([tf.fill([3], tf.constant(40000, tf.float16))])[0] / run.replicas

    values = tf.function(lambda: strategy.run(mean))()
    return [float(strategy.experimental_local_results(values)[0][0])]


@case(
    "Adasum of gradients that have nothing in common is their sum: the table",
    lambda r: [0.8] * r,
    applies=lambda backend, replicas: backend == "horovod" and replicas in (1, 2, 4, 8),
)
def adasum(run: Run) -> Value:
    rows = tuple(range(run.replicas))
    done = run.fit(Table(words=rows, targets=(0.0,) * run.replicas, size=run.replicas), reduction="adasum")
    return [*done.weights]


@case("actions at chunks, evaluations and epochs; one process asks to stop at step 3: calls and steps", [3, 1, 1, 3])
def actions(run: Run) -> Value:
    seen: list[str] = []

    def note(moment: Any) -> None:
        seen.append(moment.kind)
        moment.stop = moment.step == 3 and run_is_last(run)

    task = Line(tests=(1.0,), global_batch_size=2)
    done = run.fit(task, actions=[note], epochs=4, steps_per_chunk=1, validate_every=2)
    return [*(seen.count(kind) for kind in ("chunk", "evaluation", "epoch")), done.report.steps]


def run_is_last(run: Run) -> bool:
    """Whether this is the last process of the job."""
    from tfdist.cluster.identity import identify

    return identify().rank == identify().size - 1


@case("average of weights 0.8 and 0.64 with momentum 0.5: its loss in evaluation, and w", [0.72**2, 0.64])
def moving_average(run: Run) -> Value:
    done = run.fit(Line(targets=(0.0,), tests=(0.0,)), epochs=2, ema=0.5)
    return [done.report.metrics["test"]["loss"], *done.weights]


@case("weight decay 0.5 on the kernel alone, gradient 0: kernel and bias", [0.95, 0.0], 1e-6)
def weight_decay(run: Run) -> Value:
    done = run.fit(Line(targets=(1.0, 1.0), bias=True), weight_decay=0.5, weight_decay_exclude=("bias",))
    return [*done.weights]


@case("two inputs, two outputs, a frozen layer: both weights, the frozen one, the loss", [1.1, 1.3, 1.0, 1.5 + 3.5])
def several_outputs(run: Run) -> Value:
    done = run.fit(Pair())
    left, right = sorted(done.weights)
    return [left, right, *done.state, *done.report.losses]


@case(
    "two optimizers, two losses: both weights, and the sum of the losses",
    [1.1, 1 - 0.4 * (14 / 6 + 1), 1.5 + (4 + 18 + 48) / 6],
)
def several_optimizers(run: Run) -> Value:
    done = run.fit(Twins())
    return [*done.weights, *done.report.losses]


@case("XLA: w after 5 rows in batches of 4", [1.68], applies=lambda backend, replicas: not BACKENDS[backend].one_copy)
def jit_line(run: Run) -> Value:
    return [*run.fit(Line(targets=FIVE), jit=True).weights]


@case("XLA: the losses of a net", "one device", applies=lambda backend, replicas: not BACKENDS[backend].one_copy)
def jit_net(run: Run) -> Value:
    return [*run.fit(Net(), steps=4, jit=run.backend != "one_device").report.losses]


@case(
    "a net's weights are equal to the last bit on all backends with two replicas",
    "equal",
    0.0,
    applies=lambda backend, replicas: replicas <= 2,
)
def net(run: Run) -> Value:
    return [run.fit(Net(), steps=8).report.weights_sha256[:12]]


def local_losses(replicas: int) -> Value:
    """Targets 0, 2, 10 at w = 1; then each replica at its own w: 1 + 0.2·(its mean - 1)."""
    second = {1: (1.6**2 + 0.4**2 + 8.4**2), 2: (1.0 + 1.0 + 7.2**2)}
    return [2.08, (1 + 1 + 81) / 3, second.get(replicas, 0.8**2 + 0.8**2 + 7.2**2) / 3]


@case(
    "2 steps on each replica's own rows, then the mean weighted by rows: w (that of one device), and the losses",
    local_losses,
    applies=lambda backend, replicas: BACKENDS[backend].own_copies,
)
def local_steps(run: Run) -> Value:
    done = run.fit(Line(targets=(0.0, 2.0, 10.0) * 2, global_batch_size=3), steps=2, sync_every=2)
    return [*done.weights, *done.report.losses]


@case(
    "averaging after every step is synchronous training: w after 5 rows in batches of 4",
    [1.68],
    applies=lambda backend, replicas: BACKENDS[backend].own_copies,
)
def averaged_each_step(run: Run) -> Value:
    return [*run.fit(Line(targets=FIVE), sync_every=1).weights]


@case(
    "asynchronous: 200 steps of 16 rows: steps, rows, updates, the optimizer's own count",
    [200.0, 3200.0, 200.0, 200.0],
    asynchronous=True,
)
def accounting(run: Run) -> Value:
    done = run.fit(Net(), steps=200)
    assert done.report.workers is not None
    return [done.report.steps, done.report.examples_seen, done.report.workers["updates"], done.updates]


@case(
    "asynchronous: 3 epochs of 64 rows in batches of 24: rows, steps",
    [192.0, 8.0],
    asynchronous=True,
)
def whole_epochs(run: Run) -> Value:
    done = run.fit(Net(), epochs=3, global_batch_size=24)
    return [done.report.examples_seen, done.report.steps]


@case("asynchronous: one step in flight: the losses of one device", "one device", asynchronous=True)
def one_in_flight(run: Run) -> Value:
    steps = {"max_in_flight": 1} if BACKENDS[run.backend].asynchronous else {}
    return list(run.fit(Net(), steps=20, **steps).report.losses)
