"""Mistakes that a die picks: operators and constants swapped at random places.

In:  sources by path, a seed, how many. Out: mutants at distinct lines, the same for the same seed
     and sources; each module gets a share of them by its number of places.
Swaps: comparison for its neighbour or opposite, + for -, * for +, // for a rounding up, an int for
one more or one less, and for or, `not` and `~` dropped, min for max (clamp_min, minimum and amin
too), any for all, True for False.
Left out, because no test is meant to see them: messages (whatever a raise statement holds),
annotations, decorators, `label=` and `repr=` arguments, __all__ and names of labels.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from tools.mutation.mutant import Mutant, MutantError

COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">="), ast.LtE: ("<", ">"), ast.Gt: (">=", "<="), ast.GtE: (">", "<"),
    ast.Eq: ("!=",), ast.NotEq: ("==",), ast.Is: ("is not",), ast.IsNot: ("is",),
    ast.In: ("not in",), ast.NotIn: ("in",),
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "//",
}  # fmt: skip
TWINS = {
    "min": "max", "max": "min", "any": "all", "all": "any", "clamp_min": "clamp_max",
    "clamp_max": "clamp_min", "minimum": "maximum", "maximum": "minimum", "amin": "amax",
    "amax": "amin",
}  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A swap that can be made: ``before`` at ``start`` for ``after``."""

    kind: str
    start: int
    before: str
    after: str


class _Source:
    """Text with the offsets of its lines, to find a node's own text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._lines = text.splitlines()

    def at(self, line: int, column: int) -> int:
        """Character offset of a position as ast gives it (the column in UTF-8 bytes)."""
        head = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(head)

    def span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self.at(node.lineno, node.col_offset),
            self.at(node.end_lineno, node.end_col_offset),
        )

    def line(self, offset: int) -> int:
        return self.text.count("\n", 0, offset) + 1


def _mutable(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all below it that tests are meant to see."""
    match node:
        case ast.Raise() | ast.Assert() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return
        case (
            ast.keyword(arg="label" | "repr")
            | ast.Subscript(value=ast.Name(id="dict" | "tuple" | "list"))
        ):
            return
        case ast.Assign(targets=[ast.Name(id=name)]) if name == "__all__" or name.endswith("label"):
            return
    yield node
    skipped = {"annotation", "returns", "decorator_list"}
    for name, value in ast.iter_fields(node):
        if name in skipped:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _mutable(child)


def _between(source: _Source, left: ast.expr, right: ast.expr, token: str) -> int | None:
    """Where the operator ``token`` stands between two operands; None if it is not alone there."""
    start, stop = source.span(left)[1], source.span(right)[0]
    gap = source.text[start:stop]
    return start + gap.index(token) if gap.count(token) == 1 and "#" not in gap else None


TOKENS: dict[type[ast.AST], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+",
    ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%",
}  # fmt: skip


def _comparisons(node: ast.Compare, source: _Source) -> Iterator[Place]:
    operands = [node.left, *node.comparators]
    for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
        token = TOKENS[type(operator)]
        start = _between(source, left, right, token)
        if start is not None:
            for after in COMPARISONS[type(operator)]:
                yield Place(f"comparison {token} for {after}", start, token, after)


def _places(node: ast.AST, source: _Source) -> Iterator[Place]:
    match node:
        case ast.Compare():
            yield from _comparisons(node, source)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in ARITHMETIC:
            token = TOKENS[type(operator)]
            start = _between(source, left, right, token)
            if start is not None:
                after = ARITHMETIC[type(operator)]
                yield Place(f"arithmetic {token} for {after}", start, token, after)
        case ast.BoolOp(op=operator, values=values):
            first, last = source.span(values[0])[0], source.span(values[-1])[1]
            parts = [source.text[slice(*source.span(value))] for value in values]
            before, after = ("and", "or") if isinstance(operator, ast.And) else ("or", "and")
            joined = "(" + f" {after} ".join(f"({part})" for part in parts) + ")"
            # Operands in brackets end before their bracket: then the text is not that of the node.
            if source.text[first:last].count("(") == source.text[first:last].count(")"):
                yield Place(f"{before} for {after}", first, source.text[first:last], joined)
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            start, stop = source.span(node)
            inner = source.text[slice(*source.span(operand))]
            yield Place("negation dropped", start, source.text[start:stop], f"({inner})")
        case ast.Constant(value=bool() as value):
            start = source.span(node)[0]
            yield Place(f"{value} for {not value}", start, str(value), str(not value))
        case ast.Constant(value=int() as value):
            start, stop = source.span(node)
            for other in (value + 1, value - 1):
                before = source.text[start:stop]
                yield Place(f"constant {before} for {other}", start, before, f"({other})")
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in TWINS:
            stop = source.span(node)[1]
            yield Place(f"{name} for {TWINS[name]}", stop - len(name), name, TWINS[name])


def places(text: str) -> list[Place]:
    """All places of a module where one of the swaps can be made."""
    source = _Source(text)
    return [
        place
        for outer in ast.parse(text).body
        for node in _mutable(outer)
        for place in _places(node, source)
    ]


def generate(
    sources: Mapping[str, str], tests: Mapping[str, tuple[str, ...]], seed: int, count: int
) -> list[Mutant]:
    """``count`` mutants at distinct lines, in the order of the die; fewer if there are no more.

    The die is thrown for each place by its own line, so that an edit elsewhere moves no other one.
    """
    thrown = sorted(
        (_throw(seed, path, sources[path], place), path, place)
        for path in sources
        for place in places(sources[path])
    )
    made: list[Mutant] = []
    taken: set[tuple[str, int]] = set()
    for _, path, place in thrown:
        source = sources[path]
        line = source.count("\n", 0, place.start) + 1
        if len(made) == count or (path, line) in taken:
            continue
        stem = path.rsplit("/", 1)[-1].removesuffix(".py")
        name = f"{stem}:{line}:{place.start - source.rfind(chr(10), 0, place.start)}"
        edit = (place.start, place.before, place.after)
        mutant = Mutant(name, place.kind, path, line, *edit, tests[path])
        try:
            mutant.apply(source)
        except MutantError:
            continue  # the swap does not parse here
        taken.add((path, line))
        made.append(mutant)
    return made


def _throw(seed: int, path: str, source: str, place: Place) -> bytes:
    """What decides the order: a hash of the seed, the file, the line without its indent, the swap.

    Equal lines of a file differ by how many of them came before.
    """
    begin = source.rfind("\n", 0, place.start) + 1
    line = source[begin:].split("\n", 1)[0].strip()
    earlier = source[:begin].count(line)
    column = place.start - source.index(line, begin)
    key = repr((seed, path, line, earlier, column, place.before, place.after))
    return blake2b(key.encode(), digest_size=16).digest()
