"""What goes into a checkpoint comes out of it, and those stay that are kept."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.jobs import environment
from tests.unit.checkpoint_cases import FILES, ONE, STATE, flip, hidden, silent, steps
from tfdist.checkpoints.checkpoint import find, read
from tfdist.checkpoints.manifest import Manifest, TensorInfo
from tfdist.checkpoints.store import Store
from tfdist.errors import CheckpointProblem


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    with contextlib.ExitStack() as stack:

        def make(folder: Path = tmp_path, **options: Any) -> Store:
            store = Store(folder, **options)
            stack.callback(store.close)
            return store

        yield make


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to copy."""
    folder = tmp_path_factory.mktemp("saved")
    store = Store(folder)
    path = store.save(17, ONE, STATE)
    store.close()
    return path


class TestWhatComesOut:
    def test_tensors_of_all_types_and_shapes(self, open_store: Any, tmp_path: Path) -> None:
        types = "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex64 complex128"
        tensors = {f"of/{name}": np.array([[0, 1], [2, 3]], name) for name in types.split()}
        for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn):
            tensors[f"of/{np.dtype(dtype).name}"] = np.array([1.5, -2, math.nan], dtype)
            tensors[f"scalar/{np.dtype(dtype).name}"] = np.array(0.5, dtype)
        bits = np.array([0x7FC00001, 0xFF800000, 0x80000000, 1], np.uint32)  # a NaN with a payload, -inf, -0, denormal
        tensors |= {
            "bits": bits.view(np.float32),
            "empty": np.zeros((0, 4), np.float64),
            "scalar": np.array(2**62 + 1, np.int64),
            "a name/with äö:0": np.ones(1, np.float32),
            "columns first": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            "other order of bytes": np.arange(3, dtype=">f4"),
        }
        path = open_store().save(5, tensors, {})
        back = find(path, silent).tensors()
        assert list(back) == sorted(tensors)
        for name, tensor in tensors.items():
            assert (back[name].shape, back[name].dtype.name) == (tensor.shape, tensor.dtype.name)
            assert back[name].tobytes() == tensor.astype(tensor.dtype.newbyteorder("=")).tobytes(), name
        assert sorted(os.listdir(path)) == FILES

    def test_the_state_with_numbers_that_json_does_not_know(self, open_store: Any) -> None:
        state = {
            "losses": [0.1, math.inf, -math.inf, math.nan, -0.0, 1e-310],
            "nested": {"none": None, "flag": True, "text": "nan ✓ \ud800", "large": 2**100},
            "numpy": np.float32(0.1),
            "tuple": (1, 2),
        }
        back = find(open_store().save(1, ONE, state), silent).manifest
        assert repr(back.state["losses"]) == repr(state["losses"])
        assert back.state["nested"] == state["nested"]
        assert (back.state["numpy"], back.state["tuple"]) == (float(np.float32(0.1)), [1, 2])
        assert back.tensors["model/kernel"] == TensorInfo((2, 3), "float32")

    def test_the_same_state_gives_the_same_bytes(self, saved: Path) -> None:
        whole = read(saved).manifest
        turned = dataclasses.replace(whole, state={"b": 1, "a": 2}).to_bytes()
        assert turned == dataclasses.replace(whole, state={"a": 2, "b": 1}).to_bytes()
        assert Manifest.from_bytes(whole.to_bytes()) == whole
        assert json.loads(turned)["schema"] == 1  # a plain JSON file, with its checksum as one of its values

    @pytest.mark.parametrize(
        ("tensors", "state", "says"),
        [
            (ONE, {"a": {"b": [1, {2}]}}, "state.a.b[1] cannot be saved: JSON does not know the type set"),
            (ONE, {"a": {3: 1}}, "state.a[3] cannot be saved"),
            (ONE, {"$float": "inf"}, "state['$float'] cannot be saved"),
            ({}, {}, "there are no variables"),
            ({"words": np.array(["a"])}, {}, "words is of type <U1, and checkpoints hold numbers only"),
            ({"pair": np.zeros(1, "i4,i4")}, {}, "step 4 could not be written"),
        ],
    )
    def test_what_cannot_be_saved_is_told_and_leaves_nothing(
        self, open_store: Any, tmp_path: Path, tensors: Any, state: Any, says: str
    ) -> None:
        store = open_store()
        with pytest.raises(CheckpointProblem) as caught:
            store.save(4, tensors, state)
        assert says in str(caught.value)
        assert os.listdir(tmp_path) == [".lock"]


