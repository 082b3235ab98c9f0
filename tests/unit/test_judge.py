"""What is started for a check, and what is right and wrong of what came out. Values here are given, not trained."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tfdist.evidence import cases
from tfdist.evidence.cases import CASES, Case
from tfdist.evidence.judge import REFERENCE, Verdict, judge, plan
from tfdist.evidence.runs import Job, read
from tfdist.strategies.table import BACKENDS

PLACES = [(REFERENCE, 1), ("mirrored", 2), ("horovod", 2)]


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes a case called `case`."""

    def make(right: Any, tolerance: float = 1e-5, applies: Callable[[str, int], bool] = lambda *_: True) -> None:
        made = right if callable(right) or isinstance(right, str) else lambda _: right
        monkeypatch.setitem(CASES, "case", Case("case", "a case", lambda run: [], made, tolerance, applies, False))

    yield make


def ranks(*values: Any) -> list[dict[str, Any]]:
    """What each process wrote: a value, an error (as text), or nothing."""
    return [
        {} if v is None else {"case": {"case": "case", "error" if isinstance(v, str) else "value": v}} for v in values
    ]


def verdicts(one: Any, mirrored: Any, *horovod: Any) -> list[Verdict]:
    """Of one device, mirrored with two replicas, and two processes of horovod."""
    given = (ranks(one), ranks(mirrored), ranks(*horovod))
    jobs = [Job(backend, (count,), ("case",)) for backend, count in PLACES]
    return judge(dict(zip(PLACES, given, strict=True)), jobs)


def passed(*values: Any) -> list[bool]:
    return [verdict.passed for verdict in verdicts(*values)]


