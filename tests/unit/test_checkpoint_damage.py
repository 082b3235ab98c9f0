"""Checkpoints that are damaged, by accident or on purpose, are noticed and passed over."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint_cases import FILES, ONE, STATE, flip, silent
from tfdist.checkpoints import manifest
from tfdist.checkpoints.checkpoint import Checkpoint, all_in, find, read
from tfdist.checkpoints.manifest import FileInfo, Manifest, TensorInfo
from tfdist.checkpoints.store import Store
from tfdist.errors import CheckpointProblem, UsageError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to copy."""
    folder = tmp_path_factory.mktemp("saved")
    store = Store(folder)
    path = store.save(17, ONE, STATE)
    store.close()
    return path


def signed(text: str) -> bytes:
    """A manifest with the right checksum of what stands in it, whatever that is. `text` begins with a brace."""
    body = b"{\n" + text[1:].encode("latin1")
    return b'{\n "checksum": "' + hashlib.sha256(body).hexdigest().encode() + b'",' + body[1:]


class TestDamage:
    @pytest.fixture
    def folder(self, tmp_path: Path, saved: Path) -> Path:
        """Of two checkpoints, the second of which is damaged by each test."""
        whole = read(saved).manifest
        for step in (17, 18):
            copy = tmp_path / f"step-{step:09d}"
            shutil.copytree(saved, copy)
            (copy / "manifest.json").write_bytes(dataclasses.replace(whole, step=step).to_bytes())
        return tmp_path

    def passed_over(self, folder: Path) -> str:
        told: list[str] = []
        store = Store(folder)
        newest = store.newest(told.append)
        store.close()
        assert newest is not None and newest.manifest.step == 17
        assert find(folder, told.append) == newest
        assert len(told) == 2 and told[0] == told[1]
        with pytest.raises(CheckpointProblem) as caught:
            find(folder / "step-000000018", silent)
        reason = told[0].partition("is damaged and passed over: ")[2]
        assert reason and reason in str(caught.value)
        return reason

    @pytest.mark.parametrize("name", FILES)
    def test_any_flipped_bit(self, folder: Path, name: str) -> None:
        path = folder / "step-000000018" / name
        whole = path.read_bytes()
        for where in range(0, len(whole), max(1, len(whole) // 40)):
            flip(path, where)
            assert ("damaged" if name == "manifest.json" else "has changed") in self.passed_over(folder)
            path.write_bytes(whole)
        assert find(folder, silent).manifest.step == 18

    @pytest.mark.parametrize("name", FILES)
    def test_a_truncated_file(self, folder: Path, name: str) -> None:
        path = folder / "step-000000018" / name
        os.truncate(path, path.stat().st_size - 1)
        assert f"{name} is {'damaged' if name == 'manifest.json' else 'truncated'}" in self.passed_over(folder)
        os.truncate(path, 0)
        self.passed_over(folder)

    @pytest.mark.parametrize("name", FILES)
    def test_a_missing_file_and_what_is_no_file(self, folder: Path, name: str) -> None:
        path = folder / "step-000000018" / name
        content = path.read_bytes()
        path.unlink()
        assert self.passed_over(folder) == f"{name} is missing"
        elsewhere = folder / "elsewhere"
        elsewhere.write_bytes(content)
        path.symlink_to(elsewhere)
        assert self.passed_over(folder) == f"{name} is not a file"
        path.unlink()
        os.mkfifo(path)
        assert self.passed_over(folder) == f"{name} is not a file"

    def test_a_file_too_many_and_another_name(self, folder: Path) -> None:
        (folder / "step-000000018" / "more").touch()
        assert self.passed_over(folder) == "more does not belong there"
        (folder / "step-000000018" / "more").unlink()
        (folder / "step-000000018").rename(folder / "step-000000020")
        (folder / "step-000000020").rename(folder / "mine")
        assert find(folder / "mine", silent).manifest.step == 18  # a copy under a name of one's own
        (folder / "mine").rename(folder / "step-000000019")
        told: list[str] = []
        assert find(folder, told.append).manifest.step == 17
        assert "it is of step 18, and its folder says 19" in told[0]

    @pytest.mark.parametrize(
        "name", ["../x", "/etc/passwd", "a/b", "..", "", "a\\b", "a\0", ".hidden", "manifest.json"]
    )
    def test_a_name_that_leads_elsewhere(self, folder: Path, name: str) -> None:
        path = folder / "step-000000018"
        whole = read(path).manifest
        evil = dataclasses.replace(whole, files={**whole.files, name: FileInfo(0, "0" * 64)})
        (path / "manifest.json").write_bytes(evil.to_bytes())
        assert self.passed_over(folder).endswith("which cannot be one of a checkpoint")

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"schema": 2}, "schema=2, and this tfdist reads schema 1"),
            ({"schema": None}, "schema=None"),
            ({"step": None}, "lacks step"),
            ({"more": 1}, "has the unknown more"),
            ({"step": -1}, "step must be a whole number, 0 or more, and is -1"),
            ({"step": True}, "step must be a whole number"),
            ({"step": 1.0}, "step must be a whole number"),
            ({"created": "yesterday"}, "created must be a time in ISO 8601"),
            ({"tfdist": 1}, "tfdist must be text"),
            ({"score": "much"}, "score must be a float or null"),
            ({"state": []}, "state must be an object"),
            ({"files": {}}, "does not name the file variables.index"),
            ({"files": {"a": {"bytes": 1, "sha256": "0"}}}, "files.a.sha256 must be 64 hexadecimal digits"),
            ({"tensors": {"a": {"shape": 3, "dtype": "x"}}}, "tensors.a.shape must be a list"),
            ({"tensors": {"a": {"shape": [-1], "dtype": "x"}}}, "tensors.a.shape must be a whole number"),
            ({"tensors": {"a": {"shape": [1]}}}, "tensors.a lacks dtype"),
        ],
    )
    def test_a_manifest_that_is_not_of_the_schema(self, folder: Path, change: dict[str, Any], says: str) -> None:
        path = folder / "step-000000018" / "manifest.json"
        fields = {**json.loads(path.read_bytes()), **change}
        del fields["checksum"]
        path.write_bytes(signed(json.dumps({k: v for k, v in fields.items() if v is not None or k == "score"})))
        assert says in self.passed_over(folder)

    @pytest.mark.parametrize(
        ("rest", "says"),
        [
            ('"a": NaN}', "not valid JSON: NaN"),
            ('"a": 1, "a": 1}', "not valid JSON: a name stands twice"),
            ('"a": ' + "[" * 100_000, "not valid JSON"),
            ("", "not valid JSON"),
            ('"a": "\x80"}', "not valid JSON"),
        ],
        ids=["a constant", "twice", "deep", "cut", "no text"],
    )
    def test_a_manifest_that_is_no_json(self, rest: str, says: str) -> None:
        with pytest.raises(CheckpointProblem, match=says):
            Manifest.from_bytes(signed("{" + rest))

    def test_a_huge_manifest_is_not_read(self, folder: Path) -> None:
        os.truncate(folder / "step-000000018" / "manifest.json", 2**40)
        assert "larger than" in self.passed_over(folder)

    def test_a_huge_state_is_not_written(self, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(manifest, "_MOST_BYTES", 1000)
        with pytest.raises(CheckpointProblem, match="1000 is the limit"):
            dataclasses.replace(read(saved).manifest, state={"text": "a" * 1000}).to_bytes()

    def test_variables_that_are_not_those_of_the_manifest(self, folder: Path) -> None:
        checkpoint = read(folder / "step-000000018")
        other = dataclasses.replace(checkpoint.manifest, tensors={"other": TensorInfo((1,), "float32")})
        with pytest.raises(CheckpointProblem, match="are not those that the manifest names"):
            Checkpoint(checkpoint.path, other).tensors()
        (checkpoint.path / "variables.index").write_bytes(b"random bytes" * 100)
        with pytest.raises(CheckpointProblem, match="TensorFlow cannot read it"):
            checkpoint.tensors()

    def test_all_are_damaged(self, folder: Path) -> None:
        for path in all_in(folder):
            (path / "manifest.json").unlink()
        told: list[str] = []
        store = Store(folder)
        assert store.newest(told.append) is None
        store.close()
        with pytest.raises(CheckpointProblem, match=r"all checkpoints in .* are damaged"):
            find(folder, told.append)
        assert len(told) == 4


class TestFinding:
    def test_a_path_without_a_checkpoint(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        (tmp_path / "step-17").mkdir()
        (tmp_path / "step-000000003").touch()
        with pytest.raises(UsageError, match="does not exist"):
            find(tmp_path / "none", silent)
        with pytest.raises(UsageError, match="is a file"):
            find(tmp_path / "file", silent)
        with pytest.raises(UsageError, match="holds no checkpoint"):
            find(tmp_path, silent)
