"""The report: its numbers worked out by hand, and a file that is whole or not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.jobs import ROOT
from tfdist.errors import EnvironmentProblem, UsageError
from tfdist.training.report import Report, StepTime, check_writable, step_time, throughput, versions, write


def report(**changes: object) -> Report:
    fields: dict[str, object] = {
        "backend": "one_device",
        "task": "Digits",
        "processes": 1,
        "replicas_in_sync": 1,
        "global_batch_size": 32,
        "accumulate": 1,
        "learning_rate": 0.01,
        "seed": 0,
        "epochs": None,
        "steps": 2,
        "skipped_steps": 0,
        "stopped": None,
        "best": {"monitor": "test/loss", "value": 0.25, "step": 2, "epoch": None},
        "examples_seen": 64,
        "losses": [1.5, 0.5],
        "penalties": [0.0, 0.0],
        "learning_rates": [0.01, 0.01],
        "loss_scale": None,
        "parts": {},
        "metrics": {"test": {"loss": 0.25}},
        "weights_sha256": "a",
        "state_sha256": "b",
        "step_seconds": [0.002, 0.002],
        "step_time_ms": StepTime(1.0, 2.0, 3.0),
        "examples_per_second": 10.0,
        "traces": {"train": 1},
        "resumed_from": None,
        "checkpoints": None,
        "ranks": [],
        "workers": None,
        "intra_op_threads": 1,
        "versions": {"python": "3"},
    }
    return Report(**(fields | changes))  # type: ignore[arg-type]


def test_quantiles_leave_the_first_step_out() -> None:
    # Of 1 … 11 ms: the quantile q is 1 + 10·q.
    seconds = np.array([60.0, *(np.arange(1, 12)[::-1] / 1e3)])
    found = step_time(seconds)
    assert found.p10 == pytest.approx(2)
    assert found.median == pytest.approx(6)
    assert found.p90 == pytest.approx(10)


def test_throughput_leaves_the_first_step_out() -> None:
    # 16 + 16 + 4 examples in 3 seconds.
    assert throughput(np.array([16, 16, 16, 4]), np.array([60.0, 0.5, 0.5, 2.0])) == pytest.approx(12)


@pytest.mark.parametrize("steps", [0, 1])
def test_one_step_has_no_speed(steps: int) -> None:
    assert step_time(np.ones(steps)) == StepTime(None, None, None)
    assert throughput(np.ones(steps), np.ones(steps)) is None


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write(report(), path)
    read = json.loads(path.read_text())
    assert read["losses"] == [1.5, 0.5]
    assert read["metrics"] == {"test": {"loss": 0.25}}
    assert read["best"] == {"monitor": "test/loss", "value": 0.25, "step": 2, "epoch": None}
    assert read["step_time_ms"] == {"median": 1.0, "p10": 2.0, "p90": 3.0}
    assert set(read) == set(Report.__dataclass_fields__)


def test_numbers_that_json_does_not_know_become_null(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    nan, infinity = float("nan"), float("inf")
    metrics = {"test": {"loss": nan, "per_class": [0.5, -infinity], "flag": True, "count": 3}}
    parts = {"up": {"losses": [nan], "learning_rates": [0.1]}}
    write(report(losses=[nan, 1.0, infinity], metrics=metrics, examples_per_second=infinity, parts=parts), path)
    read = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert read["losses"] == [None, 1.0, None]
    assert read["metrics"] == {"test": {"loss": None, "per_class": [0.5, None], "flag": True, "count": 3}}
    assert read["examples_per_second"] is None
    assert read["parts"] == {"up": {"losses": [None], "learning_rates": [0.1]}}


def test_an_older_report_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("x" * 100_000)
    write(report(), path)
    assert json.loads(path.read_text())["steps"] == 2
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_report_that_cannot_be_written_leaves_the_older_one(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("the older one")
    with pytest.raises(TypeError):
        write(report(metrics={"test": {"loss": object()}}), path)
    assert path.read_text() == "the older one"
    assert os.listdir(tmp_path) == ["report.json"]


def test_an_interrupted_write_leaves_the_older_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    path.write_text("the older one")

    def disk_is_full(self: Path, text: str) -> None:
        with self.open("w") as file:
            file.write(text[:10])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", disk_is_full)
    with pytest.raises(EnvironmentProblem, match="No space left"):
        write(report(), path)
    assert path.read_text() == "the older one"
    assert list(tmp_path.iterdir()) == [path]


def refusal(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        check_writable(path)
    message = str(caught.value)
    assert message.startswith(f"report={str(path)!r} cannot be written: ")
    assert message.endswith("Give another path.")
    return message


def test_a_path_that_can_be_written_passes_and_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(tmp_path / "new.json")
    assert os.listdir(tmp_path) == []
    (tmp_path / "old.json").write_text("old")
    check_writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "old"
    monkeypatch.chdir(tmp_path)
    check_writable(Path("relative.json"))
    assert os.listdir(tmp_path) == ["old.json"]


def test_the_message_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^json='.*' cannot be written: it is a folder"):
        check_writable(tmp_path, "json")


def test_a_folder_is_no_report(tmp_path: Path) -> None:
    assert "it is a folder" in refusal(tmp_path)


def test_the_folder_must_be_there(tmp_path: Path) -> None:
    assert f"there is no folder {tmp_path / 'nowhere'}" in refusal(tmp_path / "nowhere" / "report.json")
    (tmp_path / "file").write_text("")
    assert f"there is no folder {tmp_path / 'file'}" in refusal(tmp_path / "file" / "report.json")


# As another user, since root may write everywhere.
AS_NOBODY = """
import os, sys
from pathlib import Path
from tfdist.training.report import check_writable
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
check_writable(Path(sys.argv[1]))
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that another user reaches: pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def refusal_as_nobody(path: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert "UsageError" in done.stderr, done.stderr
    return done.stderr


def test_a_folder_that_may_not_be_written(public: Path) -> None:
    (public / "closed").mkdir()
    (public / "closed").chmod(0o555)
    assert "cannot be written: Permission denied. " in refusal_as_nobody(public / "closed" / "report.json")


def test_a_file_that_may_not_be_written(public: Path) -> None:
    (public / "open").mkdir()
    (public / "open").chmod(0o777)
    old = public / "open" / "report.json"
    old.write_text("old")
    old.chmod(0o444)
    assert "cannot be written: the file there is read-only. " in refusal_as_nobody(old)


def test_versions_of_what_the_numbers_depend_on() -> None:
    import keras
    import tensorflow as tf

    found = versions()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["tensorflow"] == tf.__version__
    assert found["keras"] == keras.__version__
    assert found["numpy"] == np.__version__
