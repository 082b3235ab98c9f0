"""Files, where every process of a job runs the same program and writes to the same paths.

A program that is written for one process saves a checkpoint or a model without asking who it is. Here it runs
once per rank, so several processes write one file at the same time. Two rules keep that right:

- What a program saves by itself (`tf.train.Checkpoint`, SavedModels, Keras `save` and `save_weights`) is written
  under a name of the process's own and then moved to its place, one process at a time. What lies there is always
  whole, whoever wrote it last; all ranks hold the same variables. A program may still save on one rank alone, or on
  each rank to another path.
- Keras's callbacks inside `fit`, which all ranks run together, follow the chief: it alone writes to the real path
  and shows a progress bar, the others to a scratch folder, and `fit` ends once the chief has written.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist import private_tf

__all__ = ["own_path", "turn", "write_whole"]

_PATIENCE_SECONDS = 30.0  # for another process that moves its files to their places


def write_whole() -> None:
    """From now on several processes of this job may write the same checkpoints and SavedModels."""
    _whole_checkpoints()
    _whole_saved_models()


@functools.cache
def _whole_checkpoints() -> None:
    save = private_tf.MultiDeviceSaver.save

    @functools.wraps(save)
    def save_whole(self: Any, file_prefix: Any, options: Any = None) -> Any:
        if not tf.executing_eagerly():  # the traced function of a SavedModel
            return save(self, file_prefix, options)
        place = tf.get_static_value(tf.convert_to_tensor(file_prefix)).decode()
        own = own_path(place)
        before = _state(f"{place}.index")
        saved = save(self, tf.constant(own), options)
        folder, _, start = own.rpartition("/")
        names = [name for name in tf.io.gfile.listdir(folder or ".") if name.startswith(start)]
        files = {f"{folder}/{name}" if folder else name: place + name[len(start) :] for name in names}
        _move(files, last=f"{place}.index", before=before)
        return saved

    private_tf.MultiDeviceSaver.save = save_whole


@functools.cache
def _whole_saved_models() -> None:
    save = private_tf.saved_model_save.save_and_return_nodes

    @functools.wraps(save)
    def save_whole(obj: Any, export_dir: Any, *more: Any, **options: Any) -> Any:
        place = os.fspath(export_dir).rstrip("/")
        own = own_path(place)
        before = _state(f"{place}/saved_model.pb")
        try:
            saved = save(obj, own, *more, **options)
        except (AssertionError, KeyError) as error:
            if private_tf.ORDER_OF_COLLECTIVES not in str(error):
                raise
            raise ValueError(
                "a SavedModel cannot hold a tf.function in which replicas talk to each other (reduce, all_reduce, an "
                "assignment that is combined over replicas). Save an object without it, as `model.export` does."
            ) from error
        for folder, _, _ in tf.io.gfile.walk(own):
            tf.io.gfile.makedirs(place + folder.rstrip("/")[len(own) :])
        files = [f"{folder.rstrip('/')}/{name}" for folder, _, names in tf.io.gfile.walk(own) for name in names]
        _move({file: place + file[len(own) :] for file in files}, last=f"{place}/saved_model.pb", before=before)
        tf.io.gfile.rmtree(own)
        return saved

    private_tf.saved_model_save.save_and_return_nodes = save_whole


def _move(files: dict[str, str], last: str, before: tuple[int, int] | None) -> None:
    """Move files that belong together to their places, unless another process has put the same ones there meanwhile.

    Args:
        files: own path to place.
        last: the place of the file that names the others.
        before: the state of that file before the own ones were written.
    """
    with turn(last):
        same = _state(last) == before
        for own, place in sorted(files.items(), key=lambda item: item[1] == last):
            if same:
                tf.io.gfile.rename(own, place, overwrite=True)
            else:
                tf.io.gfile.remove(own)


def _state(path: str) -> tuple[int, int] | None:
    try:
        stat = tf.io.gfile.stat(path)
    except tf.errors.NotFoundError:
        return None
    return stat.length, stat.mtime_nsec


@contextlib.contextmanager
def turn(path: str) -> Iterator[None]:
    """One process at a time. A lock that a dead process has left is passed over after a while."""
    lock = f"{path}.lock"
    held = "://" in path  # no locks on object stores
    patience = time.monotonic() + _PATIENCE_SECONDS
    while not held and time.monotonic() < patience:
        try:
            os.mkdir(lock)
            held = True
        except FileExistsError:
            time.sleep(0.01)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(lock)


def own_path(place: str) -> str:
    """A hidden path of this process's own beside another path."""
    folder, slash, name = place.rpartition("/")
    return f"{folder}{slash}.{_own_name()}.{name}"


@functools.cache
def _own_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"
