"""The mutation checker makes the swaps it says, refuses what does not fit, and sees a catch."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.mutation.__main__ import MISTAKES, is_enough
from tools.mutation.generate import generate, places
from tools.mutation.mutant import Mistake, MutantError, place
from tools.mutation.report import merged, names_done
from tools.mutation.selections import SELECTIONS

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''"""Docs say 1 + 2 < 3."""

__all__ = ["f"]
LIMIT: "int" = 4  # 5 + 6


def f(a: int, b: int = 0) -> "list[1]":
    """Not 7 - 8."""
    if not a < b and b != LIMIT:
        raise ValueError(f"{a} is not below {b + 9}")
    label = "step" * 3
    return make(min(a, b) // 2, label=a + 1, whole=True)
'''


def swaps(source: str) -> set[tuple[str, str]]:
    return {(found.before, found.after) for found in places(source)}


def test_each_kind_of_place_is_found_once_with_its_swaps() -> None:
    assert swaps(SOURCE) == {
        ("4", "(5)"), ("4", "(3)"), ("0", "(1)"), ("0", "(-1)"), ("2", "(3)"), ("2", "(1)"),
        ("<", "<="), ("<", ">="), ("!=", "=="), ("not a < b", "(a < b)"),
        ("not a < b and b != LIMIT", "((not a < b) or (b != LIMIT))"),
        ("min", "max"), ("//", "*"), ("True", "False"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = a - b", {("-", "+")}),
        ("x = a * b % c", {("*", "+"), ("%", "//")}),
        ("x = (a) + (b)", {("+", "-")}),
        ("x = a is None or b is not None", {
            ("is", "is not"), ("is not", "is"),
            ("a is None or b is not None", "((a is None) and (b is not None))"),
        }),
        ("x = a in b", {("in", "not in")}),
        ("x = ~a.any()", {("~a.any()", "(a.any())"), ("any", "all")}),
        ("x = a.clamp_min(b)", {("clamp_min", "clamp_max")}),
        ("x = 'é' * n", {("*", "+")}),
        ("assert a < b", set()),
    ],
)  # fmt: skip
def test_swaps_of_single_lines(line: str, expected: set[tuple[str, str]]) -> None:
    assert swaps(line) == expected


def test_generated_mutants_parse_differ_and_repeat() -> None:
    sources = {path: (ROOT / path).read_text("utf-8") for path in SELECTIONS}
    assert len(sources) >= 20
    first = generate(sources, SELECTIONS, seed=1, count=70)
    assert first == generate(sources, SELECTIONS, seed=1, count=70)
    assert {m.name for m in first} != {m.name for m in generate(sources, SELECTIONS, 2, 70)}
    assert len(first) == len({(m.path, m.line) for m in first}) == 70
    assert len({m.path for m in first}) > 10
    for mutant in first:
        changed = mutant.apply(sources[mutant.path])
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(sources[mutant.path]))
        assert changed.count("\n") - sources[mutant.path].count("\n") == (
            mutant.after.count("\n") - mutant.before.count("\n")
        )


def test_an_edit_elsewhere_moves_no_other_mutant() -> None:
    tests = {"m.py": ("t",)}
    before = generate({"m.py": SOURCE}, tests, seed=5, count=4)
    after = generate({"m.py": SOURCE + "\n\n# a comment\n"}, tests, seed=5, count=4)
    assert [m.name for m in before] == [m.name for m in after]
    below = generate({"m.py": "# first\n" + SOURCE}, tests, seed=5, count=4)
    assert [(m.line + 1, m.after) for m in before] == [(m.line, m.after) for m in below]


@pytest.mark.parametrize(
    ("snippet", "instead", "message"),
    [
        ("a < c", "a > c", "is not found in m.py; write it anew"),
        ("b", "c", r"is found \d+ times in m.py"),
        ("a < b", "a <", "does not parse"),
    ],
)
def test_a_mistake_that_does_not_fit_is_an_error(snippet: str, instead: str, message: str) -> None:
    mistake = Mistake("wrong", "kind", "m.py", snippet, instead, ("t",))
    with pytest.raises(MutantError, match=message):
        place(mistake, SOURCE).apply(SOURCE)
    good = place(Mistake("right", "kind", "m.py", "a < b", "a > b", ("t",)), SOURCE)
    assert (good.line, good.apply(SOURCE).count("not a > b")) == (9, 1)
    with pytest.raises(MutantError, match="where the mutant replaces"):
        good.apply("#" + SOURCE)


def test_the_mistakes_are_many_named_apart_and_have_tests() -> None:
    assert len(MISTAKES) >= 40
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)
    for mistake in MISTAKES:
        assert mistake.snippet != mistake.instead
        source = (ROOT / mistake.path).read_text(encoding="utf-8")
        assert place(mistake, source).apply(source) != source
        assert mistake.tests
    every = {test for m in MISTAKES for test in m.tests} | {
        test for tests in SELECTIONS.values() for test in tests
    }
    for test in every:
        assert (ROOT / test.split("::")[0]).is_file(), test


def counts(made: int, caught: int, equivalent: int = 0) -> dict[str, float | int | None]:
    real = made - equivalent
    return {
        "made": made, "caught": caught, "equivalent": equivalent,
        "share_caught": caught / real if real else None,
    }  # fmt: skip


def test_all_by_hand_and_nine_of_ten_generated_are_enough() -> None:
    assert is_enough({"hand": counts(40, 40), "generated": counts(60, 54)})
    assert is_enough({"hand": counts(40, 40), "generated": counts(0, 0)})
    assert not is_enough({"hand": counts(40, 39), "generated": counts(60, 60)})
    assert not is_enough({"hand": counts(40, 40), "generated": counts(60, 53)})


def row(name: str, verdict: str) -> dict[str, str | float]:
    return {"name": name, "verdict": verdict, "cpu_s": 1.5}


def test_a_second_run_takes_up_what_the_first_left() -> None:
    head = {"command": "python -m tools.mutation", "commit": "abc"}
    found = {"hand": [row("a", "caught"), row("b", "SURVIVED")],
             "generated": [row("c", "equivalent"), row("d", "UNSETTLED")]}  # fmt: skip
    first = merged(head, found, {"t": 1.234}, None)
    assert first["hand"]["share_caught"] == 0.5
    assert (first["generated"]["made"], first["generated"]["share_caught"]) == (2, 0.0)
    assert names_done(first) == {"a", "c"}
    again = {"hand": [row("b", "caught (loops)")], "generated": [row("d", "caught")]}
    second = merged(head | {"commit": "def"}, again, {"u": 2.0}, first)
    assert [one["name"] for one in second["hand_mutants"]] == ["a", "b"]
    assert (second["hand"]["caught"], second["generated"]["caught"]) == (2, 1)
    assert second["generated"]["share_caught"] == 1.0
    assert (second["commit"], second["before"]) == ("def", [head])
    assert second["selections_cpu_s"] == {"t": 1.23, "u": 2.0}


RUN = """
import json, sys
from pathlib import Path
from tools.mutation import nest, trial
from tools.mutation.mutant import Mistake, place
trial.LOOPS_FROM_S = 2.0
tree = trial.Tree(Path(sys.argv[1]), Path(sys.argv[2]), None)
source = tree.read("src/gnomon/__init__.py")
found = {}
for name, instead in (("same", "n +  1"), ("wrong", "n + 2"), ("endless", "endless()"),
                      ("broken", "n + 1\\nimport nowhere_at_all")):
    mistake = Mistake(name, "", "src/gnomon/__init__.py", "n + 1", instead, ("tests/test_a.py",))
    verdict = tree.try_mutant(place(mistake, source), 0.5)
    found[name] = (str(verdict.outcome.ending), verdict.is_caught, verdict.outcome.test)
    assert tree.read("src/gnomon/__init__.py") == source
print(json.dumps(found))
"""


def test_forks_tell_a_catch_from_a_survivor(tmp_path: Path) -> None:
    """A package of one function in a folder of its own, in a process without torch."""
    (tmp_path / "a/src/gnomon").mkdir(parents=True)
    (tmp_path / "a/tests").mkdir()
    (tmp_path / "a/pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tmp_path / "a/src/gnomon/__init__.py").write_text(
        "def endless():\n    while True:\n        pass\n\n\ndef f(n):\n    return n + 1\n"
    )
    (tmp_path / "a/tests/test_a.py").write_text(
        "from gnomon import f\n\n\ndef test_first():\n    pass\n\n\n"
        "def test_f():\n    assert f(1) == 2\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "a"), str(tmp_path / "b")],
        cwd=ROOT, check=True, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["same"] == ["passed", False, ""]
    assert found["wrong"] == ["failed", True, "tests/test_a.py::test_f"]
    assert found["endless"] == ["looped", True, "tests/test_a.py::test_f"]
    assert found["broken"][:2] == ["failed", True]
    assert "import" in found["broken"][2]
