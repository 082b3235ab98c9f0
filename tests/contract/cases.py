"""The right values, run on one backend: started once per job by `test_right_values.py`.

    python cases.py FOLDER BACKEND REPLICAS…        or under mpirun, where the launcher gives the replicas

First come the cases of `tfdist check` (tfdist/evidence), then these, which look deeper or go wrong on purpose. Every
process writes what it got to FOLDER/BACKEND-REPLICAS-rank.json; the tests compare. Single-process backends do several
numbers of replicas in one process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import toy
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
    padded = {"steps": 6, "global_batch_size": 16}
    return {
        "same first step": run.fit(toy.Slow(), **padded)["examples_per_second"],
        "slow first step": run.fit(toy.Slow(first=3.0), **padded)["examples_per_second"],
    }


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
FEW = {name: CASES[name] for name in ("uneven_rows", "convolution", "row_coverage", "digits")}
"""For more than two replicas, where starting and tracing take longer and less can be new."""

UNEVEN = (
    "uneven-rows",
    "weighted-mean",
    "sum-over-batch",
    "no-weight",
    "masked-words",
    "output-penalty",
    "accumulate-leftover",
    "overflow",
    "batch-norm-local",
    "batch-norm-sync",
    "batch-norm-accumulated",
    "dropout-differs",
    "sparse-gradients",
    "metrics",
    "several-optimizers",
)
"""Cases of `tfdist check` in which three replicas get other numbers of rows."""
FOUR = (
    "uneven-rows",
    "weighted-mean",
    "masked-words",
    "overflow",
    "batch-norm-sync",
    "batch-norm-accumulated",
    "sparse-gradients",
    "adasum",
)
"""Cases of `tfdist check` that four replicas run."""
ONCE = (
    "reported-loss",
    "loss-scale-growth",
    "learning-rate-scaling",
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
"""Cases that mirrored and one device alone run: what they show comes after the reduction, or does not depend on it."""
NATIVE = (
    "uneven-rows",
    "weighted-mean",
    "masked-words",
    "accumulate-leftover",
    "overflow",
    "batch-norm-sync",
    "batch-norm-accumulated",
    "dropout-repeats",
    "sparse-gradients",
    "sparse-changing",
    "metrics",
    "several-optimizers",
    "not-a-number",
    "compression-bfloat16",
    "jit-net",
    "net",
)
"""Cases that two processes of multi_worker_mirrored run: its collectives or its variables have a part in them."""


ONE_COPY = (
    "uneven-rows",
    "accumulate-leftover",
    "overflow",
    "batch-norm-sync",
    "batch-norm-accumulated",
    "sparse-gradients",
    "several-optimizers",
    "net",
)
"""Cases of `tfdist check` that central_storage runs, in a process that mirrored has used before."""


def checked(backend: str, count: int) -> list[str]:
    """The cases of `tfdist check` that are run here. All of them take some minutes: `tfdist check --replicas 1 2 4`."""
    if backend == "central_storage":
        return list(ONE_COPY)
    if backend == "parameter_server":
        return [name for name in CHECKED if CHECKED[name].asynchronous]
    if count > 2:
        return [name for name in CHECKED if name in (UNEVEN if count == 3 else FOUR)]
    if backend == "multi_worker_mirrored":
        return [name for name in CHECKED if name in NATIVE]
    return [name for name in CHECKED if backend != "horovod" or name not in ONCE]


def main(folder: Path, backend: str, replicas: list[int]) -> None:
    if backend == "parameter_server":
        run_cases(folder, backend, replicas, checked(backend, replicas[0]))
        return
    for count in replicas or [identify().size]:
        run = Runner(backend, count)
        cases = dict(CASES if count <= 2 else FEW)
        if count == 4:  # three replicas are the harder case of empty pieces
            del cases["convolution"]
        if identify().size == 2:
            cases["ranks_disagree"] = ranks_disagree
            cases["plans_disagree"] = plans_disagree
        if backend == "horovod" and count == 2:
            cases["wrapped_optimizer"] = wrapped_optimizer
        results = {}
        run_cases(folder, backend, [count], checked(backend, count))
        for name, case in cases.items():
            print(f"[{RANK}] {backend} {count}: {name}", file=sys.stderr, flush=True)
            results[name] = case(run)
        (folder / f"{backend}-{count}-{RANK}.json").write_text(json.dumps(results))
    if backend == "mirrored":
        run_cases(folder, "central_storage", [2], checked("central_storage", 2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [int(n) for n in sys.argv[3:]])
