"""Laws in rounds, under a clock that the test turns: who runs when, and what is said when it ends.

Each law of these tests takes a stated number of seconds a round and brings a stated number of
cases, so that the rounds that fit can be counted by hand.
"""

from __future__ import annotations

import pytest

from gnomon.errors import GeometryError
from gnomon.verify import run as run_module
from gnomon.verify.budget import TimeBudget
from gnomon.verify.context import Context
from gnomon.verify.law import Law
from gnomon.verify.result import LawResult, NotApplicableError, Tally, Verdict
from gnomon.verify.rounds import run_rounds
from gnomon.verify.run import run_laws
from gnomon.verify.settings import IN_ROUNDS, LEAST_CASES, VerifySettings

MODEL = "random:deepseek_v32,layers=2"


class Watch:
    """A clock, and laws that make it go on."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.seeds: dict[str, list[int]] = {}

    def clock(self) -> float:
        return self.seconds

    def law(self, name: str, seconds: float, cases: int, fails_in: int = -1) -> Law:
        def test(context: Context) -> Tally:
            seeds = self.seeds.setdefault(name, [])
            seeds.append(context.settings.seed)
            tally = context.tally()
            for case in range(cases):
                self.seconds += seconds / cases
                context.step(case, cases)
                tally.add(1e-7 * len(seeds), failure="dark" if len(seeds) == fails_in else None)
            tally.count("shadows", cases)
            return tally

        return Law(name, f"sentence of {name}", test)

    def run(self, minutes: float, *laws: Law, seed: int = 0) -> dict[str, LawResult]:
        settings = VerifySettings.of(model=MODEL, minutes=minutes, seed=seed)
        context = Context(settings, budget=TimeBudget(minutes, self.clock))
        return {result.law: result for result in run_rounds(laws, context)}


def test_short_laws_are_topped_up_before_others_run_again() -> None:
    watch = Watch()
    # 10 + 10 s, then 2 more rounds of "few" for 24 cases, then rounds of both until 99 s.
    found = watch.run(99 / 60, watch.law("many", 10, 25), watch.law("few", 10, 8))
    assert watch.seeds == {"many": [0, 3, 4, 5], "few": [0, 1, 2, 3, 4]}
    assert found["many"].cases == 100
    assert found["few"].cases == 40
    assert found["few"].rounds == 5
    assert found["few"].detail == "40 shadows"
    assert found["few"].worst == pytest.approx(5e-7)
    assert {result.verdict for result in found.values()} == {Verdict.PASS}


def test_a_round_that_would_not_end_in_time_is_not_begun() -> None:
    watch = Watch()
    found = watch.run(60 / 60, watch.law("slow", 40, LEAST_CASES), watch.law("quick", 5, 20))
    assert (found["slow"].rounds, found["quick"].rounds) == (1, 3)
    assert found["slow"].verdict is Verdict.PASS


def test_time_that_is_up_too_early_is_no_pass() -> None:
    watch = Watch()
    found = watch.run(30 / 60, watch.law("long", 40, 20), watch.law("never", 1, 50))
    assert found["long"].verdict is Verdict.TOO_FEW
    assert found["long"].cases == 14  # the step after the 15th says that time is up
    assert found["never"].verdict is Verdict.TOO_FEW
    assert found["never"].cases == 0
    assert "time was up after 0 cases" in found["never"].detail


def test_enough_cases_of_no_whole_round_are_too_few() -> None:
    """What a law demands of its whole round was not asked."""
    watch = Watch()
    found = watch.run(30 / 60, watch.law("long", 60, 100))
    assert found["long"].cases > LEAST_CASES
    assert found["long"].verdict is Verdict.TOO_FEW


def test_a_failure_of_a_later_round_names_its_seed_and_ends_the_law() -> None:
    watch = Watch()
    found = watch.run(100 / 60, watch.law("law", 10, 25, fails_in=3), seed=7)
    assert watch.seeds["law"] == [7, 8, 9]
    assert found["law"].verdict is Verdict.FAIL
    assert found["law"].failures[0] == "with --seed 9: dark"


def test_a_failure_counts_though_time_is_up() -> None:
    watch = Watch()
    found = watch.run(30 / 60, watch.law("law", 60, 20, fails_in=1))
    assert found["law"].verdict is Verdict.FAIL


def test_laws_that_raise_or_do_not_apply_are_not_run_again() -> None:
    calls: list[str] = []

    def absent(context: Context) -> Tally:
        calls.append("absent")
        raise NotApplicableError("no fp8 in transformers")

    def raising(context: Context) -> Tally:
        calls.append("raising")
        context.tally().add(1e-6)
        raise GeometryError("rows of another axis")

    watch = Watch()
    laws = (Law("absent", "a", absent), Law("raising", "r", raising), watch.law("law", 10, 20))
    found = watch.run(65 / 60, *laws)
    assert calls == ["absent", "raising"]
    assert found["absent"].verdict is Verdict.NOT_APPLICABLE
    assert found["raising"].failures == ("GeometryError: rows of another axis",)
    assert found["law"].rounds == 6


def test_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    laws = [watch.law("long", 40, 20)]
    monkeypatch.setattr(run_module, "choose_laws", lambda names: laws)
    notices: list[tuple[int, float]] = []
    settings = VerifySettings.of(model=MODEL, minutes=0.5)
    report = run_laws(settings, None, lambda *notice: notices.append(notice), watch.clock)
    assert report.exit_status == 3
    assert report.as_json()["verdict"] == "incomplete"
    assert notices[0] == (1, 30.0)


def test_only_laws_that_do_not_apply_are_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(context: Context) -> Tally:
        raise NotApplicableError("no fp8 in transformers")

    watch = Watch()
    law = Law("absent", "a", absent)
    for laws, status in (((law,), 3), ((law, watch.law("law", 1, 1)), 0)):
        monkeypatch.setattr(run_module, "choose_laws", lambda names, laws=laws: laws)
        assert run_laws(VerifySettings.of(model=MODEL)).exit_status == status


def test_sizes_depend_on_the_way() -> None:
    assert VerifySettings.of(minutes=5.0).sizes == IN_ROUNDS
    assert VerifySettings.of(minutes=5.0, max_length=77).sizes.max_length == 77
    assert VerifySettings.of().sizes.prompts == 40
