"""The cost of an all-reduce: hand-worked values, α and β found again, networks as people type them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tfdist.errors import UsageError
from tfdist.evidence.scaling import Point, efficiency, fit, parse_network, predict, scaling

ALPHA, BETA = 10e-6, 1e-9
SIZES = [1 << n for n in range(10, 23, 2)]


def points(alpha: float, beta: float, replicas: tuple[int, ...] = (2, 4, 8), noise: float = 0.0) -> list[Point]:
    random = np.random.default_rng(0)
    return [
        Point(p, n, predict(alpha, beta, n, p) * float(np.exp(noise * random.standard_normal())))
        for p in replicas
        for n in SIZES
    ]


@pytest.mark.parametrize(
    ("size", "replicas", "microseconds"),
    [
        (4000, 1, 0.0),
        (4000, 2, 14.0),  # 1·(10 + 4); a ring: 20 + 4
        (4000, 4, 28.0),  # 2·(10 + 4); a ring: 60 + 6
        (400_000, 4, 660.0),  # a ring: 60 + 600; doubling: 2·(10 + 400)
        (4000, 3, 42.0),  # a step, and one before and after it, for the third replica; a ring: 40 + 5.3
        (4_000_000, 3, 4 * 10 + 4 / 3 * 4000),
        (4000, 4096, 168.0),  # 12·(10 + 4)
    ],
)
def test_the_formula_by_hand(size: int, replicas: int, microseconds: float) -> None:
    assert predict(ALPHA, BETA, size, replicas) * 1e6 == pytest.approx(microseconds, rel=1e-12)


def test_efficiency_is_the_part_of_the_step_that_is_not_communication() -> None:
    assert efficiency(28e-6, 4000, 4, ALPHA, BETA) == pytest.approx(0.5)
    assert efficiency(3 * 28e-6, 4000, 4, ALPHA, BETA) == pytest.approx(0.75)
    assert efficiency(1.0, 4000, 1, ALPHA, BETA) == 1.0


@pytest.mark.parametrize("replicas", [(2,), (4,), (2, 4, 8), (3, 5)])
@pytest.mark.parametrize(("alpha", "beta"), [(ALPHA, BETA), (1e-3, 1e-11), (0.0, BETA), (ALPHA, 0.0), (1e-8, 1e-7)])
def test_a_fit_finds_what_exact_times_were_made_of(alpha: float, beta: float, replicas: tuple[int, ...]) -> None:
    found = fit(points(alpha, beta, replicas))
    assert found.alpha == pytest.approx(alpha, rel=1e-6, abs=1e-12)
    assert found.beta == pytest.approx(beta, rel=1e-6, abs=1e-16)
    assert found.error < 1e-6


def test_a_fit_finds_what_noisy_times_were_made_of_and_tells_the_noise() -> None:
    found = fit(points(ALPHA, BETA, noise=0.1))
    assert found.alpha == pytest.approx(ALPHA, rel=0.1)
    assert found.beta == pytest.approx(BETA, rel=0.1)
    assert 0.03 < found.error < 0.15


def test_neither_cost_comes_out_negative() -> None:
    faster_when_larger = [Point(2, 1000, 20e-6), Point(2, 100_000, 10e-6)]
    found = fit(faster_when_larger)
    assert (found.alpha > 0, found.beta) == (True, 0.0)
    assert found.error > 0.2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "two sizes"),
        ([Point(2, 1000, 1e-5), Point(4, 1000, 1e-5)], "two sizes"),
        ([Point(1, 1000, 1e-5), Point(1, 2000, 1e-5)], "two replicas"),
        ([Point(2, 1000, 0.0), Point(2, 2000, 1e-5)], "above 0"),
        ([Point(2, 1000, float("nan")), Point(2, 2000, 1e-5)], "finite"),
    ],
)
def test_points_that_tell_nothing_are_refused(given: list[Point], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fit(given)


@pytest.mark.parametrize(
    "text",
    [
        "100gbit,2us",
        "2us,100gbit",
        " 100 Gbit/s , 2 µs ",
        "100Gbps,0.002ms",
        "12.5gbyte,2000ns",
        "12.5 Gbyte/s,2us",
        "1e5mbit,2e-6s",
        "0.1tbit,2us",
    ],
)
def test_a_network_as_people_type_it(text: str) -> None:
    assert parse_network(text) == pytest.approx((2e-6, 8e-11))


def test_a_network_may_have_no_latency() -> None:
    assert parse_network("1gbit,0us") == pytest.approx((0.0, 8e-9))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is not a number with a unit"),
        ("fast", "'fast' is not a number with a unit"),
        ("100gbit", "has no latency"),
        ("2us", "has no bandwidth"),
        ("100gbit,2us,", "'' is not a number"),
        ("100gbit,10gbit", "two values of bandwidth"),
        ("100gbit,2us,3us", "two values of latency"),
        ("100GB/s,2us", "'100GB/s' may mean bits or bytes"),
        ("100,2us", "'100' is not a number with a unit"),
        ("100gbit,2minutes", "the unit 'minutes' is unknown"),
        ("-1gbit,2us", "'-1gbit' is not a number"),
        ("0gbit,2us", "the bandwidth must be above 0"),
        ("1.2.3gbit,2us", "'1.2.3gbit' is not a number"),
        ("1e999gbit,2us", "'1e999gbit' is not a number"),
    ],
)
def test_a_network_that_cannot_be_read_is_refused_with_the_way_out(text: str, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_network(text)
    assert says in str(raised.value)
    assert f"network={text!r}" in str(raised.value)
    assert "100gbit,2us" in str(raised.value)


class TestReport:
    REPORT: dict[str, Any] = scaling(0.006, 400_000, {"horovod": points(ALPHA, BETA)}, ["100gbit,2us"])

    def test_it_can_be_written(self) -> None:
        assert json.loads(json.dumps(self.REPORT, allow_nan=False)) == self.REPORT
        assert "Thakur" in self.REPORT["source"]

    def test_it_has_the_fit_and_its_points(self) -> None:
        (shown,) = self.REPORT["fits"]
        assert shown["backend"] == "horovod"
        assert shown["alpha_us"] == pytest.approx(10)
        assert shown["gbit_per_second"] == pytest.approx(8)
        assert shown["error"] < 1e-6
        assert len(shown["points"]) == 3 * len(SIZES)
        point = shown["points"][0]
        assert (point["replicas"], point["bytes"]) == (2, 1024)
        assert point["measured_us"] == pytest.approx(11.024)
        assert point["fitted_us"] == pytest.approx(11.024)

    def test_it_predicts_from_what_was_measured_and_for_a_network(self) -> None:
        measured, network = self.REPORT["predictions"]
        assert (measured["network"], measured["backend"]) == ("as measured", "horovod")
        assert (network["network"], network["backend"]) == ("100gbit,2us", "any")
        for prediction in (measured, network):
            assert [e["replicas"] for e in prediction["efficiency"]] == [2**n for n in range(1, 13)]
            values = [e["value"] for e in prediction["efficiency"]]
            assert values == sorted(values, reverse=True)
        assert measured["efficiency"][1]["value"] == pytest.approx(6000 / 6660)
        assert network["efficiency"][0]["value"] == pytest.approx(6000 / (6000 + 2 + 32))

    def test_without_a_byte_that_costs_there_is_no_bandwidth(self) -> None:
        report = scaling(0.006, 400_000, {"mirrored": points(ALPHA, 0.0)})
        assert report["fits"][0]["gbit_per_second"] is None
