"""The size gate passes what is within bounds and fails what is just past each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import size


def found(source: str, name: str = "src/gnomon/geometry.py") -> list[str]:
    return size.breaches(Path(name), source)


def function(num_lines: int, *, decorator: str = "", signature: str = "f()") -> str:
    return f"{decorator}def {signature}:\n" + "    x = 1\n" * (num_lines - 1)


def test_file_length():
    assert found("x = 1\n" * 300) == []
    assert found("x = 1\n" * 301) == [
        "src/gnomon/geometry.py:301: 301 lines (at most 300): split it"
    ]


def test_function_length():
    assert found(function(50)) == []
    assert "f has 51 lines" in found(function(51))[0]
    nested = "class A:\n    def g(self):\n        async def h():\n" + "            x = 1\n" * 50
    assert sum("has 5" in breach for breach in found(nested)) == 2


@pytest.mark.parametrize(
    ("signature", "is_within"),
    [
        ("f(a, b, c, d, e, f, g)", True),
        ("f(a, b, c, d, e, f, g, h)", False),
        ("f(a, b, /, c, d, *, e, f, g, h)", False),
        ("f(a, b, c, d, e, f, *g, **h)", False),
    ],
)
def test_parameter_count(signature: str, is_within: bool):
    assert (found(function(2, signature=signature)) == []) is is_within


def test_bound_parameter_is_free_only_where_there_is_one():
    method = "class A:\n    {}def f(self, a, b, c, d, e, f, g):\n        pass\n"
    assert found(method.format("")) == []
    assert found(method.format("@classmethod\n    ")) == []
    assert "takes 8 parameters" in found(method.format("@staticmethod\n    "))[0]


@pytest.mark.parametrize("decorator", ["@triton.jit\n", "@jit\n", "@gluon.jit(debug=True)\n"])
def test_device_kernels_are_free_in_function_rules_alone(decorator: str):
    signature = "f(a, b, c, d, e, f, g, h)"
    assert found(function(51, decorator=decorator, signature=signature)) == []
    assert len(found(function(51, decorator="@cache\n", signature=signature))) == 2
    assert len(found(function(301, decorator=decorator))) == 1


def test_line_length_counts_characters():
    assert found(f'x = "{"×" * 94}"\n') == []
    assert "101 columns" in found(f'x = "{"×" * 95}"\n')[0]


@pytest.mark.parametrize("name", ["utils", "test_helpers", "common", "cache_manager", "misc"])
def test_empty_names(name: str):
    assert "says nothing" in found("", f"src/gnomon/{name}.py")[0]
    assert "says nothing" in found("", f"src/gnomon/{name}/__init__.py")[0]
    assert found("", "src/gnomon/commons_law.py") == []


def test_code_lines_leave_out_what_does_not_run():
    source = '"""Doc.\n\nMore.\n"""\n\n# why\nx = (\n    1,  # unit\n)\ny = """a\nb"""\n'
    assert size.num_code_lines(source) == 5


def test_table_adds_up_to_the_root():
    files = {
        Path("src/gnomon/a.py"): "x = 1\n",
        Path("src/gnomon/ops/b.py"): "x = 1\ny = 2\n",
        Path("src/gnomon/ops/deep/c.py"): "x = 1\n",
        Path("tests/unit/test_d.py"): "x = 1\n",
    }
    rows = [line.split() for line in size.size_table(files).splitlines()]
    assert rows[1:] == [["gnomon", "3", "4"], ["ops", "2", "3"], ["ops/deep", "1", "1"]]


def test_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "good.py").write_text("x = 1\n")
    assert size.main([str(tmp_path)]) == 0
    assert "1 files, all within bounds" in capsys.readouterr().out
    (tmp_path / "long.py").write_text("x = 1\n" * 301)
    assert size.main([str(tmp_path)]) == 1
    assert "long.py:301" in capsys.readouterr().out
