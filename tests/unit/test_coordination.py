"""Asynchronous steps: on a real cluster in one process (`coordination_program.py`), and what is said when it breaks."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.jobs import run_alone
from tfdist import private_tf
from tfdist.errors import EnvironmentProblem
from tfdist.strategies.parameter_server import Cluster
from tfdist.training import coordination
from tfdist.training.coordination import CoordinatedLoop

PROGRAM = Path(__file__).with_name("coordination_program.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each scenario found."""
    file = tmp_path_factory.mktemp("coordination") / "found.json"
    run_alone(PROGRAM, file, timeout=300, env={"CUDA_VISIBLE_DEVICES": ""}).check()
    return dict(json.loads(file.read_text()))


def test_each_batch_is_trained_on_once_and_counted(found: dict[str, Any]) -> None:
    got = found["each_batch_once"]
    assert got["weights"] == [1.0] * 200
    assert got["counts"] == [200, 200], "neither count loses a step that runs beside another"
    assert (got["rows"], got["entries"]) == ([150, 50], [150, 50])
    assert got["halted"] == [False, False]
    assert got["non-negative seconds"] is True
    assert got["done"] == [200, 0]
    assert got["traces"] == 1


def test_what_it_tells_of_itself(found: dict[str, Any]) -> None:
    got = found["each_batch_once"]
    steps, passed = got["passed"]
    most = got["describe"]["staleness"].pop("max")
    assert got["describe"] == {
        "workers": 2,
        "parameter_servers": 1,
        "max_in_flight": 8,
        "updates": 200,
        "staleness": {"mean": passed / 200},
    }
    assert steps == 200
    assert 0 <= passed <= 200 * most


def test_batches_cross_epochs_and_the_last_one_is_what_is_left(found: dict[str, Any]) -> None:
    # Rows 8 and 9 are in the last batch, of two rows.
    assert found["batches_that_cross_epochs"] == {
        "rows": [4] * 7 + [2],
        "weights": [0.75] * 8 + [1.0] * 2,
        "counts": [8, 8],
    }


def test_one_step_at_a_time_is_as_on_one_device(found: dict[str, Any]) -> None:
    got = found["one_at_a_time_is_as_on_one_device"]
    assert got["losses"] == pytest.approx([0.64**n for n in range(6)])
    assert got["weights"] == [pytest.approx(0.8**6)]
    assert got["passed"] == [0] * 6


@pytest.mark.parametrize(("scenario", "first", "began_anew"), [("behind", 30, True), ("behind_at_the_end", 36, None)])
def test_a_step_that_a_worker_has_read_past_is_done(
    found: dict[str, Any], scenario: str, first: int, began_anew: bool | None
) -> None:
    got = found[scenario]
    done = [*range(2, 8), *range(first, first + 4)]
    assert got["weights"] == [float(i in done) for i in range(40)]
    assert got["counts"] == [10, 10]
    assert len(set(got["entries"])) == 1, "each with its numbers"
    if began_anew is not None:
        assert got["began anew"] is began_anew


def test_only_so_many_steps_are_in_flight_and_none_beyond_the_run(found: dict[str, Any]) -> None:
    # 6 steps and 2 ahead, then these 2.
    assert found["in_flight"] == {
        "seen": [list(range(first, min(first + 5, 8))) for first in range(8)],
        "left": [6, 7],
        "default": 8,
    }


def test_it_ends_with_a_step_after_which_training_cannot_go_on(found: dict[str, Any]) -> None:
    assert found["it_ends_where_training_cannot_go_on"] == {"entries": 3, "halted": True, "counts": [2, 2], "done": 3}


def test_a_step_that_is_left_out_is_no_update(found: dict[str, Any]) -> None:
    assert found["it_goes_on_after_a_step_that_is_left_out"] == {
        "skipped": [False, True, False, False],
        "counts": [3, 3],
        "weights": [pytest.approx(0.8**3)],
    }


