"""`tfdist checkpoints`, and the comparisons that it and the trainer make."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.jobs import environment
from tests.unit.checkpoint_cases import ONE, flip
from tfdist.checkpoints.compare import Difference, compare, state_differences, tensor_differences
from tfdist.checkpoints.manifest import TensorInfo
from tfdist.checkpoints.store import Store
from tfdist.cli import main

F32 = "float32"


class TestCompare:
    def test_equal_ones(self) -> None:
        both = {"a": TensorInfo((2,), F32)}
        assert compare(both, dict(both)) == []
        assert compare({}, {}) == []

    def test_each_kind_has_its_line(self) -> None:
        want = {
            "model/dense_1/kernel": TensorInfo((64, 10), F32),
            "model/a": TensorInfo((64, 16), F32),
            "model/b": TensorInfo((), F32),
        }
        have = {
            "model/a": TensorInfo((64, 17), F32),
            "model/b": TensorInfo((), "bfloat16"),
            "model/c": TensorInfo((1,), "int64"),
        }
        assert compare(want, have) == [
            "missing in the checkpoint: model/dense_1/kernel (64, 10) float32",
            "extra: model/c (1,) int64",
            "shape: model/a is (64, 17) in the checkpoint and (64, 16) in the model",
            "type: model/b is bfloat16 in the checkpoint and float32 in the model",
        ]

    def test_a_renamed_one_is_guessed_where_only_one_can_be_meant(self) -> None:
        want = {"dense_1/kernel": TensorInfo((2, 3), F32), "x": TensorInfo((4,), F32), "y": TensorInfo((4,), F32)}
        have = {"dense/kernel": TensorInfo((2, 3), F32), "u": TensorInfo((4,), F32), "v": TensorInfo((4,), F32)}
        lines = compare(want, have)
        assert lines[0] == "missing in the checkpoint: dense_1/kernel (2, 3) float32 (renamed from dense/kernel?)"
        assert lines[1] == "missing in the checkpoint: x (4,) float32"

    def test_ten_lines_and_a_count(self) -> None:
        lines = compare({f"v{i}": TensorInfo((), F32) for i in range(13)}, {})
        assert len(lines) == 11 and lines[-1] == "and 3 more"
        assert len(compare({f"v{i}": TensorInfo((), F32) for i in range(10)}, {})) == 10


class TestDifferences:
    @pytest.mark.parametrize(
        ("a", "b", "largest"),
        [
            (np.array([1.0, 2.0]), np.array([1.0, 2.5]), 0.5),
            (np.array(1.0), np.array(-math.inf), math.inf),
            (np.array([math.inf, 1]), np.array([math.inf, 2]), 1.0),
            (np.array([math.nan, 1.0]), np.array([math.nan, 4.0]), 3.0),
            (np.array([math.nan]), np.array([1.0]), math.nan),
            (np.array([0.0]), np.array([-0.0]), 0.0),
            (np.array([0, 2**64 - 1], np.uint64), np.array([1, 0], np.uint64), float(2**64 - 1)),
            (np.array(-(2**63)), np.array(2**63 - 1), float(2**64 - 1)),
            (np.array([True, False]), np.array([True, True]), 1.0),
            (np.array([1 + 1j], np.complex64), np.array([1 - 1j], np.complex64), 2.0),
            (np.array([1.5], ml_dtypes.bfloat16), np.array([1.0], ml_dtypes.bfloat16), 0.5),
        ],
    )
    def test_the_largest(self, a: Any, b: Any, largest: float) -> None:
        (found,) = tensor_differences({"v": a, "same": a}, {"v": b, "same": a.copy()})
        assert repr(found.largest) == repr(largest)
        assert found.what == ("other bits of equal values" if largest == 0 else "other values")

    def test_equal_bits_are_no_difference(self) -> None:
        tensors = {"v": np.array([math.nan, -0.0]), "none": np.zeros((0, 3))}
        assert tensor_differences(tensors, {name: tensor.copy() for name, tensor in tensors.items()}) == []

    def test_what_cannot_be_subtracted(self) -> None:
        a = {"shape": np.zeros((2, 3)), "type": np.zeros(2, F32), "gone": np.zeros(1)}
        b = {"shape": np.zeros((3, 2)), "type": np.zeros(2), "new": np.zeros((), bool)}
        assert tensor_differences(a, b) == [
            Difference("gone", "only in A: (1,) float64"),
            Difference("new", "only in B: () bool"),
            Difference("shape", "(2, 3) float64 in A, (3, 2) float64 in B"),
            Difference("type", "(2,) float32 in A, (2,) float64 in B"),
        ]

    def test_states(self) -> None:
        a = {"same": {"nan": math.nan}, "epoch": 1, "deep": {"x": [1, 2], "y": 1}}
        b = {"same": {"nan": math.nan}, "epoch": 1.0, "deep": {"x": [1, 3], "y": 1}, "new": 0}
        assert state_differences(a, b) == {
            "state.epoch": (1, 1.0),
            "state.deep.x": ([1, 2], [1, 3]),
            "state.new": (None, 0),
        }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of four checkpoints."""
    folder = tmp_path_factory.mktemp("checkpoints")
    store = Store(folder, keep=9)
    for step in (10, 20, 30, 31):
        tensors = {**ONE, "grows": np.array([0.0, step])} | ({"[extra]": np.ones(2)} if step == 31 else {})
        store.save(step, tensors, {"epoch": step // 10}, score=math.nan if step == 10 else 1 / step)
    store.close()
    return folder


@pytest.fixture
def damaged(folder: Path) -> Iterator[Path]:
    """The file of the second one, with another bit."""
    path = folder / "step-000000020" / "variables.data-00000-of-00001"
    whole = path.read_bytes()
    flip(path, 2)
    yield path
    path.write_bytes(whole)


class TestCommand:
    @pytest.fixture(autouse=True)
    def _environment_as_before(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """What the command sets for TensorFlow must not reach other tests."""
        before = dict(os.environ)
        monkeypatch.setenv("TFDIST_KEEP_BINDING", "1")
        yield
        os.environ.clear()
        os.environ.update(before)

    def run(self, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
        code = main(["checkpoints", *map(str, words)])
        return code, " ".join("".join(capsys.readouterr()).split())

    def test_a_table(self, capsys: Any, folder: Path, tmp_path: Path) -> None:
        code, printed = self.run(capsys, folder, "--json", tmp_path / "list.json")
        assert code == 0
        assert "step epoch created (UTC) size score files tfdist" in printed
        assert "20 2 20" in printed and "0.05 whole 0.1.0" in printed and "--verify checks" in printed
        written = json.loads((tmp_path / "list.json").read_text())
        assert [row["step"] for row in written["checkpoints"]] == [10, 20, 30, 31]
        assert written["checkpoints"][0]["score"] == {"$float": "nan"}
        assert not any(row["problems"] for row in written["checkpoints"]) and not written["verified"]

    def test_verify_finds_another_bit(self, capsys: Any, folder: Path, damaged: Path) -> None:
        assert self.run(capsys, folder)[0] == 0
        code, printed = self.run(capsys, folder, "--verify")
        assert code == 1
        assert f"{damaged.parent} is damaged: {damaged.name} has changed: its SHA-256 is wrong." in printed
        assert "Restore it from a copy, or delete its folder." in printed

    def test_verify_finds_nothing(self, capsys: Any, folder: Path) -> None:
        code, printed = self.run(capsys, folder, "--verify")
        assert (code, "All files of 4 checkpoints have the right SHA-256." in printed) == (0, True)
        code, printed = self.run(capsys, folder / "step-000000020", "--verify")
        assert (code, "All files of 1 checkpoint have the right SHA-256." in printed) == (0, True)

    def test_the_quick_look_sees_sizes(self, capsys: Any, folder: Path, damaged: Path) -> None:
        with damaged.open("ab") as file:
            file.write(b"more")
        code, printed = self.run(capsys, folder)
        assert (code, "is too long" in printed, printed.count("whole")) == (0, True, 3)

    def test_a_difference(self, capsys: Any, folder: Path, tmp_path: Path) -> None:
        code, printed = self.run(capsys, folder, "--diff", 10, "step-000000031", "--json", tmp_path / "diff.json")
        assert code == 0
        assert f"A is {folder}/step-000000010 B is {folder}/step-000000031" in printed
        assert "[extra] only in B: (2,) float64" in printed and "grows other values 21" in printed
        assert "2 variables differ, 2 are equal in all bits." in printed and "state.epoch 1 3" in printed
        written = json.loads((tmp_path / "diff.json").read_text())
        assert [variable["name"] for variable in written["variables"]] == ["[extra]", "grows"]
        assert written["state"] == {"state.epoch": [1, 3]}

    def test_no_difference(self, capsys: Any, folder: Path) -> None:
        code, printed = self.run(capsys, folder, "--diff", folder, 31)  # a folder means its newest
        assert code == 0
        assert "0 variables differ, 4 are equal in all bits. The states are equal." in printed

    def test_what_cannot_be_compared(self, capsys: Any, folder: Path, damaged: Path) -> None:
        code, printed = self.run(capsys, folder, "--diff", 10, 11)
        assert (code, "diff=11" in printed, "but of 10, 20, 30, 31." in printed) == (2, True, True)
        code, printed = self.run(capsys, folder, "--diff", 10, 20)
        assert (code, "has changed" in printed) == (6, True)
        assert self.run(capsys, folder / "none")[0] == 2
        assert self.run(capsys, folder, "--json", folder)[0] == 2


def test_a_list_needs_neither_tensorflow_nor_mpi(folder: Path) -> None:
    program = (
        "import sys; from tfdist.cli import main\n"
        "assert main(['checkpoints', sys.argv[1], '--verify']) == 0\n"
        "sys.exit(', '.join({'tensorflow', 'keras', 'mpi4py', 'horovod'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], env=environment(None), check=True, timeout=300)
