"""The right values, run on one backend: started once per job by `test_right_values.py`.

    python cases.py FOLDER BACKEND REPLICAS…        or under mpirun, where the launcher gives the replicas

First come the cases of `tfdist check` (tfdist/evidence), then these, which look deeper or go wrong on purpose. Every
process writes what it got to FOLDER/BACKEND-REPLICAS-rank.json; the tests compare. Single-process backends do several
numbers of replicas in one process.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import toy
from tests.full import full
from tfdist import TfdistError, Trainer
from tfdist.cluster.identity import identify
from tfdist.evidence.cases import CASES as CHECKED
from tfdist.evidence.program import main as run_cases
from tfdist.tasks.digits import Digits
from tfdist.training.building import digest

RANK = identify().rank


class Runner:
    """Trains tasks on one backend at one number of replicas."""

    def __init__(self, backend: str, count: int) -> None:
        self.count = count
        replicas = count if backend == "mirrored" else None
        # One thread everywhere, as four replicas on two cores would get: equal bits need equal threads.
        self._common = {"backend": backend, "replicas": replicas, "shuffle_buffer": 0, "intra_op_threads": 1}

    def trainer(self, task: Any, **settings: Any) -> Trainer:
        return Trainer(task, **{**self._common, **settings})

    def fit(self, task: Any, **settings: Any) -> dict[str, Any]:
        trainer = self.trainer(task, **settings)
        report = trainer.fit()
        return {
            "weights": [v.numpy().tolist() for v in trainer.model.trainable_variables],
            "state": {v.path: v.numpy().tolist() for v in trainer.model.non_trainable_variables},
            "losses": report.losses,
            "steps": report.steps,
            "examples_seen": report.examples_seen,
            "weights_sha256": report.weights_sha256,
            "state_sha256": report.state_sha256,
            "metrics": report.metrics,
            "examples_per_second": report.examples_per_second,
            "step_time_ms": dataclasses.asdict(report.step_time_ms),
            "traces": report.traces,
            "replicas_in_sync": report.replicas_in_sync,
        }

    def error(self, task: Any, **settings: Any) -> str:
        """Kind and message of the error that every rank must raise."""
        try:
            self.trainer(task, **settings).fit()
        except TfdistError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"


def uneven_rows(run: Runner) -> Any:
    return run.fit(toy.ToyLine(targets=[float(i) for i in range(5)]))


def toy_net(run: Runner) -> Any:
    return run.fit(toy.ToyNet(), steps=20)


def own_step(run: Runner) -> Any:
    return run.fit(toy.GuideStyle(), steps=20)


def batch_norm(run: Runner) -> Any:
    """17 rows in batches of 16: the last batch has one row, so that all replicas but one are empty."""
    return run.fit(toy.BatchNormNet(rows=17), steps=6)


def convolution(run: Runner) -> Any:
    """17 rows in batches of 16, as above."""
    return {str(sync): run.fit(toy.ConvNet(rows=17, synchronized=sync), steps=4) for sync in (False, True)}


def equal_start(run: Runner) -> Any:
    trainer = run.trainer(toy.OwnSeed())
    return {
        "variables": [[v.path, v.numpy().tolist()] for v in (*trainer.model.variables, *trainer.optimizer.variables)],
        "digest": digest([*trainer.model.variables, *trainer.optimizer.variables]),
    }


def ranks_disagree(run: Runner) -> Any:
    return {"shape": run.error(toy.OwnShape()), "depth": run.error(toy.OwnDepth())}


def plans_disagree(run: Runner) -> Any:
    return {differs: run.error(toy.OwnPlan(differs=differs)) for differs in ("rows", "epochs", "global_batch_size")}


def whole_number_state(run: Runner) -> Any:
    """64 rows in batches of 15."""
    return run.fit(toy.Counting(), epochs=1, global_batch_size=15)["state"]


def row_coverage(run: Runner) -> Any:
    """Shuffled; what this process's replicas saw, as [replica, ids]."""
    task = toy.RowIds()
    report = run.fit(task, epochs=2, shuffle_buffer=100, seed=3, steps_per_chunk=1)
    return {"seen": task.seen, "steps": report["steps"], "examples_seen": report["examples_seen"]}


def throughput(run: Runner) -> Any:
    """16 rows in the first step, 8 in the second, which takes at least 100 ms."""
    return run.fit(toy.Slow(targets=[0.0] * 24, seconds=0.1), steps=2, global_batch_size=16)


def digits(run: Runner) -> Any:
    result = run.fit(Digits(), steps=20, shuffle_buffer=10_000)
    return {key: result[key] for key in ("losses", "weights_sha256", "state_sha256", "metrics")}


def evaluation(run: Runner) -> Any:
    """Untrained: every row counted once, whatever the batch size."""
    return {size: run.trainer(toy.ToyNet(), global_batch_size=size).evaluate("test") for size in (3, 64)}


def not_finite(run: Runner) -> Any:
    return run.error(toy.Failing(how="nan", replica=min(1, run.count - 1), at=3), steps=5)


def bad_tasks(run: Runner) -> Any:
    wrong = ["empty", "not a tuple", "four parts", "unequal lengths", "a number", "scalar loss", "loss per class"]
    wrong += ["ragged examples", "batched"]
    return {kind: run.error(toy.Broken(wrong=kind)) for kind in [*wrong, "model raises"]}


def wrapped_optimizer(run: Runner) -> Any:
    return run.error(toy.Wrapped())


