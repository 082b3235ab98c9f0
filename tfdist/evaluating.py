"""`tfdist evaluate`: the model of a checkpoint, and what it is worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tfdist.checkpoints.checkpoint import find
from tfdist.cluster.channel import together
from tfdist.cluster.identity import Identity
from tfdist.commands import EvaluateCommand
from tfdist.config import Settings
from tfdist.errors import EnvironmentProblem, UsageError
from tfdist.strategies.session import open_session
from tfdist.tasks.load import load_task

__all__ = ["evaluate"]

_OF_THE_RUN = ("seed", "precision", "ema", "batch_norm", "loss_reduction", "global_batch_size", "learning_rate")
"""Settings of the checkpoint's run that the model and its evaluation depend on."""


def evaluate(command: EvaluateCommand, identity: Identity) -> dict[str, dict[str, float]]:
    """Evaluate, print on the chief, and write what was asked for. Every process calls it alike.

    Raises:
        UsageError, CheckpointProblem: there is no such checkpoint, or it does not fit the task.
    """
    given = Settings(backend=command.backend, replicas=command.replicas, quiet=command.quiet)
    session = open_session(given.backend, given.options)
    channel, checkpoint = session.channel, command.checkpoint
    assert checkpoint is not None

    from tfdist.training.report import check_writable
    from tfdist.training.trainer import Trainer

    def look() -> dict[str, Any] | None:
        if command.json is not None and identity.is_chief:
            check_writable(command.json, "json")
        return find(checkpoint, _tell).manifest.state if identity.is_chief else None

    state = channel.exchange("the checkpoint", together(channel, "reading the checkpoint", look))[0]
    spec, arguments = command.task, list(command.task_args)
    if spec is None:
        if state["task"]["task"] is None:
            raise UsageError("the checkpoint does not say which task it is of. Set task.")
        spec, *before = state["task"]["task"]
        arguments = [*before, *arguments]
    task = together(channel, "loading the task", lambda: load_task(spec, arguments))
    settings = {name: state["course"]["settings"][name] for name in _OF_THE_RUN}
    settings["global_batch_size"] = command.global_batch_size or state["course"]["global_batch_size"]
    trainer = Trainer(task, **settings, backend=given.backend, replicas=given.replicas, quiet=command.quiet)
    trainer.load_weights(checkpoint)
    results = {split: trainer.evaluate(split) for split in command.split or task.evaluation_splits()}
    if session.is_chief:
        _show(results, command.json)
    return results


def _tell(message: str) -> None:
    print(f"tfdist: {message}", flush=True)


def _show(results: dict[str, dict[str, float]], path: Path | None) -> None:
    from tfdist.training.console import numbers

    for split, metrics in results.items():
        print(f"{split}: {numbers(metrics)}", flush=True)
    if path is None:
        return
    try:
        path.write_text(json.dumps(results, indent=1) + "\n")
    except OSError as error:
        raise EnvironmentProblem(f"json={str(path)!r} could not be written: {error.strerror}.") from None
