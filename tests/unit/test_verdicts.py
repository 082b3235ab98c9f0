"""What silence, ends and standstills mean. Time is a number here."""

from __future__ import annotations

import dataclasses

import pytest

from tfdist.cluster.places import Place, behind, named, table
from tfdist.cluster.verdicts import Judge, Verdict
from tfdist.errors import PeerLost, Stalled

HOSTS = ["lab0", "lab1", "lab2"]
WAITING, COMPUTING, COLLECTIVE = "waiting for input", "computing", "in the collective"


def place(step: int, marks: int, phase: str = COMPUTING, seconds: float = 0.0) -> Place:
    return Place(step, marks, phase, seconds, begun=True)


def all_beat(judge: Judge, now: float, *places: Place, ranks: tuple[int, ...] = (0, 1, 2)) -> None:
    for rank, where in zip(ranks, places, strict=True):
        judge.beat(rank, where, now)


def after_look(judge: Judge, now: float) -> Verdict | None:
    judge.look(now)
    return judge.verdict


class TestEnds:
    def test_a_connection_that_closes_without_a_goodbye_is_a_death(self) -> None:
        judge = Judge(0, HOSTS, 0.0)
        all_beat(judge, 1.0, place(17, 71), place(17, 70), place(17, 71))
        judge.closed(1)
        assert judge.verdict is not None
        assert (judge.verdict.kind, judge.verdict.rank, judge.verdict.code) == ("lost", 1, PeerLost.exit_code)
        assert judge.verdict.message.startswith(
            "rank 1 of 3 (host lab1) has died after step 17 (computing) without a word"
        )

    def test_steps_of_the_others_tell_how_far_it_had_come(self) -> None:
        judge = Judge(0, HOSTS, 0.0)
        all_beat(judge, 1.0, place(40, 163), place(17, 70), place(39, 159))
        judge.closed(1)
        assert judge.verdict is not None
        assert "has died after step 40 without a word" in judge.verdict.message

    def test_before_the_first_step(self) -> None:
        judge = Judge(0, HOSTS, 0.0)
        judge.closed(2)
        assert judge.verdict is not None
        assert "rank 2 of 3 (host lab2) has died before the first step" in judge.verdict.message

    def test_after_a_goodbye_nothing_follows(self) -> None:
        judge = Judge(0, HOSTS, 0.0, stall=10)
        all_beat(judge, 1.0, place(17, 71), place(17, 70), place(17, 71))
        judge.goodbye(1)
        judge.closed(1)
        all_beat(judge, 20.0, place(17, 71), place(17, 71), ranks=(0, 2))
        assert after_look(judge, 20.0) is None

    def test_the_first_cause_stays(self) -> None:
        judge = Judge(0, HOSTS, 0.0)
        judge.failed(2, 1, "ValueError: the sky is falling")
        judge.closed(2)
        judge.closed(1)
        assert after_look(judge, 100.0) == Verdict("failed", 2, 1, "ValueError: the sky is falling")

    def test_the_others_judge_rank_0_alone(self) -> None:
        judge = Judge(2, HOSTS, 0.0)
        judge.closed(1)
        assert judge.verdict is None
        judge.closed(0)
        assert judge.verdict is not None
        assert judge.verdict.message.startswith("rank 0 of 3 (host lab0) has died")


class TestSilence:
    def test_a_pause_is_survived_and_silence_is_not(self) -> None:
        judge = Judge(0, HOSTS, 0.0, silence=15)
        for now in (0.0, 5.0, 19.9):
            judge.beat(1, place(1, 4), now)
            judge.beat(2, place(1, 4), now)
            assert after_look(judge, now) is None
        judge.beat(1, place(1, 4), 30.0)
        verdict = after_look(judge, 35.0)
        assert verdict is not None
        assert (verdict.kind, verdict.rank, verdict.code) == ("silent", 2, PeerLost.exit_code)
        assert "rank 2 of 3 (host lab2) has said nothing for 15 s after step 1" in verdict.message

    def test_one_that_has_itself_stood_still_does_not_blame_the_others(self) -> None:
        judge = Judge(0, HOSTS, 0.0, silence=15, stall=50)
        all_beat(judge, 1.0, place(1, 4), place(1, 4), place(1, 4))
        judge.slept(3600.0)
        assert after_look(judge, 3602.0) is None
        assert judge.places(3602.0)[1].seconds == pytest.approx(1.0)
        assert after_look(judge, 3617.0) is not None

    def test_all_that_are_silent_are_named(self) -> None:
        verdict = after_look(Judge(0, HOSTS, 0.0), 16.0)
        assert verdict is not None
        assert "ranks 1 (host lab1), 2 (host lab2) of 3" in verdict.message


