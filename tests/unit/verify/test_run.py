"""Running laws: exit statuses, laws that raise, laws that cannot run, names, reports."""

from __future__ import annotations

import json

import pytest

from gnomon.errors import ConfigError, GeometryError
from gnomon.verify import oracle
from gnomon.verify import run as run_module
from gnomon.verify.context import Context
from gnomon.verify.law import Law
from gnomon.verify.laws import LAWS, choose_laws
from gnomon.verify.laws.reference import _slow_arm
from gnomon.verify.result import NotRunError, Tally, Verdict
from gnomon.verify.run import run_law, run_laws
from gnomon.verify.settings import VerifySettings

SETTINGS = VerifySettings.of(model="random:deepseek_v32,layers=2", laws="text")


def passing(context: Context) -> Tally:
    tally = Tally()
    context.step(1, 2)
    tally.add(1e-7)
    return tally


def failing(context: Context) -> Tally:
    tally = Tally()
    tally.add(failure="no")
    return tally


def raising(context: Context) -> Tally:
    raise GeometryError("rows of another axis")


def impossible(context: Context) -> Tally:
    raise NotRunError("no sun today")


def run(monkeypatch: pytest.MonkeyPatch, *tests: object) -> run_module.Report:
    laws = tuple(Law(f"law{i}", f"sentence {i}", test) for i, test in enumerate(tests))
    monkeypatch.setattr(run_module, "choose_laws", lambda names: laws)
    return run_laws(SETTINGS)


@pytest.mark.parametrize(
    ("tests", "status", "verdict"),
    [
        ((passing, passing), 0, "pass"),
        ((passing, failing), 1, "FAIL"),
        ((raising, passing), 1, "FAIL"),
        ((impossible, passing), 3, "incomplete"),
        ((impossible, failing), 1, "FAIL"),
    ],
)
def test_exit_status(
    tests: tuple[object, ...], status: int, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = run(monkeypatch, *tests)
    assert report.exit_status == status
    assert report.as_json()["verdict"] == verdict


def test_a_law_that_raises_has_failed_and_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = run(monkeypatch, raising, passing).results
    assert first.failures == ("GeometryError: rows of another axis",)
    assert second.verdict is Verdict.PASS


def test_a_law_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    (result,) = run(monkeypatch, impossible).results
    assert (result.verdict, result.detail) == (Verdict.NOT_RUN, "no sun today")


def test_report_holds_what_a_reader_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    values = json.loads(json.dumps(run(monkeypatch, passing).as_json()))
    assert values["model"] == "random:deepseek_v32,layers=2"
    assert values["settings"]["seed"] == 0
    assert values["versions"]["torch"]
    assert values["machine"]["cpu"]
    assert values["date"].endswith("+00:00")
    assert values["laws"][0]["sentence"] == "sentence 0"


def test_progress_is_told_by_law(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []
    context = Context(SETTINGS, lambda *report: seen.append(report))
    run_law(Law("sun", "s", passing), context)
    assert seen == [("sun", 0, 1), ("sun", 1, 2)]


def test_laws_by_name_in_their_own_order() -> None:
    assert choose_laws(None) == LAWS
    assert [law.name for law in choose_laws("text, operators")] == ["operators", "text"]
    assert len({law.name for law in LAWS}) == len(LAWS)


@pytest.mark.parametrize(
    ("names", "message"),
    [("prefixs", "Did you mean 'prefixes'"), ("zzz", "Known: operators"), (" , ", "at least one")],
)
def test_unknown_laws_are_refused(names: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_laws(names)


def test_a_wrong_model_is_refused_before_the_first_law() -> None:
    with pytest.raises(ConfigError, match="no family"):
        run_laws(VerifySettings.of(model="random:deepseek_v23"))


def test_without_transformers_its_laws_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "find_spec", lambda name: None)
    settings = VerifySettings.of(model="random:deepseek_v32,layers=2", prompts=1, max_length=5)
    context = Context(settings)
    for law in LAWS:
        if law.name.startswith("transformers_"):
            result = run_law(law, context)
            assert result.verdict is Verdict.NOT_RUN
            assert "pip install 'gnomon[dev]'" in result.detail


def test_short_prompts_are_named_as_no_test_of_selection() -> None:
    settings = VerifySettings.of(
        model="random:glm_moe_dsa,layers=2", prompts=2, max_length=9, max_tokens=2
    )
    (law,) = choose_laws("transformers_logits")
    result = run_law(law, Context(settings))
    assert "selection is not tested: raise --max-length" in result.detail
    assert "latent_norm_eps = 1e-6" in result.detail
    (law,) = choose_laws("own_width")
    assert run_law(law, Context(settings)).verdict is Verdict.NOT_RUN


def test_the_reference_arm_is_the_reference_whatever_serves_the_engine() -> None:
    backends = dict.fromkeys(("prefill_backend", "decode_backend", "index_backend"), "torch")
    context = Context(VerifySettings.of(model="random:deepseek_v32,layers=2", **backends))
    choices = context.survey(_slow_arm(context)).choices
    assert {choice.provider.name for choice in choices} == {"reference"}


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="least_cases is 7, but every law runs once"):
        VerifySettings.of(least_cases=7)
    with pytest.raises(ConfigError, match="prompts is 0"):
        VerifySettings.of(prompts=0)
    with pytest.raises(ConfigError, match="Did you mean 'max_length'"):
        VerifySettings.of(max_lenght=3)
    assert VerifySettings.of(prompts=300).sizes.engine_prompts == 60
    assert VerifySettings.of(prompts=10).sizes.engine_prompts == 8
