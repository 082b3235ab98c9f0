"""What is said of a run: to its checkpoints, and to the other ranks before the first step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.cluster.channel import require_same
from tfdist.training.building import source_digest
from tfdist.training.built import Built
from tfdist.training.console import Plan
from tfdist.training.data import Examples
from tfdist.training.evaluations import Evaluations
from tfdist.training.replica import ONLY
from tfdist.training.saving import named

__all__ = ["description", "kept_variables", "require_same_plan"]


def description(built: Built, plan: Plan) -> dict[str, Any]:
    """What a checkpoint says of its run; `course` is what the order of the examples depends on."""
    overlap = built.session.asynchronous and (plan.examples or 0) % plan.global_batch_size > 0
    cls, settings = type(built.task), built.settings
    about = {
        "backend": plan.backend,
        "replicas_in_sync": plan.replicas,
        "task": {
            "class": f"{cls.__module__}:{cls.__qualname__}",
            "task": getattr(built.task, "loaded_from", None),
        },
        "course": {
            "seed": settings.seed,
            "shuffle_buffer": settings.shuffle_buffer,
            "global_batch_size": plan.global_batch_size,
            "accumulate": plan.accumulate,
            "examples": plan.examples,
            "batches": "going on over the end of an epoch" if overlap else "cut at the end of an epoch",
            "settings": dataclasses.asdict(settings),
        },
    }
    told: dict[str, Any] = json.loads(json.dumps(about))  # as it comes back
    return told


def require_same_plan(built: Built, plan: Plan, train: Examples, evaluations: Evaluations) -> None:
    """Ranks that would take other steps, or other batches, must not start: they would wait for each other.

    Raises:
        RanksDisagree: names what differs, and the first rank where it does; on every rank.
    """
    splits = built.task.evaluation_splits()
    facts = {
        "the task": type(built.task).__name__,
        "the number of training examples": plan.examples,
        "the number of steps": plan.steps,
        "the global batch size": plan.global_batch_size,
        "the learning rate": built.learning_rate,
        "the sizes of the evaluated splits": {split: evaluations.examples(split, count=True).size for split in splits},
        "the metrics": {split: loop.metrics for split, (loop, _) in evaluations.loops.items()},
        "the settings": dataclasses.asdict(built.settings),
        "the code of the task": source_digest(type(built.task)),
        "the structure of the training examples": str(train.dataset.element_spec),
    }
    for what, value in facts.items():
        require_same(built.session.channel, f"comparing {what}", what, value)


def kept_variables(built: Built, own: Sequence[tf.Variable]) -> dict[str, Any]:
    """All variables that a run must keep, by their names in a checkpoint.

    Args:
        own: those of the trainer itself.
    """
    optimizers = [
        ("optimizer" if name == ONLY else f"optimizer/{name}", [(v.path, v) for v in optimizer.variables])
        for name, optimizer in built.optimizers.items()
    ]
    others = named([*optimizers, ("trainer", [(v.name.partition(":")[0], v) for v in own])])
    return {**built.named_model(), **built.named_averages(), **others}
