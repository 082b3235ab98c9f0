"""What a run did and measured, as one JSON object."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import EnvironmentProblem, UsageError

__all__ = ["Report", "StepTime", "check_writable", "step_time", "throughput", "versions", "without_nan", "write"]


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Milliseconds per step, without the first step; None where there were fewer than two."""

    median: float | None
    p10: float | None
    p90: float | None


@dataclasses.dataclass(frozen=True)
class Report:
    """A finished run."""

    backend: str
    task: str
    processes: int
    replicas_in_sync: int
    global_batch_size: int
    accumulate: int
    """Global batches in one step."""
    learning_rate: float
    """Base learning rate."""
    seed: int
    epochs: int | None
    """None where the run was counted in steps."""
    steps: int
    """In all, those before a resume among them; losses and times below are of this start."""
    resumed_from: int | None
    """The step of the checkpoint that this start went on from."""
    skipped_steps: int
    """Of these, steps that were left out because of an overflow, or of what nan_policy skips."""
    stopped: str | None
    """Why training ended before its last step."""
    best: dict[str, Any] | None
    """The best evaluation, where one was looked for: monitor, value, step, epoch."""
    examples_seen: int
    losses: list[float]
    """Global mean data loss of every step, without penalties; summed over the parts of the task."""
    penalties: list[float]
    """What regularizers and layers added to the loss at every step."""
    learning_rates: list[float]
    """Effective learning rate of every step; of the first optimizer, where there are several."""
    loss_scale: float | None
    """At the end; None without float16."""
    parts: dict[str, dict[str, list[float]]]
    """For a task with several optimizers: the losses and learning rates of each, by its name."""
    metrics: dict[str, dict[str, float]]
    """By split; the last evaluation, or the best one where its weights were restored."""
    weights_sha256: str
    """Over the bytes of the trainable weights in order."""
    state_sha256: str
    """Over all variables of the model, of the optimizers and of the trainer (counters, loss scale, averages)."""
    step_seconds: list[float]
    """That each step took."""
    step_time_ms: StepTime
    examples_per_second: float | None
    """Over all replicas, without the first step and without evaluation."""
    traces: dict[str, int]
    """How often each compiled loop was traced."""
    checkpoints: dict[str, Any] | None
    """With checkpoint_dir: saved, how many; last_step; and seconds: copy_seconds and wait_seconds, for which training
    stood still, to copy the variables and since the save before was not done, and write_seconds beside it."""
    ranks: list[dict[str, Any]]
    """Of each process: rank, host; peak_memory_mb; startup_seconds, from the start of the process to the end of its
    first step (null where the system does not tell); and what it spent in all steps but the first: input_seconds,
    waiting for its input; compute_seconds, until its own gradients were there; collective_seconds, until those of all
    were, waiting for slower ranks included. Empty for an asynchronous run."""
    workers: dict[str, Any] | None
    """Of an asynchronous run: workers, parameter_servers, max_in_flight; updates, the steps that were applied (more
    than steps - skipped_steps where a worker died right after its update); and staleness: mean and max, over the
    steps, of the updates that were complete between a step's reading of the weights and its writing."""
    intra_op_threads: int
    versions: dict[str, str]


def step_time(seconds: np.ndarray) -> StepTime:
    """Quantiles over all steps but the first, which waits for the first examples and warms up."""
    if len(seconds) < 2:
        return StepTime(None, None, None)
    p10, median, p90 = (float(q) for q in np.quantile(seconds[1:] * 1e3, [0.1, 0.5, 0.9]))
    return StepTime(median=median, p10=p10, p90=p90)


def throughput(rows: np.ndarray, seconds: np.ndarray) -> float | None:
    """Examples per second over all steps but the first."""
    if len(seconds) < 2:
        return None
    return float(rows[1:].sum() / seconds[1:].sum())


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {"python": platform.python_version()}
    for package in ("tfdist", "tensorflow", "keras", "numpy", "horovod", "mpi4py"):
        for name in (package, f"{package}-cpu"):
            try:
                found[package] = importlib.metadata.version(name)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def check_writable(path: Path, setting: str = "report") -> None:
    """Find out before anything is run whether its result can be written.

    Raises:
        UsageError: it cannot, and why.
    """
    reason = None
    if path.is_dir():
        reason = "it is a folder"
    elif not path.absolute().parent.is_dir():
        reason = f"there is no folder {path.absolute().parent}"
    else:
        try:
            with tempfile.NamedTemporaryFile(dir=path.absolute().parent):
                pass
            if path.exists() and not os.access(path, os.W_OK):
                reason = "the file there is read-only"
        except OSError as error:
            reason = error.strerror
    if reason:
        raise UsageError(f"{setting}={str(path)!r} cannot be written: {reason}. Give another path.")


def write(report: Report, path: Path) -> None:
    """Write the report whole or not at all."""
    text = json.dumps(without_nan(dataclasses.asdict(report)), indent=1, allow_nan=False)
    path = path.resolve()  # a link stays, and what it points to is written
    if path.exists() and not path.is_file():
        path.write_text(text + "\n")  # a device or a pipe, which must not be replaced by a file
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text + "\n")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise EnvironmentProblem(f"report={str(path)!r} could not be written: {error.strerror or error}.") from None


def without_nan(value: Any) -> Any:
    """Numbers that JSON does not know (NaN, infinity) become null."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