class TestKeeping:
    def test_the_newest(self, open_store: Any, tmp_path: Path) -> None:
        store = open_store(keep=2)
        for step in (1, 2, 3, 10):
            store.save(step, ONE, STATE)
        assert (steps(tmp_path), hidden(tmp_path)) == ([3, 10], [])

    def test_the_best(self, open_store: Any, tmp_path: Path) -> None:
        store = open_store(keep=1, keep_best=True)
        for step, score in enumerate([0.5, 0.2, math.nan, 0.2, 0.4, None]):
            store.save(step, ONE, STATE, score=score)
        assert steps(tmp_path) == [1, 5]
        store.close()
        again = open_store(keep=1, keep_best=True)
        again.save(6, ONE, STATE, score=0.3)
        assert steps(tmp_path) == [1, 6]
        again.save(7, ONE, STATE, score=0.1)
        assert steps(tmp_path) == [7]

    def test_the_largest(self, open_store: Any, tmp_path: Path) -> None:
        store = open_store(keep=1, keep_best=True, less_is_better=False)
        for step, score in enumerate([0.5, -math.inf, 0.7, 0.6]):
            store.save(step, ONE, STATE, score=score)
        assert steps(tmp_path) == [2, 3]

    def test_what_has_just_been_saved_stays_though_others_have_larger_steps(
        self, open_store: Any, tmp_path: Path
    ) -> None:
        store = open_store(keep=2)
        for step in (10, 20, 5):
            store.save(step, ONE, STATE)
        assert steps(tmp_path) == [5, 20]

    def test_a_damaged_one_does_not_count_and_goes_when_it_is_older_than_all(
        self, open_store: Any, tmp_path: Path
    ) -> None:
        store = open_store(keep=2)
        store.save(1, ONE, STATE)
        os.truncate(store.save(2, ONE, STATE) / FILES[1], 3)
        store.save(3, ONE, STATE)
        assert steps(tmp_path) == [1, 2, 3]
        store.save(4, ONE, STATE)
        assert steps(tmp_path) == [3, 4]

    def test_the_same_step_again_keeps_the_first(self, open_store: Any, tmp_path: Path) -> None:
        store = open_store()
        first = store.save(1, ONE, STATE)
        assert store.save(1, ONE, {"epoch": 9}) == first
        assert read(first).manifest.state == STATE

    def test_the_same_step_again_replaces_a_damaged_one(self, open_store: Any, tmp_path: Path) -> None:
        store = open_store()
        flip(store.save(1, ONE, STATE) / FILES[1], 0)
        path = store.save(1, ONE, {"epoch": 9})
        assert find(path, silent).manifest.state == {"epoch": 9}
        assert hidden(tmp_path) == []

    def test_what_cannot_be_deleted_is_warned_of(
        self, open_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = open_store(keep=1)
        store.save(1, ONE, STATE)

        def busy(path: Path) -> None:
            raise OSError(16, "Device or resource busy")

        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", busy)
            with pytest.warns(UserWarning, match="cannot be deleted: Device or resource busy"):
                store.save(2, ONE, STATE)
        assert steps(tmp_path) == [2] and len(hidden(tmp_path)) == 1
        store.save(3, ONE, STATE)
        assert steps(tmp_path) == [3] and hidden(tmp_path) == []


class TestFinding:
    def test_an_empty_folder_has_no_newest(self, open_store: Any) -> None:
        assert open_store().newest(silent) is None

    def test_nine_digits_are_not_the_limit(self, open_store: Any, tmp_path: Path) -> None:
        store = open_store()
        for step in (10**12, 999_999_999, 10**9):
            store.save(step, ONE, STATE)
        assert steps(tmp_path) == [999_999_999, 10**9, 10**12]


def test_nothing_imports_tensorflow_before_tensors_are_touched(saved: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tfdist.checkpoints.checkpoint import find\n"
        "from tfdist.checkpoints import compare, store\n"
        "assert find(Path(sys.argv[1]), print).manifest.step == 17\n"
        "assert not {'tensorflow', 'keras'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(saved)], env=environment(None), check=True, timeout=300)