CASES: dict[str, Callable[[Runner], Any]] = {
    f.__name__: f
    for f in (
        uneven_rows,
        toy_net,
        own_step,
        batch_norm,
        convolution,
        equal_start,
        row_coverage,
        throughput,
        digits,
        evaluation,
        whole_number_state,
        bad_tasks,
        not_finite,
    )
}
ALL = CASES | {f.__name__: f for f in (ranks_disagree, plans_disagree, wrapped_optimizer)}

FULL_ONLY = {
    "horovod": {"batch_norm", "digits", "own_step"},
    "multi_worker_mirrored": {
        *("batch_norm", "convolution", "digits", "own_step", "evaluation"),
        *("whole_number_state", "bad_tasks", "plans_disagree"),
    },
    "mirrored": {"batch_norm", "convolution", "digits", "bad_tasks"},
    "one_device": {"batch_norm", "digits"},
}
"""Cases of this file that only `--full` runs, by backend. That the digits task gives the same bits on all backends is
also seen by test_command.py, and local BatchNorm without rows by the case `batch-norm-local` of `tfdist check`."""


def asked(backend: str, count: int, *, everything: bool) -> list[str]:
    """The cases of this file that are run here."""
    if count > 2:  # starting and tracing take longer, and less can be new
        # Three replicas are the harder case of empty pieces.
        return ["uneven_rows", "row_coverage", *(["digits"] + ["convolution"] * (count == 3) if everything else [])]
    names = list(CASES)
    if backend in ("horovod", "multi_worker_mirrored"):
        names += ["ranks_disagree", "plans_disagree"]
    if backend == "horovod":
        names += ["wrapped_optimizer"]
    return [name for name in names if everything or name not in FULL_ONLY[backend]]


ONCE = (
    "loss-scale-growth",
    "cosine",
    "plateau",
    "moving-average",
    "weight-decay",
    "several-outputs",
    "clip-kinds",
    "half-precision",
    "jit-line",
    "compression-float16",
)
"""Cases of `tfdist check` that mirrored alone runs: they come after the reduction, or do not depend on it."""
RIGHT = (
    "uneven-rows",
    "reported-loss",
    "clip-after-reduction",
    "mean-step",
    "learning-rate-scaling",
    "warm-up",
    "accumulate",
    "mean-of-halves",
)
"""Cases that every synchronous backend must show."""
REFERENCES = tuple(name for name, case in CHECKED.items() if isinstance(case.right, str))
"""Cases that are compared with one device."""
ONE_DEVICE = (*RIGHT, *REFERENCES, "weighted-mean", "overflow", "batch-norm-sync", "sparse-gradients", "metrics")
HOROVOD = (
    *RIGHT,
    "weighted-mean",
    "no-weight",
    "masked-words",
    "accumulate-leftover",
    "overflow",
    "batch-norm-local",
    "batch-norm-accumulated",
    "dropout-repeats",
    "augmentation",
    "sparse-gradients",
    "sparse-changing",
    "metrics",
    "early-stopping",
    "not-a-number",
    "compression-bfloat16",
    "adasum",
    "actions",
    "several-optimizers",
    "jit-net",
    "local-steps",
    "averaged-each-step",
)
"""Cases in which Horovod's collectives, or the processes' agreement, have a part."""
MULTI_WORKER = (
    *RIGHT,
    "weighted-mean",
    "overflow",
    "batch-norm-accumulated",
    "sparse-gradients",
    "sparse-changing",
    "metrics",
    "several-optimizers",
    "compression-bfloat16",
    "jit-net",
)
"""Cases in which the collectives or the variables of multi_worker_mirrored have a part."""
THREE = (
    "uneven-rows",
    "weighted-mean",
    "accumulate-leftover",
    "batch-norm-local",
    "batch-norm-accumulated",
    "sparse-gradients",
    "metrics",
)
"""Cases in which three replicas get other numbers of rows."""
FOUR = {"mirrored": ("uneven-rows", "reported-loss"), "horovod": ("uneven-rows", "reported-loss", "adasum")}
ONE_COPY = ("uneven-rows", "overflow", "batch-norm-accumulated", "sparse-gradients", "several-optimizers", "net")
"""Cases that central_storage runs, in a process that mirrored has used before."""


def checked(backend: str, count: int, *, everything: bool) -> list[str]:
    """The cases of `tfdist check` that are run here."""
    applying = [name for name, case in CHECKED.items() if case.applies(backend, count)]
    chosen = {
        "one_device": ONE_DEVICE,
        "mirrored": {2: CHECKED, 3: THREE}.get(count, FOUR["mirrored"]),
        "horovod": HOROVOD if count == 2 else FOUR["horovod"],
        "multi_worker_mirrored": MULTI_WORKER,
        "central_storage": ONE_COPY,
        "parameter_server": ("accounting", "whole-epochs"),  # one step in flight: see tests/hosts
    }[backend]
    return [name for name in applying if everything or name in chosen]


def main(folder: Path, backend: str, replicas: list[int]) -> None:
    if backend == "parameter_server":
        run_cases(folder, backend, replicas, checked(backend, replicas[0], everything=full()))
        return
    for count in replicas or [identify().size]:
        run = Runner(backend, count)
        results = {}
        run_cases(folder, backend, [count], checked(backend, count, everything=full()))
        for name in asked(backend, count, everything=full()):
            print(f"[{RANK}] {backend} {count}: {name}", file=sys.stderr, flush=True)
            start = time.process_time()
            results[name] = ALL[name](run)
            print(
                f"CPU [{RANK}] {backend} {count} {name} {time.process_time() - start:.2f}", file=sys.stderr, flush=True
            )
        (folder / f"{backend}-{count}-{RANK}.json").write_text(json.dumps(results))
    if backend == "mirrored":
        run_cases(folder, "central_storage", [2], checked("central_storage", 2, everything=full()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [int(n) for n in sys.argv[3:]])
