"""Runs that stop after 7 steps, and runs that go on from checkpoints which other backends have made.

    python resume_program.py FOLDER PART        or under mpirun: started once per part by `test_resume.py`

Each part writes what it got to FOLDER/PART-rank.json. A stopped run leaves its folder in FOLDER/BACKEND.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.resumable import Resumable
from tests.toy import ToyNet
from tfdist import Moment, Task, TfdistError, Trainer
from tfdist.cluster.identity import identify

RANK = identify().rank


def train(
    backend: str, replicas: int | None = None, task: Task | None = None, **settings: Any
) -> tuple[Trainer, dict[str, Any]]:
    settings = {"backend": backend, "replicas": replicas, "intra_op_threads": 1, "quiet": True, **settings}
    trainer = Trainer(task or Resumable(), **settings)
    report = trainer.fit()
    return trainer, {
        "state_sha256": report.state_sha256,
        "metrics": report.metrics,
        "steps": report.steps,
        "examples_seen": report.examples_seen,
        "resumed_from": report.resumed_from,
        "weights": [v.numpy().tolist() for v in trainer.model.trainable_variables],
    }


def stop(folder: Path, backend: str, replicas: int | None = None) -> None:
    train(backend, replicas, checkpoint_dir=folder / backend, stop_after_steps=7)


def go_on(folder: Path, saved_by: str, backend: str, replicas: int | None = None) -> dict[str, Any]:
    """Go on from a checkpoint of a folder that stays as it is; only rank 0 needs it."""
    return train(backend, replicas, resume=str(folder / saved_by))[1]


def drift(backend: str) -> str:
    """The error that follows when rank 1 changes a weight by itself after step 4."""

    def disturb(moment: Moment) -> None:
        if RANK == 1 and moment.kind == "chunk" and moment.step == 4:
            kernel = made[0].model.trainable_variables[0]
            kernel.assign(kernel.numpy() + 1e-3)

    made: list[Trainer] = []
    settings: dict[str, Any] = {"backend": backend, "intra_op_threads": 1, "quiet": True, "steps_per_chunk": 2}
    made.append(Trainer(Resumable(), actions=[disturb], check_every=6, **settings))
    try:
        made[0].fit()
    except TfdistError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def mirrored(folder: Path) -> dict[str, Any]:
    stop(folder, "mirrored", 2)
    return {"straight": train("mirrored", 2)[1]}


def horovod(folder: Path) -> dict[str, Any]:
    stop(folder, "horovod")
    found = {"from mirrored": go_on(folder, "mirrored", "horovod"), "from horovod": go_on(folder, "horovod", "horovod")}
    train("horovod", task=ToyNet(), steps=10, checkpoint_dir=folder / "toy", stop_after_steps=5)
    trainer, _ = train("horovod", steps=1)
    predictions = trainer.predict("test")
    return {**found, "drift": drift("horovod"), "predictions": predictions.tolist()}


def multi_worker_mirrored(folder: Path) -> dict[str, Any]:
    stop(folder, "multi_worker_mirrored")
    found = {"from horovod": go_on(folder, "horovod", "multi_worker_mirrored")}
    return {**found, "drift": drift("multi_worker_mirrored")}


def mirrored_again(folder: Path) -> dict[str, Any]:
    # A process has as many devices as its first strategy asks for.
    toy: dict[str, Any] = {"task": ToyNet(), "steps": 10}
    found = {"three": train("mirrored", 3, resume=str(folder / "toy"), **toy)[1], "two": train("mirrored", 2, **toy)[1]}
    for name in ("mirrored", "multi_worker_mirrored"):
        found[f"from {name}"] = go_on(folder, name, "mirrored", 2)
    trainer, _ = train("mirrored", 2, steps=1)
    return {**found, "predictions": trainer.predict("test").tolist()}


def main(folder: Path, part: str) -> None:
    parts = {f.__name__: f for f in (mirrored, horovod, multi_worker_mirrored, mirrored_again)}
    (folder / f"{part}-{RANK}.json").write_text(json.dumps(parts[part](folder)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
