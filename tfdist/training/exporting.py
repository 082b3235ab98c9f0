"""A trained model as files that load without tfdist: a `.keras` file, or a SavedModel's folder."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist.config import Settings
from tfdist.errors import CheckpointProblem, UsageError
from tfdist.training.building import build_model
from tfdist.training.task import Task

__all__ = ["check_export", "export"]


def check_export(path: Path) -> None:
    """Find out before anything is run whether a model can be written there.

    Raises:
        UsageError: it cannot, and why.
    """
    parent = path.absolute().parent
    reason = None
    if not parent.is_dir():
        reason = f"there is no folder {parent}"
    elif not os.access(parent, os.W_OK):
        reason = f"the folder {parent} is read-only"
    elif path.suffix == ".keras" and path.is_dir():
        reason = "it is a folder"
    elif path.suffix != ".keras" and path.exists() and (not path.is_dir() or any(path.iterdir())):
        reason = (
            "it is there already; a SavedModel needs a new or an empty folder, and a file's name must end in .keras"
        )
    if reason:
        raise UsageError(f"export={str(path)!r} cannot be written: {reason}. Give another path.")


def export(task: Task, settings: Settings, values: Sequence[Any], path: Path) -> None:
    """Write a model. On the chief alone, outside of a strategy's scope.

    The task's recipe makes it anew, as a model that knows nothing of a strategy.

    Args:
        values: of the variables of the model, in their order.

    Raises:
        UsageError: there is something else at the path, or Keras cannot write this model.
        CheckpointProblem: the disk does not take it.
    """
    check_export(path)
    with tf.device("CPU:0"):
        model = build_model(task, settings)
        for variable, value in zip(model.variables, values, strict=True):
            variable.assign(value)
    temporary = path.with_name(f".{path.stem}-{secrets.token_hex(4)}{path.suffix}")
    try:
        _write(model, temporary)
        if path.is_dir():
            path.rmdir()
        temporary.replace(path)
    except OSError as error:
        raise CheckpointProblem(f"export={str(path)!r} could not be written: {error.strerror or error}.") from None
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UsageError(
            f"export={str(path)!r}: Keras cannot write this model ({str(error).splitlines()[0]})."
        ) from None
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _write(model: keras.Model, path: Path) -> None:
    if path.suffix == ".keras":
        model.save(path)
    else:
        model.export(path, verbose=False)
