"""HorovodStrategy and MultiWorkerMirrored as jobs: sizes, failures, and what is told about them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.jobs import ROOT, run_alone, run_mpi, run_tf_config

PROGRAM = Path(__file__).parent / "strategy_jobs_program.py"


def said(output):
    """What each rank said, by rank."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"rank"')]
    return sorted(lines, key=lambda line: line["rank"])


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A job that begins after another TensorFlow operation, does many things, and of which one rank is slow to end."""
    return run_mpi(2, PROGRAM, "horovod", "several", tmp_path_factory.mktemp("several")).check()


def told(job, part):
    lines = [line for line in said(job.output) if part in line]
    assert len(lines) == 2, job.output[-6000:]
    return [line[part] for line in lines]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 3])
def test_sizes(ranks):
    lines = said(run_mpi(ranks, PROGRAM, "horovod", "sizes").check().output)
    assert len(lines) == ranks
    first = lines[0]
    assert first["size"] == ranks
    assert first["gathered"] == [float(r) for r in range(ranks) for _ in range(r + 1)]
    assert first["variable"] == [sum(range(ranks)), ranks]
    assert first["mean"] == ([0, 1] if ranks == 1 else [1.0, 1.0])
    assert first["halves"] == [40000, 0 if ranks == 1 else 1, 1, 3]
    assert first["adasum"] == [1, 1] if ranks == 1 else "power of two of ranks, and this job has 3" in first["adasum"]
    assert first["predicted"] == 11
    assert first["text"] == ["a", "0"]
    assert first["threads"] >= 1
    assert first["cluster"] == (0 if ranks == 1 else ranks)
    assert [line["chief"] for line in lines] == [rank == 0 for rank in range(ranks)]
    for line in lines[1:]:
        for key in ("history", "weights", "variable", "gathered", "mean", "predicted", "text"):
            assert line[key] == first[key], key


def test_alone():
    (line,) = said(run_alone(PROGRAM, "horovod", "sizes").check().output)
    assert line["size"] == 1
    assert line["predicted"] == 11


# test_command.py has this on the other backend too, through the trainer.
@pytest.mark.parametrize("backend", ["horovod", pytest.param("multi_worker_mirrored", marks=pytest.mark.full)])
def test_an_exception_on_one_rank_ends_the_job(backend):
    ended = run_mpi(2, PROGRAM, backend, "fails")
    assert ended.code not in (0, 124), ended.output
    assert "ValueError: the first cause" in ended.output
    assert "rank 1 of 2" in ended.output


def test_a_rank_that_leaves_early_does_not_leave_the_others_waiting():
    ended = run_mpi(2, PROGRAM, "horovod", "leaves")
    assert ended.code not in (0, 124), ended.output
    assert "Horovod has been shut down" in ended.output


def test_a_rank_that_dies_does_not_leave_the_others_waiting():
    ended = run_mpi(2, PROGRAM, "horovod", "dies")
    assert ended.code not in (0, 124), ended.output


def test_a_slow_rank_is_waited_for(several):
    assert told(several, "done") == [True, True]


# test_command.py has the same for a task on Horovod.
@pytest.mark.parametrize("backend", [pytest.param("horovod", marks=pytest.mark.full), "multi_worker_mirrored"])
def test_different_variables_are_told(backend):
    ended = run_mpi(2, PROGRAM, backend, "different_shapes")
    assert ended.code not in (0, 124), ended.output
    assert "RanksDisagree" in ended.output
    assert "'tower/kernel' of shape (3,)" in ended.output
    assert "'tower/kernel' of shape (4,)" in ended.output


def test_different_shapes_in_a_collective_are_told(several):
    for text in told(several, "different_reduce"):
        # Horovod names first the shape that reached it first.
        said_so = r"One rank sent a tensor of shape \[([23])\], but another rank sent a tensor of shape \[(?!\1)[23]\]"
        assert re.search(said_so, text), text


def test_a_keras_step_is_one_collective(several):
    assert told(several, "collectives") == [{"train": {"reduce.float32": 1}, "steps": 1}] * 2


def test_half_precision(several):
    for halves in told(several, "halves"):
        assert halves["wrong"] == []
        # Five tensors together, in two bytes a number.
        assert halves["travels"] == [["HorovodAlltoall", "uint16"], ["HorovodGroupedAllgather", "uint16"]]
        same_size, other_size = halves["told"]
        assert "float16 tensors that are added have other shapes on another rank than here" in same_size
        assert "Mismatched ALLTOALL tensor shapes" in other_size


def test_adasum(several):
    for adasum in told(several, "adasum"):
        assert adasum["equal"] == [1, 2]
        assert adasum["orthogonal"] == [1, 3]
        assert adasum["zero"] == [1, 2]
        assert adasum["zeros"] == [0, 0]
        # a = (2, 0), b = (2, 2): a·b = 4, |a|² = 4, |b|² = 8.
        assert adasum["angle"] == [0.5 * 2 + 0.75 * 2, 0.75 * 2]
        assert adasum["worst"] < 1000  # units in the last place of 1, of numbers up to 300
        assert "float32 or float64, not bfloat16" in adasum["EagerTensor"]
        assert "tf.convert_to_tensor" in adasum["IndexedSlices"]


def test_callbacks_metrics_and_seeds(several):
    assert several.output.count("Epoch 1/2") == 1, several.output[-6000:]
    right_callbacks(*told(several, "callbacks"))


@pytest.mark.full  # what several processes do as one does not depend on the backend
def test_callbacks_metrics_and_seeds_on_multi_worker_mirrored(tmp_path):
    ended = run_mpi(2, PROGRAM, "multi_worker_mirrored", "files", tmp_path)
    assert ended.output.count("Epoch 1/2") == 1, ended.output[-6000:]
    right_callbacks(*said(ended.check().output))


def right_callbacks(chief, other):
    assert chief["kept"] == ["latest.weights.h5", "training_metadata.json"]
    assert other["kept"] == []
    for line in (chief, other):
        assert line["error"].startswith("RanksDisagree: BackupAndRestore(")
        assert "2 on rank 0, 0 on rank 1" in line["error"]
        assert line["metric"].startswith("UsageError: the metric 'own' was made outside of strategy.scope()")
        assert line["epochs"].startswith("RanksDisagree: fit has other numbers of epochs")
        assert "2 on rank 0, 3 on rank 1" in line["epochs"]
        assert any("was made outside of strategy.scope()" in text for text in line["warned"])
        assert line["read"] == 6
        assert line["order"].startswith("RanksDisagree: how often this rank alone has read from a shuffled dataset")
    assert chief["numbers"][0] != other["numbers"][0], "replicas draw numbers of their own"
    assert chief["numbers"][1] == other["numbers"][1]


def test_xla_is_refused_with_the_way_out(several):
    assert all("jit_compile=True" in part["error"] and part["total"] == 2.0 for part in told(several, "compiled"))


def test_horovod_begins_after_another_operation(several):
    assert told(several, "total") == [2.0, 2.0]


def test_multi_worker_does_not_begin_after_another_operation():
    ended = run_mpi(2, PROGRAM, "multi_worker_mirrored", "late")
    assert ended.code not in (0, 124), ended.output
    assert "EnvironmentProblem" in ended.output


def test_horovod_is_missing():
    ended = run_alone(PROGRAM, "horovod", "without_horovod")
    assert ended.code == 1
    assert "Horovod is not installed" in ended.output
    assert "python -m hvd_backend.build" in ended.output


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("raise ImportError('undefined symbol: abc')", "cannot be loaded with TensorFlow"),
        ("def mpi_built(): return False", "built without MPI"),
    ],
)
def test_horovod_does_not_fit(tmp_path, source, told):
    package = tmp_path / "horovod" / "tensorflow"
    package.mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").touch()
    (package / "__init__.py").write_text(source)
    ended = run_alone(PROGRAM, "horovod", "late", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert ended.code == 1
    assert f"EnvironmentProblem: the installed Horovod {'was ' if 'built' in told else ''}{told}" in ended.output
    assert "python -m hvd_backend.build" in ended.output


def test_horovod_under_tf_config():
    for ended in run_tf_config(2, PROGRAM, "horovod", "late"):
        assert ended.code == 1
        assert "UsageError: TF_CONFIG describes 2 processes" in ended.output


def test_multi_worker_by_tf_config_ignores_a_proxy():
    proxy = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), "http://192.0.2.1:1")
    for ended in run_tf_config(2, PROGRAM, "multi_worker_mirrored", "lags", env=proxy):
        ended.check()


def test_multi_worker_tells_that_a_peer_has_died():
    ended = run_tf_config(2, PROGRAM, "multi_worker_mirrored", "dies")
    assert ended[0].code not in (0, 124), ended[0].output
