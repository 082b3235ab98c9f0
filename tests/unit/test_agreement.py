"""Verdicts on traces that are made by hand: same bits, rounding, different, and where two runs part."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tfdist.evidence.agreement import Bound, Stage, agree, find_stage, gamma, variable_differences

STEPS, PIECES = 4, 2
NAMES = ["model/kernel", "model/bias", "optimizer/iteration"]
TRAINED = NAMES[:2]
STAGES = {"local": 2, "reduced": 2, "after": 3}


def trace(**changes: Any) -> dict[str, np.ndarray]:
    """What two replicas see in four steps: a sum of 1 and a size of 10 everywhere; checksums are equal in a stage."""
    found: dict[str, np.ndarray] = {
        "batch": np.arange(STEPS * PIECES, dtype=np.int64).reshape(STEPS, PIECES, 1),
        "initial": np.tile(np.arange(3), (PIECES, 1)),
        "trained": np.array(TRAINED),
        "variables": np.array(NAMES),
        "losses": np.array([4.0, 3.0, 2.0, 1.0], np.float32),
        "addends": np.array(32),
        "replicas": np.array(PIECES),
        "value/model/kernel": np.array([[1.0, 2.0], [3.0, 4.0]], np.float32),
        "value/model/bias": np.array([0.5, -0.5], np.float32),
        "value/optimizer/iteration": np.array(STEPS, np.int64),
    }
    for number, (stage, columns) in enumerate(STAGES.items()):
        found[f"{stage} checksums"] = np.full((STEPS, PIECES, columns), number, np.int64)
        found[f"{stage} sums"] = np.ones((STEPS, PIECES, columns))
        found[f"{stage} sizes"] = np.full((STEPS, PIECES, columns), 10.0)
    return found | changes


def changed(stage: str, step: int, pieces: Any, column: int, by: float) -> dict[str, np.ndarray]:
    """A trace in which something of a stage is another one, from a step on."""
    found = trace()
    found[f"{stage} sums"][step:, pieces, column] += by
    found[f"{stage} checksums"][step:, pieces, column] += 7
    return found


def shadow(distance: float) -> dict[str, np.ndarray]:
    """A run whose numbers are all so far from those of `trace`, relative to their size."""
    found = trace()
    found["losses"] = found["losses"] + np.float32(distance)
    for name in found:
        if name.endswith("sums"):
            found[name] = found[name] + 10 * distance
        if name.startswith("value/model"):
            found[name] = found[name] + np.float32(distance)
    return found


BOUND = Bound.of(trace(), shadow(1e-3))


def test_equal_traces_have_the_same_bits() -> None:
    told = agree(trace(), trace(), None)
    assert (told["verdict"], told["first"], told["stage"]) == ("same bits", None, None)
    assert told["loss_difference"] == [0] * STEPS
    assert all(v["ulps"] == v["absolute"] == 0 for v in told["variables"])


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_bits_are_looked_at_and_not_values(zero: float) -> None:
    own = trace(losses=np.array([1, zero, 1, 1], np.float32))
    other = trace(losses=np.array([1, 0.0, 1, 1], np.float32))
    assert (agree(own, other, None)["verdict"] == "same bits") == (math.copysign(1, zero) > 0)


def test_what_rounding_may_do_is_rounding() -> None:
    other = changed("local", 1, 1, 0, 1e-3)
    other["losses"] = other["losses"] + np.float32(1e-4)
    other["value/model/kernel"] = other["value/model/kernel"] + np.float32(1e-4)
    other["after checksums"][2:, :, 1] += 1
    told = agree(trace(), other, BOUND)
    assert told["verdict"] == "rounding"
    assert told["first"] == {"step": 3, "variable": "model/bias"}
    assert agree(trace(), other, None)["verdict"] == "different"


@pytest.mark.parametrize(
    "change",
    [
        {"losses": np.array([4, 3, 2, 1.1], np.float32)},
        {"losses": np.array([4, 3, 2, np.nan], np.float32)},
        {"losses": np.array([4, 3, 2], np.float32)},
        {"value/model/bias": np.array([0.5, -0.6], np.float32)},
        {"value/model/bias": np.array([0.5, np.nan], np.float32)},
        {"value/optimizer/iteration": np.array(STEPS - 1)},
    ],
)
def test_what_rounding_cannot_do_is_different(change: dict[str, np.ndarray]) -> None:
    assert agree(trace(), trace(**change), BOUND)["verdict"] == "different"


def test_a_difference_that_grows_too_fast_is_different_though_it_ends_small() -> None:
    other = trace(losses=np.array([4.1, 3, 2, 1], np.float32))
    assert agree(trace(), other, BOUND)["verdict"] == "different"


STAGE_CASES: list[tuple[dict[str, np.ndarray], Stage]] = [
    (trace(initial=np.array([[0, 1, 2], [0, 9, 2]])), Stage("initial weights", 0, "model/bias", 1)),
    (trace(initial=np.array([[0, 9, 2], [0, 9, 2]])), Stage("initial weights", 0, "model/bias")),
    (trace(batch=trace()["batch"] + np.array([0, 0, 1, 1])[:, None, None]), Stage("batch", 3)),
    (changed("local", 1, 1, 1, 5.0), Stage("local gradients", 2, "model/bias", 1)),
    (changed("local", 1, slice(None), 0, 5.0), Stage("local gradients", 2, "model/kernel")),
    (changed("reduced", 2, 1, 0, 5.0), Stage("reduced gradients", 3, "model/kernel", 1)),
    (changed("after", 0, 0, 2, 5.0), Stage("update", 1, "optimizer/iteration", 0)),
    (changed("after", 0, slice(None), 0, math.nan), Stage("update", 1, "model/kernel")),
]


@pytest.mark.parametrize(("other", "stage"), STAGE_CASES, ids=[f"{s.name}-{s.rank}" for _, s in STAGE_CASES])
def test_the_first_stage_that_differs_is_named(other: dict[str, np.ndarray], stage: Stage) -> None:
    assert find_stage(trace(), other, BOUND) == stage


def test_rounding_before_the_fault_is_passed_over() -> None:
    other = changed("reduced", 3, slice(None), 0, 5.0)
    other["local sums"][:, :, 0] += 1e-3
    other["local checksums"][:] += 1
    assert find_stage(trace(), other, BOUND) == Stage("reduced gradients", 4, "model/kernel")


def test_the_same_rows_in_other_pieces_are_the_same_batch() -> None:
    other = trace(batch=trace()["batch"][:, ::-1])
    assert find_stage(trace(), other, BOUND) is None


def test_other_numbers_of_replicas_compare_by_their_totals() -> None:
    four = trace()
    for name in [name for name in four if name.split()[0] in STAGES]:
        local = name.startswith("local") and not name.endswith("checksums")
        four[name] = np.repeat(four[name], 2, axis=1) / (2 if local else 1)
    four["batch"] = np.concatenate([four["batch"], np.zeros_like(four["batch"])], axis=1)
    four["initial"] = np.repeat(four["initial"], 2, axis=0)
    four["replicas"] = np.array(4)
    assert find_stage(trace(), four, BOUND) is None
    four["local sums"][2, 3, 1] += 5.0
    assert find_stage(trace(), four, BOUND) == Stage("local gradients", 3, "model/bias")


@pytest.mark.parametrize("piece", range(4))
def test_of_four_replicas_the_wrong_one_is_named_beside_two(piece: int) -> None:
    two, four = trace(), in_pieces(2, replicas=4)
    four["after sums"][1:, piece, 0] += 5.0
    four["after checksums"][1:, piece, 0] += 1
    assert find_stage(two, four, BOUND) == Stage("update", 2, "model/kernel", piece)
    # The first replica of the first run is what all others are held against: that it alone is wrong, nobody can tell.
    assert find_stage(four, two, BOUND) == Stage("update", 2, "model/kernel", piece or None)


@pytest.mark.parametrize("stage", ["local", "reduced"])
def test_of_several_shards_on_a_replica_the_replica_is_named(stage: str) -> None:
    whole, other = in_pieces(4, replicas=2), in_pieces(4, replicas=2)
    # A shard's own gradients are its own; what all have got stands beside each of the replica's four shards.
    pieces = slice(5, 6) if stage == "local" else slice(4, 8)
    other[f"{stage} sums"][1:, pieces, 1] += 5.0
    other[f"{stage} checksums"][1:, pieces, 1] += 1
    for bound in (BOUND, None):
        found = find_stage(whole, other, bound)
        assert found is not None
        assert (found.variable, found.step, found.rank) == ("model/bias", 2, 1)


def in_pieces(times: int, replicas: int) -> dict[str, np.ndarray]:
    """`trace` with each piece cut into so many, whose own gradients add up to the same."""
    found = trace(replicas=np.array(replicas), initial=np.tile(np.arange(3), (replicas, 1)))
    for name in [name for name in found if name.split()[0] in STAGES]:
        shared = times if name.startswith("local") and not name.endswith("checksums") else 1
        found[name] = np.repeat(found[name], times, axis=1) / shared
    found["batch"] = np.concatenate([found["batch"]] + [np.zeros_like(found["batch"])] * (times - 1), axis=1)
    return found


def test_replicas_of_the_reference_that_are_not_of_one_mind_are_seen() -> None:
    # Only replica 1 of the first run is off: its replica 0 and the whole second run have the same bits.
    torn = changed("after", 1, 1, 0, 5.0)
    assert agree(torn, trace(), None)["first"] == {"step": 2, "variable": "model/kernel"}
    assert find_stage(torn, trace(), BOUND) == Stage("update", 2, "model/kernel", 1)
    first = trace(initial=np.array([[0, 1, 2], [0, 9, 2]]))
    assert agree(first, trace(), None)["first"] == {"step": 0, "variable": "model/bias"}


def test_equal_bits_need_no_bound() -> None:
    # NaN, or a shadow whose distance has no size: equal bits are equal.
    own, other = changed("local", 0, 0, 0, math.nan), changed("local", 0, 0, 0, math.nan)
    other["after sums"][2, :, 0] += 5.0
    other["after checksums"][2, :, 0] += 1
    assert find_stage(own, other, BOUND) == Stage("update", 3, "model/kernel")


def test_runs_that_end_in_the_same_nan_have_the_same_bits() -> None:
    nan = {"value/model/bias": np.array([np.nan, 1], np.float32), "losses": np.array([4, 3, np.nan, np.nan], "f4")}
    told = agree(trace(**nan), trace(**nan), None)
    assert told["verdict"] == "same bits"
    assert told["variables"][1] == {"name": "model/bias", "absolute": 0.0, "relative": 0.0, "ulps": 0}
    one = trace(**{"value/model/bias": np.array([np.nan, 1], np.float32)})
    two = trace(**{"value/model/bias": np.array([1, 1], np.float32)})
    assert variable_differences(one, two)[1] == {"name": "model/bias", "absolute": None, "relative": None, "ulps": None}


def test_a_variable_of_which_rounding_says_nothing_must_be_equal() -> None:
    bound = Bound(BOUND.relative, BOUND.losses, {"model/kernel": 1.0}, BOUND.growth)
    other = trace(**{"value/model/bias": np.array([0.5, -0.5001], np.float32)})
    assert agree(trace(), other, bound)["verdict"] == "different"


def test_the_bound_never_shrinks_and_a_shadow_of_nan_allows_all() -> None:
    near = shadow(0.0)
    near["losses"] = trace()["losses"] + np.array([1, 0, 0, 0], np.float32)
    # 1, then as much again in each step, though this shadow came back to where the run was.
    assert np.round(Bound.of(trace(), near).losses, 2).tolist() == [1, 2, 3, 4]
    near["losses"] = trace()["losses"] + np.array([0, np.nan, 0, 0], np.float32)
    assert np.isinf(Bound.of(trace(), near).losses).tolist() == [False, True, True, True]


def test_another_model_parts_from_the_start() -> None:
    other = trace(variables=np.array(["model/kernel", "model/offset", "optimizer/iteration"]))
    other["value/model/offset"] = other.pop("value/model/bias")
    told = agree(trace(), other, BOUND)
    assert told["verdict"] == "different"
    assert told["first"]["step"] == 0
    assert told["stage"]["name"] == "initial weights"


def test_the_error_of_a_sum() -> None:
    # n = 1: λ = √(2·ln(2·10⁶)) = 5.387; γ̃ = λ·2⁻²⁴ and next to nothing more.
    assert gamma(1) == pytest.approx(5.3868 * 2.0**-24, rel=1e-3)
    # n = 10⁴: λ = √(2·ln(2·10¹⁰)) = 6.888, times 100.
    assert gamma(10_000) == pytest.approx(6.888e2 * 2.0**-24, rel=1e-3)


def test_the_bound_is_what_rounding_adds_up_to() -> None:
    # The shadow is 10⁻³ away at each step, so t·10⁻³ after t steps, and the losses' own sums: 2γ̃·loss.
    own = 2 * gamma(32) * trace()["losses"]
    assert pytest.approx(np.arange(1, 5) * 1e-3 + own, rel=1e-3) == BOUND.losses
    assert BOUND.variables["model/kernel"] == pytest.approx(4e-3, rel=1e-3)
    assert BOUND.variables["optimizer/iteration"] == 0
    assert BOUND.growth["local"] == pytest.approx(np.arange(1, 5) * 1e-3 + 2 * gamma(32), rel=1e-3)


@pytest.mark.parametrize(
    ("a", "b", "ulps"),
    [
        (np.float32(1), np.nextafter(np.float32(1), np.float32(2)), 1),
        (np.float32(0), np.float32(-0.0), 0),
        (np.float32(1e-45), np.float32(-1e-45), 2),
        (np.float32(1), np.float32(2), 1 << 23),
        (np.float16(1), np.float16(2), 1 << 10),
        (np.float64(1), np.nextafter(1.0, 2.0), 1),
        (np.int64(3), np.int64(-4), 7),
    ],
)
def test_units_in_the_last_place(a: Any, b: Any, ulps: int) -> None:
    own, other = trace(**{"value/model/bias": np.array([a])}), trace(**{"value/model/bias": np.array([b])})
    assert variable_differences(own, other)[1]["ulps"] == ulps


def test_relative_differences_are_of_the_larger_value() -> None:
    other = trace(**{"value/model/bias": np.array([0.5, -1.0], np.float32)})
    bias = variable_differences(trace(), other)[1]
    assert (bias["absolute"], bias["relative"]) == (0.5, 0.5)


def test_replicas_of_one_run_that_part_are_never_rounding() -> None:
    torn = trace()
    torn["after checksums"][2, 1, 0] += 1  # and come together again
    assert agree(trace(), torn, BOUND)["verdict"] == "different"
    assert agree(torn, trace(), BOUND)["first"] == {"step": 3, "variable": "model/kernel"}