@pytest.mark.parametrize("kind", ["from_generator", "py_function", "numpy_function", "inside another function"])
def test_a_dataset_that_calls_python_is_refused(found: dict[str, Any], kind: str) -> None:
    assert found["python_in_the_dataset"]["none"] == "taken"
    message = found["python_in_the_dataset"][kind]
    assert message.startswith("UsageError: the training dataset calls Python code (from_generator, py_function,")
    assert message.endswith("Give arrays, or read files with tf.data.")


def test_a_snapshot_keeps_the_values_of_one_moment(found: dict[str, Any]) -> None:
    assert found["snapshot"] == {
        "reads": [[1, 3], [1, 3], [11, 13]],
        "inside": [11, 13],
        "originals": [True, True],
        "devices": ["device:CPU:0"] * 2,
        "jobs": [True] * 2,
    }


class TestWorkersThatAreGone:
    """Looks at the workers are the test's, and so is the time."""

    def wait(self, looks: list[list[int]], monkeypatch: pytest.MonkeyPatch, reason: str = "Connection refused") -> int:
        """How often it looked, where at each look these workers were there and 5 s had passed; then the result came."""
        monkeypatch.setenv("TFDIST_START_SECONDS", "90")
        workers = ("a:1", "b:1")
        loop = CoordinatedLoop.__new__(CoordinatedLoop)
        loop._cluster = Cluster("c:1", ("s:1",), workers, "chief", 0)
        answers, now = iter(looks), [0.0]
        looked = []

        def wait_for(result: Any, seconds: float) -> bool:
            now[0] += seconds
            return len(looked) == len(looks)

        def unreachable(addresses: Any, seconds: float, *, serving: bool) -> dict[str, str]:
            assert (addresses, serving) == (workers, True)
            there = next(answers)
            looked.append(there)
            return {address: reason for i, address in enumerate(workers) if i not in there}

        monkeypatch.setattr(private_tf, "wait_for", wait_for)
        monkeypatch.setattr(coordination, "unreachable", unreachable)
        monkeypatch.setattr(coordination, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
        loop._wait(None)
        return len(looked)

    @pytest.mark.parametrize("there", [[0, 1], [1]], ids=str)
    def test_as_long_as_one_is_there_it_goes_on(self, there: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.wait([there] * 50, monkeypatch) == 50

    def test_all_may_be_gone_until_new_ones_have_come(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nobody: list[list[int]] = [[]] * 17
        assert self.wait([*nobody, [0], *nobody], monkeypatch) == 35

    def test_after_that_they_are_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(EnvironmentProblem) as caught:
            self.wait([[]] * 20, monkeypatch)
        assert str(caught.value) == (
            "no worker has answered for 90 s: worker 0 (a:1), worker 1 (b:1). Their output tells why; start the job "
            "again. (TFDIST_START_SECONDS sets how long to wait for new ones.)"
        )

    def test_a_worker_that_is_stopped_is_named_though_others_are_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(EnvironmentProblem, match=r"^worker 1 \(b:1\) took a step and has not answered for 60 s"):
            self.wait([[0]] * 20, monkeypatch, "timed out")
        assert self.wait([[0]] * 11, monkeypatch, "timed out") == 11


def test_a_parameter_server_that_has_gone_is_named() -> None:
    text = "failed to connect ... Additional GRPC error information from remote target /job:ps/replica:0/task:1:"
    with pytest.raises(EnvironmentProblem) as caught, coordination._naming():
        raise tf.errors.UnavailableError(None, None, text)
    assert str(caught.value) == (
        "parameter server 1 has gone, and the weights that it held with it. Its own output tells why; start the job "
        "again from the newest checkpoint."
    )


def test_other_errors_come_out_as_they_are() -> None:
    for error in (
        tf.errors.UnavailableError(None, None, "from remote target /job:worker/replica:0/task:1"),
        tf.errors.InvalidArgumentError(None, None, "/job:ps/replica:0/task:1"),
        ValueError("the sky is falling"),
    ):
        with pytest.raises(type(error)) as caught, coordination._naming():
            raise error
        assert caught.value is error
