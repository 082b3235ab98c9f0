"""The right values on every backend: small cases whose answers were worked out by hand.

Each backend is started once (`cases.py`); the tests below look at what it wrote.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.cases import asked, checked
from tests.full import full
from tests.jobs import once_more_if_tensorflow_crashed, run_alone, run_mpi
from tfdist.evidence.cases import CASES as CASES_OF_CHECK
from tfdist.evidence.judge import Verdict, judge
from tfdist.evidence.runs import Job, read

CASES = Path(__file__).with_name("cases.py")
FOLDER = Path(tempfile.mkdtemp(prefix="tfdist-cases-"))

ONE = [("one_device", 1)]
TWO = [("mirrored", 2), ("horovod", 2), ("multi_worker_mirrored", 2)]
CHECK_ALONE = [("central_storage", 2), ("parameter_server", 2)]
"""Which run cases of `tfdist check` and no others."""
MORE = [("mirrored", 3), ("mirrored", 4), ("horovod", 4)]
"""multi_worker_mirrored has three and four replicas in test_hosts.py and test_launch_command.py."""

Result = dict[str, Any]

LIMIT = 1800 if full() else 900
"""Seconds; the longest job takes about 100 on an idle machine."""

pytestmark = pytest.mark.timeout(6 * LIMIT)  # a test may wait for several jobs


@functools.cache
def started(backend: str, count: int) -> str:
    if backend in ("one_device", "mirrored"):
        # One process does all numbers of replicas: importing and warming up TensorFlow is what takes time.
        counts = (1,) if backend == "one_device" else (4, 3, 2)
        return once_more_if_tensorflow_crashed(lambda: run_alone(CASES, FOLDER, backend, *counts, timeout=LIMIT)).output
    if backend == "parameter_server":  # beside the workers a chief and a server
        return run_mpi(count + 2, CASES, FOLDER, backend, count, timeout=LIMIT).check().output
    return once_more_if_tensorflow_crashed(lambda: run_mpi(count, CASES, FOLDER, backend, timeout=LIMIT)).output


@functools.cache
def results(backend: str, count: int) -> list[Result]:
    """What each process of the job got, by rank."""
    output = started(backend, 0 if backend in ("one_device", "mirrored") else count)
    files = sorted(FOLDER.glob(f"{backend}-{count}-*.json"))
    processes = 1 if backend in ("one_device", "mirrored") else count
    assert len(files) == processes, f"{backend} with {count}: {len(files)} processes finished\n{output[-5000:]}"
    return [json.loads(path.read_text()) for path in files]


def each(*groups: list[tuple[str, int]], of: str) -> pytest.MarkDecorator:
    """One test for each of these runs in which the case `of` is run."""
    pairs = [pair for group in groups for pair in group if of in asked(*pair, everything=True)]
    return pytest.mark.parametrize(
        ("backend", "count"), [param(*pair, chosen=of in asked(*pair, everything=False)) for pair in pairs]
    )


def param(backend: str, count: int, *more: str, chosen: bool) -> Any:
    """Parameters of a test that only `--full` runs where it is not chosen."""
    marks = [] if chosen else [pytest.mark.full]
    return pytest.param(backend, count, *more, id="-".join([*more, backend, str(count)]), marks=marks)


def reference(case: str) -> Any:
    return results("one_device", 1)[0][case]


@functools.cache
def verdicts(backend: str, count: int) -> dict[str, Verdict]:
    """By case: what `tfdist check` would say. Cases without a right value are compared with one process."""
    places = dict.fromkeys([("one_device", 1), ("mirrored" if count > 1 else "one_device", count), (backend, count)])
    if (backend, count) in CHECK_ALONE:
        started("mirrored" if backend == "central_storage" else backend, count if backend == "parameter_server" else 0)
    found = {place: read(FOLDER, *place) for place in places if place in CHECK_ALONE or results(*place)}
    jobs = [Job(name, (number,), tuple(CASES_OF_CHECK)) for name, number in places]
    return {v.case: v for v in judge(found, jobs) if (v.backend, v.replicas) == (backend, count)}


CHECKS = [
    param(*pair, case, chosen=case in checked(*pair, everything=False))
    for pair in (*ONE, *TWO, *MORE, *CHECK_ALONE)
    for case in checked(*pair, everything=True)
]


@pytest.mark.parametrize(("backend", "count", "case"), CHECKS)
def test_the_cases_of_check(backend: str, count: int, case: str) -> None:
    verdict = verdicts(backend, count)[case]
    assert verdict.error is None
    assert verdict.passed, f"{CASES_OF_CHECK[case].says}: {verdict.value}, not {verdict.right}"


@each(ONE, TWO, MORE, of="uneven_rows")
def test_uneven_rows_are_counted(backend: str, count: int) -> None:
    for process in results(backend, count):
        got = process["uneven_rows"]
        assert got["steps"] == 2
        assert got["examples_seen"] == 5
        assert got["traces"]["train"] == 1
        assert got["replicas_in_sync"] == count


@each(TWO, of="wrapped_optimizer")
def test_an_optimizer_wrapped_by_horovod_is_refused(backend: str, count: int) -> None:
    for process in results(backend, count):
        assert process["wrapped_optimizer"].startswith("UsageError")
        assert "SGD is wrapped by Horovod (DistributedOptimizer)" in process["wrapped_optimizer"]


@each(TWO, of="toy_net")
def test_the_toy_net_is_bit_identical_with_two_replicas(backend: str, count: int) -> None:
    expected = results("mirrored", 2)[0]["toy_net"]
    for process in results(backend, count):
        for key in ("weights_sha256", "state_sha256", "losses", "metrics"):
            assert process["toy_net"][key] == expected[key]
        for mine, theirs in zip(process["toy_net"]["weights"], reference("toy_net")["weights"], strict=True):
            assert np.abs(np.array(mine) - np.array(theirs)).max() <= 1e-5


@each(ONE, TWO, of="own_step")
def test_a_step_written_by_hand_equals_the_default_step(backend: str, count: int) -> None:
    for process in results(backend, count):
        assert process["own_step"]["state_sha256"] == process["toy_net"]["state_sha256"]


@each(TWO, of="batch_norm")
def test_local_batch_norm_survives_empty_replicas(backend: str, count: int) -> None:
    native = results("mirrored", count)[0]["batch_norm"]
    for process in results(backend, count):
        got = process["batch_norm"]
        assert got["steps"] == 6
        for name, values in got["state"].items():
            assert np.isfinite(values).all(), name
        if count == 2:
            assert got["state_sha256"] == native["state_sha256"]
        assert got["losses"] == pytest.approx(native["losses"], abs=1e-5)


@each(TWO, MORE[:1], of="convolution")
def test_convolutions_on_empty_replicas_equal_one_device(backend: str, count: int) -> None:
    for kind, right in reference("convolution").items():
        for process in results(backend, count):
            got = process["convolution"][kind]
            assert got["losses"] == pytest.approx(right["losses"], abs=1e-4 if kind == "True" else 1e-5)
            for mine, theirs in zip(got["state"].values(), right["state"].values(), strict=True):
                assert np.allclose(mine, theirs, atol=5e-4 if kind == "True" else 1e-5)


@each(TWO, of="equal_start")
def test_all_ranks_start_from_rank_0(backend: str, count: int) -> None:
    starts = [process["equal_start"] for process in results(backend, count)]
    assert {start["digest"] for start in starts} == {starts[0]["digest"]}
    assert any("moving_mean" in name for name, _ in starts[0]["variables"])
    assert any("momentum" in name or "velocity" in name for name, _ in starts[0]["variables"])


@each(TWO, of="ranks_disagree")
def test_ranks_that_build_different_models_are_told(backend: str, count: int) -> None:
    for process in results(backend, count):
        message = process["ranks_disagree"]["shape"]
        assert message.startswith("RanksDisagree")
        assert "hidden/kernel" in message
        assert "(8, 17)" in message
        assert "(8, 16)" in message
        assert process["ranks_disagree"]["depth"].startswith("RanksDisagree")


@each(TWO, of="plans_disagree")
def test_ranks_that_would_take_other_steps_do_not_start(backend: str, count: int) -> None:
    words = {
        "rows": "the number of training examples differs: rank 0 has 64, rank 1 has 32.",
        "epochs": "the number of steps differs: rank 0 has 4, rank 1 has 8.",
        "global_batch_size": "the global batch size differs: rank 0 has 16, rank 1 has 17.",
    }
    for process in results(backend, count):
        for differs, message in words.items():
            assert process["plans_disagree"][differs] == f"RanksDisagree: {message}"


@each(ONE, TWO, of="whole_number_state")
def test_state_in_whole_numbers_counts_all_replicas(backend: str, count: int) -> None:
    for process in results(backend, count):
        state = process["whole_number_state"]
        assert [value for name, value in state.items() if name.endswith("seen")] == [64]


@each(ONE, TWO, MORE, of="row_coverage")
def test_each_row_is_seen_once_per_epoch(backend: str, count: int) -> None:
    seen = sorted(
        (step, replica, ids)
        for process in results(backend, count)
        for step, replica, ids in by_step(process["row_coverage"]["seen"])
    )
    right = by_step(reference("row_coverage")["seen"])
    assert max(step for step, _, _ in seen) + 1 == 6  # two epochs of three steps
    for step in range(6):
        pieces = [ids for s, _, ids in seen if s == step]
        assert len(pieces) == count
        sizes = [len(ids) for ids in pieces]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)
        assert [i for ids in pieces for i in ids] == right[step][2], "the global batch is the same everywhere"
    for epoch in (0, 1):
        rows = [i for step, _, ids in seen if step // 3 == epoch for i in ids]
        assert sorted(rows) == list(range(10))
    order = [[i for s, _, ids in seen if s // 3 == epoch for i in ids] for epoch in (0, 1)]
    assert order[0] != order[1], "each epoch is shuffled anew"


def by_step(seen: list[list[Any]]) -> list[tuple[int, int, list[int]]]:
    """Number the steps of each replica, in the order in which it saw them."""
    counts: dict[int, int] = {}
    numbered = []
    for replica, ids in seen:
        numbered.append((counts.get(replica, 0), replica, ids))
        counts[replica] = counts.get(replica, 0) + 1
    return numbered


@each(ONE, TWO, of="throughput")
def test_throughput_is_counted_over_all_replicas_without_the_first_step(backend: str, count: int) -> None:
    # Of two steps the second alone has a time: of 8 rows over all replicas, whatever the load of the machine.
    for process in results(backend, count):
        got = process["throughput"]
        assert (got["steps"], got["examples_seen"]) == (2, 24)
        assert got["step_time_ms"]["median"] >= 100, "a padded step takes its time at least"
        assert got["examples_per_second"] * got["step_time_ms"]["median"] / 1e3 == pytest.approx(8, rel=1e-6)


@each(TWO, MORE, of="digits")
def test_digits_agree_with_one_device(backend: str, count: int) -> None:
    for process in results(backend, count):
        assert process["digits"]["losses"] == pytest.approx(reference("digits")["losses"], abs=1e-5)
        if count == 2:
            for key in ("weights_sha256", "state_sha256"):
                assert process["digits"][key] == results("mirrored", 2)[0]["digits"][key]


@each(ONE, TWO, of="evaluation")
def test_evaluation_counts_each_example_once(backend: str, count: int) -> None:
    for process in results(backend, count):
        for size, metrics in process["evaluation"].items():
            assert metrics["accuracy"] == reference("evaluation")["64"]["accuracy"], size
            assert metrics["loss"] == pytest.approx(reference("evaluation")["64"]["loss"], abs=1e-5)


@each(ONE, TWO, of="bad_tasks")
def test_broken_tasks_are_refused_on_every_rank(backend: str, count: int) -> None:
    expected = {
        "empty": ("UsageError", "split 'train' is empty"),
        "not a tuple": ("UsageError", "type dict"),
        "four parts": ("UsageError", "a tuple of 4"),
        "unequal lengths": ("UsageError", "one first axis"),
        "a number": ("UsageError", "gave a int"),
        "ragged examples": ("UsageError", "cannot be read and put into a batch"),
        "batched": ("UsageError", "the dataset seems to be batched"),
        "scalar loss": ("UsageError", "the loss has shape ()"),
        "loss per class": ("UsageError", "the loss has shape (None, 3)"),
        "model raises": ("TaskFailure", "RuntimeError: no such layer here"),
    }
    for process in results(backend, count):
        for wrong, (kind, text) in expected.items():
            assert process["bad_tasks"][wrong].startswith(f"{kind}: "), process["bad_tasks"][wrong]
            assert text in process["bad_tasks"][wrong]


@each(ONE, TWO, of="not_finite")
def test_a_nan_stops_all_ranks_at_the_same_step(backend: str, count: int) -> None:
    for process in results(backend, count):
        assert process["not_finite"].startswith(
            f"NonFiniteError: step 3: the loss is not finite on replica {count - 1};"
        )
