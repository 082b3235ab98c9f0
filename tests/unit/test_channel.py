"""How processes agree outside of TensorFlow: alone, and with three ranks of each channel (`channel_program.py`)."""

from __future__ import annotations

import json
import socket
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import run_alone, run_mpi, run_tf_config
from tfdist.cluster import channel
from tfdist.cluster.channel import Alone, require_same, together
from tfdist.cluster.identity import Identity
from tfdist.errors import EnvironmentProblem, RanksDisagree, TaskFailure

PROGRAM = Path(__file__).with_name("channel_program.py")
HOST = socket.gethostname()


class TestAlone:
    def test_an_exchange_gives_the_own_value(self) -> None:
        assert Alone().exchange("label", {"a": 1}) == [{"a": 1}]

    def test_work_gives_its_result(self) -> None:
        assert together(Alone(), "work", lambda: 7) == 7

    def test_an_error_of_ours_comes_out_as_it_is(self) -> None:
        def work() -> None:
            raise EnvironmentProblem("no device")

        with pytest.raises(EnvironmentProblem) as caught:
            together(Alone(), "work", work)
        assert str(caught.value) == "no device"
        assert caught.value.shared
        assert not EnvironmentProblem.shared

    def test_an_error_of_the_task_comes_with_its_traceback(self) -> None:
        with pytest.raises(TaskFailure) as caught:
            together(Alone(), "work", lambda: 1 // 0)
        message = str(caught.value)
        assert message.startswith("Traceback (most recent call last)")
        assert message.endswith("ZeroDivisionError: integer division or modulo by zero")
        assert "test_channel.py" in message
        assert "tfdist/cluster/channel.py" not in message
        assert caught.value.shared

    def test_an_error_that_all_share_goes_through_untouched(self) -> None:
        error = RanksDisagree("out of an exchange")
        error.shared = True

        def work() -> None:
            raise error

        with pytest.raises(RanksDisagree) as caught:
            together(Alone(), "work", work)
        assert caught.value is error

    def test_a_process_agrees_with_itself(self) -> None:
        require_same(Alone(), "seeds", "the seed", 7)

    def test_an_error_of_a_task_may_derive_from_ours(self) -> None:
        class OwnError(EnvironmentProblem):
            exit_code = 7

        def work() -> None:
            raise OwnError("no licence")

        with pytest.raises(EnvironmentProblem, match="no licence"):
            together(Alone(), "work", work)

    def test_the_last_word_of_the_task_counts(self) -> None:
        def work() -> None:
            try:
                raise EnvironmentProblem("no GPU")
            except EnvironmentProblem:
                raise EnvironmentProblem("no GPU; run nvidia-smi") from None

        with pytest.raises(EnvironmentProblem, match="run nvidia-smi"):
            together(Alone(), "work", work)

    def test_an_interrupt_goes_through(self) -> None:
        def work() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            together(Alone(), "work", work)

    def test_a_task_that_calls_exit_has_failed(self) -> None:
        with pytest.raises(TaskFailure, match="SystemExit"):
            together(Alone(), "work", lambda: sys.exit(0))


@pytest.fixture(scope="module", params=["mpi", "tf_config"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each scenario gave each rank, over MPI and over TCP."""
    folder = tmp_path_factory.mktemp("channel")
    if request.param == "mpi":
        run_mpi(3, PROGRAM, folder, timeout=300).check()
    else:
        for ended in run_tf_config(3, PROGRAM, folder, timeout=300):
            ended.check()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


def raised_by_all(ranks: list[dict[str, Any]], scenario: str) -> dict[str, Any]:
    """The one error that every rank raised, and shares."""
    first, *others = [rank[scenario] for rank in ranks]
    assert "value" not in first, first
    assert all(other == first for other in others), others
    assert first["shared"] is True
    return dict(first)


def test_every_rank_gets_every_value_in_order(ranks: list[dict[str, Any]]) -> None:
    values = [{"rank": r, "text": "ü" * r, "list": [None, 1.5, True][:r]} for r in range(3)]
    assert [rank["exchange"]["value"] for rank in ranks] == [values] * 3


def test_every_rank_gets_its_own_result(ranks: list[dict[str, Any]]) -> None:
    assert [rank["all_succeed"]["value"] for rank in ranks] == ["done on 0", "done on 1", "done on 2"]


def test_where_all_fail_alike_no_rank_is_blamed(ranks: list[dict[str, Any]]) -> None:
    error = raised_by_all(ranks, "all_fail")
    assert (error["kind"], error["message"], error["exit_code"]) == ("UsageError", "the same", 2)


def test_where_one_fails_all_name_it(ranks: list[dict[str, Any]]) -> None:
    error = raised_by_all(ranks, "one_fails")
    assert error["kind"] == "UsageError"
    assert error["message"] == f"rank 1 of 3 (host {HOST}): of rank 1"


def test_where_several_fail_the_lowest_counts(ranks: list[dict[str, Any]]) -> None:
    error = raised_by_all(ranks, "two_fail")
    assert (error["kind"], error["exit_code"]) == ("EnvironmentProblem", 3)
    assert error["message"] == f"rank 1 of 3 (host {HOST}): of rank 1"


def test_an_error_of_the_task_travels_with_its_traceback(ranks: list[dict[str, Any]]) -> None:
    error = raised_by_all(ranks, "the_task_fails")
    assert error["kind"] == "TaskFailure"
    assert error["message"].startswith(f"rank 2 of 3 (host {HOST}): Traceback (most recent call last)")
    assert error["message"].endswith("ValueError: the sky is falling")


@pytest.mark.parametrize(
    ("scenario", "message"),
    [("one_fails_while_the_others_exchange", "rank 2 of 3"), ("one_fails_two_stages_deep", "rank 0 of 3")],
)
def test_a_failing_rank_meets_the_others_where_they_wait(
    ranks: list[dict[str, Any]], scenario: str, message: str
) -> None:
    error = raised_by_all(ranks, scenario)
    assert error["kind"] == "UsageError"
    assert error["message"] == f"{message} (host {HOST}): of rank {message[5]}", "told once, not once for each stage"


def test_ranks_out_of_step_are_told(ranks: list[dict[str, Any]]) -> None:
    error = raised_by_all(ranks, "out_of_step")
    assert error["kind"] == "RanksDisagree"
    assert "rank 0 is at 'left', rank 2 at 'right'" in error["message"]


def test_a_rank_that_leaves_an_exchange_out_is_told(ranks: list[dict[str, Any]]) -> None:
    error = raised_by_all(ranks, "one_leaves_early")
    assert error["kind"] == "RanksDisagree"
    assert "rank 0 is at 'inside', rank 1 at 'the end of work'" in error["message"]


def test_equal_values_pass_and_others_are_named(ranks: list[dict[str, Any]]) -> None:
    assert [rank["same"] for rank in ranks] == [{"value": None}] * 3
    error = raised_by_all(ranks, "not_same")
    assert error["kind"] == "RanksDisagree"
    assert error["message"] == "the seed differs: rank 0 has 7, rank 2 has 8."


def test_the_channel_outlives_the_errors(ranks: list[dict[str, Any]]) -> None:
    assert [rank["still_in_step"]["value"] for rank in ranks] == [[0, 1, 2]] * 3


def test_without_mpi4py_the_way_out_is_told(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "sys.modules['mpi4py'] = None\n"
        "from tfdist.cluster.channel import open_mpi\n"
        "from tfdist.cluster.identity import Identity\n"
        "open_mpi(Identity('mpi', size=2))\n"
    )
    job = run_alone(program, timeout=300)
    assert job.code == 1
    assert "EnvironmentProblem" in job.output
    assert "mpi4py cannot be used" in job.output
    assert "pip install 'tfdist[horovod]'" in job.output


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        (
            Identity("mpi", 1, 2),
            "the launcher says rank 1 of 2 processes, but MPI says rank 0 of 1: mpirun and the MPI library of this "
            "environment are not the same. Use the mpirun of the activated environment (source .venv/bin/activate), or "
            "unset the launcher's variables to run alone.",
        ),
        (
            Identity("slurm", 1, 2),
            "srun started 2 processes, but MPI sees 1: SLURM's MPI plugin and the MPI library of this environment do "
            "not fit together. Start the job with mpirun inside sbatch or salloc (mpirun -np N python …), or with srun "
            "--mpi=pmix where `srun --mpi=list` shows a pmix that works.",
        ),
    ],
    ids=["mpirun", "srun"],
)
def test_each_process_in_a_world_of_its_own_is_told(
    identity: Identity, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MpiChannel", lambda: types.SimpleNamespace(rank=0, size=1))
    with pytest.raises(EnvironmentProblem) as caught:
        channel.open_mpi.__wrapped__(identity)
    assert str(caught.value) == message


def test_a_rank_that_leaves_ends_the_job(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from tfdist.cluster.channel import open_mpi, together\n"
        "from tfdist.cluster.identity import identify\n"
        "channel = open_mpi(identify())\n"
        "together(channel, 'work', lambda: sys.exit(0) if channel.rank == 1 else None)\n"
    )
    job = run_mpi(2, program, timeout=300)
    assert job.code not in (0, 124), job.output


def test_abort_ends_the_job_with_the_code(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from tfdist.cluster.channel import open_mpi\n"
        "from tfdist.cluster.identity import identify\n"
        "channel = open_mpi(identify())\n"
        "channel.abort(3) if channel.rank == 1 else channel.exchange('a peer that never comes', None)\n"
    )
    job = run_mpi(2, program, timeout=300)
    assert job.code == 3, (sys.executable, job.output)