class TestStandstill:
    @pytest.mark.parametrize(
        ("late", "why"),
        [
            (place(16, 67, COLLECTIVE), "a lower step"),
            (place(17, 69, WAITING), "an earlier phase"),
            (place(17, 70, COMPUTING), "an earlier phase"),
            (place(17, 68, "in an action"), "Python code before the next step"),
        ],
    )
    def test_the_one_behind_is_named_and_not_those_that_wait_for_it(self, late: Place, why: str) -> None:
        judge = Judge(0, HOSTS, 0.0, stall=600)
        for now in (0.0, 599.0, 601.0):
            waiting = place(17, 71, COLLECTIVE, seconds=now)
            all_beat(judge, now, waiting, dataclasses.replace(late, seconds=now), waiting)
            judge.look(now)
            assert (judge.verdict is None) == (now < 600), why
        assert judge.verdict is not None
        assert (judge.verdict.kind, judge.verdict.rank, judge.verdict.code) == ("stalled", 1, Stalled.exit_code)
        assert judge.verdict.message == (
            f"rank 1 of 3 (host lab1) has not moved on for 600 s (stall_timeout) after step {late.step} "
            f"({late.phase}); others wait."
        )

    def test_those_that_wait_may_wait_while_the_one_behind_moves(self) -> None:
        judge = Judge(0, HOSTS, 0.0, stall=10)
        waiting = place(17, 71, COLLECTIVE, seconds=1000)
        all_beat(judge, 1.0, waiting, place(17, 70, seconds=3), waiting)
        assert after_look(judge, 1.0) is None

    def test_one_that_says_nothing_is_silent_and_does_not_stand_still(self) -> None:
        judge = Judge(0, HOSTS[:2], 0.0, silence=5, stall=5)
        judge.beat(1, place(17, 70, seconds=0.4), 1.0)
        for now in (5.5, 6.1):
            judge.beat(0, place(17, 71, COLLECTIVE, seconds=now - 1), now)
            judge.look(now)
        assert judge.verdict is not None
        assert judge.verdict.kind == "silent"

    def test_where_none_is_behind_none_is_named(self) -> None:
        judge = Judge(0, HOSTS, 0.0, stall=10)
        all_beat(judge, 1.0, *[place(17, 71, COLLECTIVE, seconds=11)] * 3)
        verdict = after_look(judge, 1.0)
        assert verdict is not None
        assert verdict.message == (
            "no rank has moved on for 10 s (stall_timeout) after step 17 (in the collective), and none is behind the "
            "others."
        )

    def test_the_time_goes_on_between_beats(self) -> None:
        judge = Judge(0, HOSTS[:1], 0.0, stall=10)
        judge.beat(0, place(3, 13, WAITING, seconds=9), 100.0)
        assert after_look(judge, 100.9) is None
        verdict = after_look(judge, 101.1)
        assert verdict is not None
        assert (
            verdict.message
            == "this process has not moved on for 10 s (stall_timeout) after step 3 (waiting for input)."
        )

    def test_before_the_first_step_it_has_time(self) -> None:
        judge = Judge(0, HOSTS[:1], 0.0, stall=10)
        judge.beat(0, Place(seconds=1000), 1000.0)
        assert after_look(judge, 1000.0) is None

    def test_it_may_be_switched_off(self) -> None:
        judge = Judge(0, HOSTS[:1], 0.0)
        judge.beat(0, place(3, 13, seconds=1e6), 1.0)
        assert after_look(judge, 1.0) is None


def test_names_and_places_of_ranks() -> None:
    assert named([1], HOSTS) == "rank 1 of 3 (host lab1)"
    places = {0: place(18, 75, COLLECTIVE, 9.25), 1: place(18, 73, WAITING, 12.0)}
    assert behind(places) == [1]
    assert table(places, HOSTS).splitlines() == [
        "rank  host  step  seconds  phase",
        "0     lab0  18    9.2      in the collective",
        "1     lab1  18    12.0     waiting for input",
    ]
