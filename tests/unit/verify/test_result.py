"""Verdicts: what passes, what fails, how many ties are too many."""

from __future__ import annotations

import json

from gnomon.verify.result import LawResult, Tally, Verdict


def result(tally: Tally) -> LawResult:
    return tally.result("law", "a = b", 1.5)


def tally_of(cases: int, ties: int = 0) -> Tally:
    tally = Tally()
    for number in range(cases):
        tally.add(1e-6 * number, is_tie=number < ties)
    return tally


def test_pass() -> None:
    found = result(tally_of(3))
    assert (found.verdict, found.cases, found.worst) == (Verdict.PASS, 3, 2e-6)


def test_no_case_is_no_proof() -> None:
    assert result(Tally()).verdict is Verdict.FAIL


def test_one_failure_fails() -> None:
    tally = tally_of(500)
    tally.add(failure="this one")
    assert result(tally).verdict is Verdict.FAIL
    assert result(tally).failures == ("this one",)


def test_what_was_not_put_to_the_test_fails() -> None:
    tally = tally_of(3)
    tally.require(True, "never said")
    assert result(tally).verdict is Verdict.PASS
    tally.require(False, "nothing happened")
    assert result(tally).failures == ("nothing happened",)


def test_ties_up_to_two_percent() -> None:
    assert result(tally_of(100, 2)).verdict is Verdict.PASS
    assert result(tally_of(100, 3)).verdict is Verdict.FAIL
    assert result(tally_of(10, 1)).verdict is Verdict.PASS
    assert result(tally_of(10, 2)).verdict is Verdict.FAIL


def test_choice_ties_up_to_one_in_ten_thousand() -> None:
    for num_choices, num_ties, verdict in (
        (30_000, 3, Verdict.PASS),
        (30_000, 4, Verdict.FAIL),
        (100, 1, Verdict.PASS),
        (100, 2, Verdict.FAIL),
    ):
        tally = tally_of(1)
        tally.add_choices(num_choices, num_ties)
        assert result(tally).verdict is verdict


def test_only_a_few_failures_are_shown_but_all_are_counted() -> None:
    tally = Tally()
    for number in range(20):
        tally.add(failure=f"failure {number}")
    found = result(tally)
    assert found.num_failures == 20
    assert found.failures[-1] == "failure 4"


def test_notes_are_said_once() -> None:
    tally = tally_of(1)
    tally.note("a")
    tally.note("b")
    tally.note("a")
    assert result(tally).detail == "a; b"


def test_json() -> None:
    values = json.loads(json.dumps(result(tally_of(2)).as_json()))
    assert values["verdict"] == "pass"
    assert values["cases"] == 2
