"""tfdist: one TensorFlow training step, on native tf.distribute strategies and on Horovod over MPI.

What stands here is imported when it is first used, so that `import tfdist` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist.config import Settings
    from tfdist.errors import TfdistError, UsageError
    from tfdist.strategies.session import strategy
    from tfdist.training.actions import Moment
    from tfdist.training.partitioned import PartitionedEmbedding
    from tfdist.training.replica import Replica
    from tfdist.training.report import Report
    from tfdist.training.task import Task
    from tfdist.training.trainer import Trainer

__all__ = [
    "Moment",
    "PartitionedEmbedding",
    "Replica",
    "Report",
    "Settings",
    "Task",
    "TfdistError",
    "Trainer",
    "UsageError",
    "__version__",
    "strategy",
]

__version__ = "0.1.0"

_HOMES = {
    "Moment": "tfdist.training.actions",
    "PartitionedEmbedding": "tfdist.training.partitioned",
    "Replica": "tfdist.training.replica",
    "Report": "tfdist.training.report",
    "Settings": "tfdist.config",
    "Task": "tfdist.training.task",
    "TfdistError": "tfdist.errors",
    "Trainer": "tfdist.training.trainer",
    "UsageError": "tfdist.errors",
    "strategy": "tfdist.strategies.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tfdist' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
