"""Parts of tfdist/as_one by themselves; what they do for several ranks shows in the contract suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tfdist.as_one import files, keras_files, orders


def save(model: str, filepath: Any, overwrite: bool = True, zipped: bool | None = None) -> str:
    """As Keras's; notes in the file how it was called."""
    if model == "fails":
        Path(filepath).write_text("half")
        raise OSError("disk full")
    Path(filepath).write_text(f"{model} {overwrite} {zipped}")
    return Path(filepath).name


save_whole = keras_files._written_whole(save)


@pytest.mark.parametrize("name", ["a.keras", "a b.weights.h5", "é[1].h5"])
def test_a_file_is_written_elsewhere_and_moved(tmp_path: Path, name: str) -> None:
    written_as = save_whole("new", tmp_path / name)
    assert written_as != name
    assert written_as.endswith(name), "Keras tells the format by the end of the name"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    save_whole("newer", str(tmp_path / name), overwrite=True, zipped=None)
    assert (tmp_path / name).read_text() == "newer True None"


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    save_whole("old", tmp_path / "a.keras")
    with pytest.raises(OSError, match="disk full"):
        save_whole("fails", tmp_path / "a.keras")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.keras": "old True None"}


def test_what_is_not_one_new_file_is_left_to_keras(tmp_path: Path) -> None:
    (tmp_path / "a.keras").touch()
    assert save_whole("m", tmp_path / "a.keras", overwrite=False) == "a.keras"  # Keras asks first
    assert save_whole("m", tmp_path / "folder", zipped=False) == "folder"
    assert save_whole("m", tmp_path / "b.keras", True, False) == "b.keras"
    with pytest.raises(FileNotFoundError):
        save_whole("m", tmp_path / "none" / "a.keras")


@pytest.mark.parametrize("meanwhile", [False, True])
def test_files_that_another_process_has_put_there_stay(tmp_path: Path, meanwhile: bool) -> None:
    data, index = tmp_path / "c.data", tmp_path / "c.index"
    before = files._state(str(index))
    own = {str(tmp_path / f"own.{path.suffix}"): str(path) for path in (index, data)}
    for path in own:
        Path(path).write_text("mine")
    if meanwhile:
        data.write_text("theirs")
        index.write_text("theirs")
    files._move(own, last=str(index), before=before)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "c.data": "theirs" if meanwhile else "mine",
        "c.index": "theirs" if meanwhile else "mine",
    }


def test_a_lock_that_a_dead_process_has_left_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.index.lock").mkdir()
    monkeypatch.setattr(files, "_PATIENCE_SECONDS", 0.05)
    with files.turn(str(tmp_path / "c.index")):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("dataset", "count"),
    [
        (lambda d: d.batch(2), 0),
        (lambda d: d.shuffle(4).map(lambda x: x).batch(2), 1),
        (lambda d: d.shuffle(4, seed=1).batch(2).shuffle(2), 2),
        (lambda d: d.shuffle(4, reshuffle_each_iteration=False), 0),
        (lambda d: tf.data.Dataset.zip((d.shuffle(4), d.shuffle(4).concatenate(d))), 2),
    ],
)
def test_shuffles_with_a_new_order_each_time(dataset: Any, count: int) -> None:
    assert len(list(orders._shuffles(dataset(tf.data.Dataset.range(4))))) == count