class TestPlan:
    """Of a case `a` of backends in step, and `b` of asynchronous ones."""

    @pytest.fixture(autouse=True)
    def _cases(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("a", "b"):
            made = Case(name, "", lambda run: [], "one device", 0.0, lambda *_: True, asynchronous=name == "b")
            monkeypatch.setitem(CASES, name, made)

    def test_the_reference_comes_first_and_once(self) -> None:
        jobs = plan((REFERENCE, "mirrored"), (2,), ["a", "b"])
        assert jobs == [Job(REFERENCE, (1,), ("a", "b")), Job("mirrored", (2,), ("a", "b"))]
        assert plan((), (2,), ["a"]) == [Job(REFERENCE, (1,), ("a",))]

    def test_a_backend_of_one_process_does_all_numbers_of_replicas_and_others_start_for_each(self) -> None:
        jobs = plan(("mirrored", "horovod"), (4, 2, 2), ["a", "b"])
        assert [(job.backend, job.replicas) for job in jobs] == [
            (REFERENCE, (1,)),
            ("mirrored", (2, 4)),
            ("horovod", (2,)),
            ("horovod", (4,)),
        ]
        assert [job.results for job in jobs] == [2, 4, 2, 2]

    def test_every_backend_can_be_planned(self) -> None:
        assert {job.backend for job in plan(tuple(BACKENDS), (2,), ["a", "b"])} == set(BACKENDS)

    def test_a_backend_that_no_case_is_about_is_not_started(self) -> None:
        assert plan(("mirrored", "parameter_server"), (2,), ["a"]) == [
            Job(REFERENCE, (1,), ("a",)),
            Job("mirrored", (2,), ("a",)),
        ]
        assert plan(("mirrored", "parameter_server"), (2,), ["b"]) == [
            Job(REFERENCE, (1,), ("b",)),
            Job("parameter_server", (2,), ("b",)),
        ]


class TestRightValues:
    def test_values_within_the_tolerance_pass(self, case: Any) -> None:
        case([1.0, 0.5], 0.01)
        assert passed([1.0, 0.5], [1.005, 0.495], [1, 0.5], [0.995, 0.505]) == [True] * 3

    def test_a_value_that_is_off_fails_on_any_rank(self, case: Any) -> None:
        case([1.0, 0.5], 0.01)
        for off in ([1.02, 0.5], [1.0, 0.48], [float("nan"), 0.5], [float("inf"), 0.5], [1.0], [1.0, 0.5, 0.0]):
            right = [1.0, 0.5]
            assert passed(off, right, right, right) == [False, True, True]
            assert passed(right, off, right, right) == [True, False, True]
            assert passed(right, right, off, right) == [True, True, False]
            found = verdicts(right, right, right, off)
            assert [v.passed for v in found] == [True, True, False]
            assert repr(found[2].value) == repr(off), "the value that is shown is the wrong one"
            assert found[2].right == right

    def test_the_tolerance_is_of_the_number_where_it_is_above_1(self, case: Any) -> None:
        case([1000.0], 0.01)
        assert passed([1009.0], [991.0], [1011.0], [1000.0]) == [True, True, False]
        case([0.001], 0.01)
        assert passed([0.01], [0.012], [0.001], [0.001]) == [True, False, True]

    def test_without_tolerance_every_bit_counts(self, case: Any) -> None:
        case([0.1], 0.0)
        assert passed([0.1], [math.nextafter(0.1, 1)], [0.1], [0.1]) == [True, False, True]

    def test_the_right_value_may_depend_on_the_number_of_replicas(self, case: Any) -> None:
        case(lambda replicas: [float(replicas)])
        assert passed([1.0], [2.0], [2.0], [2.0]) == [True] * 3
        assert passed([2.0], [1.0], [2.0], [1.0]) == [False] * 3

    def test_words_must_be_the_same(self, case: Any) -> None:
        case(["nan", 1.0])
        assert passed(["nan", 1.0], ["inf", 1.0], ["nan", 1.0], [0.0, 1.0]) == [True, False, False]


class TestComparisons:
    def test_with_one_device(self, case: Any) -> None:
        case("one device", 0.01)
        assert passed([1.0], [1.005], [1.005], [1.005]) == [True] * 3
        assert passed([1.0], [1.02], [1.0], [1.02]) == [True, False, False]
        assert all(v.right == [1.0] for v in verdicts([1.0], [1.02], [1.0], [1.02]))

    def test_with_one_device_that_has_failed(self, case: Any) -> None:
        case("one device")
        assert passed("the sky is falling", [1.0], [1.0], [1.0]) == [False] * 3
        assert passed(None, [1.0], [1.0], [1.0]) == [False] * 3

    def test_equal_is_to_the_first_backend_at_that_number_of_replicas(self, case: Any) -> None:
        case("equal", 0.0)
        assert passed([1.0], [2.0], [2.0], [2.0]) == [True] * 3, "one device has another number of replicas"
        assert passed([1.0], [2.0], [2.0], [1.0]) == [True, True, False]
        assert passed([1.0], [2.0], [3.0], [3.0]) == [True, True, False]

    def test_equal_where_the_first_has_failed(self, case: Any) -> None:
        case("equal", 0.0)
        assert passed([1.0], "the sky is falling", [2.0], [2.0]) == [True, False, True]
        assert passed([1.0], None, [2.0], [3.0]) == [True, False, False]

    def test_a_wrong_first_is_not_what_others_must_equal(self, case: Any) -> None:
        case("equal", 0.0)
        jobs = [Job(backend, (2,), ("case",)) for backend in ("multi_worker_mirrored", "horovod", "mirrored")]
        # The first does not agree with itself.
        given = (ranks([1.0], [2.0]), ranks([3.0], [3.0]), ranks([1.0]))
        found = judge(dict(zip([(job.backend, 2) for job in jobs], given, strict=True)), jobs)
        assert [v.passed for v in found] == [False, True, False]
        assert found[2].right == [3.0]

    def test_equal_looks_at_all_ranks_of_the_first(self, case: Any) -> None:
        case("equal", 0.0)
        jobs = [Job("horovod", (2,), ("case",)), Job("mirrored", (2,), ("case",))]
        results = {("horovod", 2): ranks([1.0], [2.0]), ("mirrored", 2): ranks([1.0])}
        assert not judge(results, jobs)[0].passed


class TestErrors:
    def test_an_error_on_any_rank_fails_and_is_told(self, case: Any) -> None:
        case([1.0])
        for values in (("the sky is falling", [1.0]), ([1.0], "the sky is falling")):
            found = verdicts([1.0], [1.0], *values)[2]
            assert (found.passed, found.error) == (False, "the sky is falling")

    def test_a_rank_without_a_result_fails(self, case: Any) -> None:
        case([1.0])
        for values in ((None, [1.0]), ([1.0], None)):
            found = verdicts([1.0], [1.0], *values)[2]
            assert (found.passed, found.error) == (False, "no result")

    def test_a_job_that_wrote_nothing_fails(self, case: Any) -> None:
        case([1.0])
        (found,) = judge({}, [Job("mirrored", (2,), ("case",))])
        assert found == Verdict("case", "mirrored", 2, None, [1.0], False, "no result")

    def test_where_a_case_does_not_apply_there_is_no_verdict(self, case: Any) -> None:
        case([1.0], applies=lambda backend, replicas: backend == "horovod" and replicas == 2)
        found = verdicts(None, None, [1.0], [1.0])
        assert [(v.backend, v.passed) for v in found] == [("horovod", True)]
        assert judge({}, [Job("horovod", (3,), ("case",))]) == []


class TestCases:
    def test_no_case_replaces_another(self) -> None:
        assert inspect.getsource(cases).count("\n@case(") == len(CASES)

    @pytest.mark.parametrize("name", CASES)
    def test_every_case_has_a_right_value_and_applies_somewhere(self, name: str) -> None:
        made = CASES[name]
        assert made.name == name
        assert made.says
        assert made.tolerance >= 0
        if isinstance(made.right, str):
            assert made.right in ("one device", "equal")
        else:
            assert all(made.right(replicas) for replicas in (1, 2, 3, 4))
        assert any(made.applies(backend, 2) for backend in BACKENDS)


class TestReading:
    def test_what_was_written_by_rank_without_a_broken_last_line(self, tmp_path: Path) -> None:
        lines = [
            json.dumps({"case": "a", "value": [1.0]}),
            json.dumps({"case": "b", "error": "x"}),
            '{"case": "c", "va',
        ]
        (tmp_path / "horovod-2-1.jsonl").write_text("\n".join(lines))
        assert read(tmp_path, "horovod", 2) == [
            {},
            {"a": {"case": "a", "value": [1.0]}, "b": {"case": "b", "error": "x"}},
        ]
        (tmp_path / "mirrored-2-0.jsonl").write_text(lines[0] + "\n")
        assert read(tmp_path, "mirrored", 2) == [{"a": {"case": "a", "value": [1.0]}}]
