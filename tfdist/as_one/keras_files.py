"""Files that Keras writes, where every process of a job writes to the same paths (see files.py)."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist.as_one.files import own_path, turn
from tfdist.as_one.keras_steps import require_shared_metrics
from tfdist.errors import RanksDisagree

__all__ = ["follow_the_chief", "write_whole"]

_PATHS = ("path", "dir", "filename")  # how the attributes of Keras's callbacks end that hold one


@functools.cache
def write_whole() -> None:
    """`save` and `save_weights` write beside the place and move the file there, so that it is always whole."""
    keras.Model.save = _written_whole(keras.Model.save)
    keras.Model.save_weights = _written_whole(keras.Model.save_weights)
    keras.saving.save_model = keras.models.save_model = _written_whole(keras.saving.save_model)
    keras.saving.save_weights = _written_whole(keras.saving.save_weights)


def _written_whole(save: Callable[..., Any]) -> Callable[..., Any]:
    """Keras's `save(model, filepath, …)`: a local file is written beside its place, and then moved there."""

    @functools.wraps(save)
    def save_whole(model: Any, filepath: Any, overwrite: bool = True, *more: Any, **options: Any) -> Any:
        place = Path(str(filepath))
        if "://" in str(filepath) or not place.parent.is_dir() or (place.exists() and not overwrite):
            return save(model, filepath, overwrite, *more, **options)
        in_parts = more or options.get("zipped") is False or options.get("max_shard_size")
        if in_parts or place.suffix not in (".keras", ".h5", ".hdf5"):
            with turn(str(place)):  # several files, whose names depend on the path
                return save(model, filepath, overwrite, *more, **options)
        own = Path(own_path(str(place)))
        try:
            saved = save(model, own, **options)
            own.replace(place)
            return saved
        finally:
            own.unlink(missing_ok=True)

    return save_whole


@functools.cache
def follow_the_chief() -> None:
    """Inside `fit` the chief alone writes to the real paths and shows a bar; all end together."""
    kinds = keras.callbacks
    listed = kinds.CallbackList
    set_model, train_begin, train_end = listed.set_model, listed.on_train_begin, listed.on_train_end
    writers = (kinds.ModelCheckpoint, kinds.CSVLogger, kinds.TensorBoard)
    all_writers = (*writers, kinds.BackupAndRestore)

    @functools.wraps(set_model)
    def set_model_on_each(self: Any, model: Any) -> None:
        if _is_shared(model):
            require_shared_metrics(model)
        if _follows(model):
            self.callbacks = [callback for callback in self.callbacks if not isinstance(callback, kinds.ProgbarLogger)]
            _to_scratch(self.callbacks, writers)  # TensorBoard takes its path here
        set_model(self, model)

    @functools.wraps(train_begin)
    def begin_on_each(self: Any, logs: Any = None) -> None:
        backups = [callback for callback in self.callbacks if isinstance(callback, kinds.BackupAndRestore)]
        if _follows(self.model):
            _to_scratch(self.callbacks, writers)  # a list that is used for a second fit got its real paths back
        if _is_shared(self.model):
            _agree_on_steps(self)
        elif self.model is not None:
            warnings.warn(
                f"the model {self.model.name!r} was made outside of strategy.scope(): every process trains one of its "
                "own. Build and compile it inside `with strategy.scope():`.",
                stacklevel=2,
            )
        for callback in backups:
            _to_real_path(callback)  # all ranks read the chief's backup
        train_begin(self, logs)
        for callback in backups if _is_shared(self.model) else ():
            _agree_on_epoch(self.model, callback.backup_dir)
        if _follows(self.model):
            _to_scratch(backups, kinds.BackupAndRestore)

    @functools.wraps(train_end)
    def end_together(self: Any, logs: Any = None) -> None:
        train_end(self, logs)
        for callback in self.callbacks:
            _to_real_path(callback)
        if _is_shared(self.model) and any(isinstance(callback, all_writers) for callback in self.callbacks):
            _gathered(self.model.distribute_strategy, 0)

    listed.set_model, listed.on_train_begin, listed.on_train_end = set_model_on_each, begin_on_each, end_together


def _is_shared(model: Any) -> bool:
    """Whether other processes train the model together with this one."""
    strategy = getattr(model, "distribute_strategy", None)
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and strategy.num_replicas_in_sync > 1


def _follows(model: Any) -> bool:
    return _is_shared(model) and not model.distribute_strategy.extended.should_checkpoint


def _to_scratch(callbacks: list[Any], kinds: Any) -> None:
    """Let the callbacks of these kinds write where nobody reads, under the same names."""
    for callback in callbacks:
        if not isinstance(callback, kinds) or hasattr(callback, "_tfdist_real"):
            continue
        own = vars(callback).items()
        callback._tfdist_real = {k: v for k, v in own if k.endswith(_PATHS) and isinstance(v, str | Path)}
        scratch = tempfile.mkdtemp(dir=_scratch_folder())
        for name, value in callback._tfdist_real.items():
            path = os.path.join(scratch, os.path.abspath(value).lstrip("/"))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            setattr(callback, name, path)


def _to_real_path(callback: Any) -> None:
    """Undo `_to_scratch`, also one that an error has left."""
    vars(callback).update(vars(callback).pop("_tfdist_real", {}))


def _agree_on_steps(callbacks: Any) -> None:
    for name in ("epochs", "steps"):
        number = callbacks.params.get(name)
        numbers = _gathered(callbacks.model.distribute_strategy, -1 if number is None else number)
        if len(set(numbers)) == 1:
            continue
        told = (
            f"fit has other numbers of {name} on other ranks: "
            f"{', '.join(f'{number} on rank {rank}' for rank, number in enumerate(numbers))}. Give all ranks the same "
            "data and the same batch size, the global one; each takes its part of it."
        )
        if name == "epochs":
            raise RanksDisagree(told)
        warnings.warn(told, stacklevel=2)  # right where each rank has a pipeline of its own, which ends together


def _agree_on_epoch(model: Any, folder: Any) -> None:
    epochs = _gathered(model.distribute_strategy, getattr(model, "_initial_epoch", None) or 0)
    if len(set(epochs)) > 1:
        raise RanksDisagree(
            f"BackupAndRestore({os.fspath(folder)!r}) goes on from other epochs on other ranks: "
            f"{', '.join(f'{epoch} on rank {rank}' for rank, epoch in enumerate(epochs))}. Put backup_dir on a file "
            "system that all processes share, or remove it on every host to start anew."
        )


def _gathered(strategy: tf.distribute.Strategy, number: int) -> list[int]:
    """The number of each replica. No process leaves before all have come."""
    numbers = strategy.experimental_distribute_values_from_function(lambda _: tf.constant([number]))
    gathered: list[int] = strategy.gather(numbers, axis=0).numpy().tolist()
    return gathered


@functools.cache
def _scratch_folder() -> str:
    folder = tempfile.mkdtemp(prefix="tfdist-scratch-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
