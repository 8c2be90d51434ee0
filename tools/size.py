"""The size gate: small files, small functions, few parameters, short lines, honest names.

In:  Python files of the folders given on the command line (default: the whole tree's sources).
Out: a table of code lines per package of src/gnomon, then every breach as `file:line: what`;
     exit code 1 if there is one.
Rules: a file has at most 300 lines, a function 50 (docstring included), a function 7 parameters
(self and cls not counted), a line 100 columns. Device kernels (functions under a `jit` decorator)
are exempt from the rules on functions, not from the other two. Module names that say nothing
(utils, helpers, common, misc, manager) are refused. A code line is one that holds code: comments,
docstrings and blank lines are free.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 50
MAX_PARAMETERS = 7
MAX_COLUMNS = 100
EMPTY_NAMES = frozenset(
    {"util", "utils", "helper", "helpers", "common", "misc", "manager", "managers"}
)
FOLDERS = ("src", "tests", "tools", "bench", "examples")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def is_kernel(node: FunctionNode) -> bool:
    """Whether a decorator is called `jit`, as in @triton.jit, @gluon.jit or @jit(...)."""
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
        if name == "jit":
            return True
    return False


def num_parameters(node: FunctionNode, is_method: bool) -> int:
    """Parameters of every kind, *args and **kwargs too, without the bound first one."""
    arguments = node.args
    count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
    count += (arguments.vararg is not None) + (arguments.kwarg is not None)
    is_static = any(getattr(d, "id", "") == "staticmethod" for d in node.decorator_list)
    return count - 1 if is_method and not is_static else count


def functions(tree: ast.AST) -> Iterator[tuple[FunctionNode, bool]]:
    """Each function of a module, nested ones too, with whether it is a method."""
    for parent in ast.walk(tree):
        for child in ast.iter_child_nodes(parent):
            if isinstance(child, FunctionNode):
                yield child, isinstance(parent, ast.ClassDef)


def function_breaches(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) for every function that is too long or takes too much."""
    for node, is_method in functions(tree):
        if is_kernel(node):
            continue
        num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if num_lines > MAX_FUNCTION_LINES:
            yield node.lineno, f"{node.name} has {num_lines} lines (at most {MAX_FUNCTION_LINES})"
        count = num_parameters(node, is_method)
        if count > MAX_PARAMETERS:
            yield node.lineno, f"{node.name} takes {count} parameters (at most {MAX_PARAMETERS})"


def breaches(path: Path, source: str) -> list[str]:
    """Every breach in one file, as `file:line: what`."""
    found: list[tuple[int, str]] = []
    for part in (path.parent.name, path.stem):
        if EMPTY_NAMES & set(part.lower().split("_")):
            found.append((1, f"the name {part!r} says nothing: name what is in it"))
    lines = source.splitlines()
    if len(lines) > MAX_FILE_LINES:
        found.append((len(lines), f"{len(lines)} lines (at most {MAX_FILE_LINES}): split it"))
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_COLUMNS:
            found.append((number, f"{len(line)} columns (at most {MAX_COLUMNS})"))
    found.extend(function_breaches(ast.parse(source)))
    return [f"{path}:{number}: {what}" for number, what in sorted(found)]


def num_code_lines(source: str) -> int:
    """Lines that hold code: no comment, no blank line, no docstring or other bare string."""
    silent = {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENDMARKER,
    }  # fmt: skip
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in silent
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


def size_table(files: dict[Path, str]) -> str:
    """Files and code lines per package of src/gnomon, each package with all below it."""
    rows: dict[str, tuple[int, int]] = {}
    for path, source in files.items():
        if path.parts[:2] != ("src", "gnomon"):
            continue
        inner = path.parts[2:-1]
        count = num_code_lines(source)
        for name in ("/".join(inner[:depth]) for depth in range(len(inner) + 1)):
            num_files, num_lines = rows.get(name, (0, 0))
            rows[name] = (num_files + 1, num_lines + count)
    table = [f"{'package':<40}{'files':>7}{'code lines':>12}"]
    for name, (num_files, num_lines) in sorted(rows.items()):
        label = "  " * (name.count("/") + 1) + name if name else "gnomon"
        table.append(f"{label:<40}{num_files:>7}{num_lines:>12}")
    return "\n".join(table)


def main(folders: list[str]) -> int:
    """Print the table and the breaches; 0 if there is none, else 1."""
    paths = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    files = {path: path.read_text(encoding="utf-8") for path in paths}
    print(size_table(files))
    found = [breach for path, source in files.items() for breach in breaches(path, source)]
    print("\n".join(found) if found else f"size gate: {len(files)} files, all within bounds")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(FOLDERS)))
