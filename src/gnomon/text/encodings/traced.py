"""Text that remembers, through a template, which of its characters a user wrote.

In:  strings of a request, before a template sees them; the rendered text after it.
Out: segments: a control token counts only where all its characters are the template's own.
How: every character that occurs in the spelling of a control token is written, in a user's text,
     as a lone surrogate. No valid text holds one, so the template's characters and the user's are
     told apart by what they are, whatever was cut, joined, repeated or put in order in between;
     nothing has to be tracked. Characters that no control token has stay themselves.
     `Traced` is a str of such characters that behaves as if they were the real ones: it compares,
     searches, splits and strips by the real text and gives Traced pieces back.
Fails closed: an operation that does not know Traced works on the marked characters. The worst
     that can happen is that a user's text is compared wrongly, never that it becomes a token.
Limits: it defends an honest template against hostile messages. A template that decodes or
     assembles characters by number could undo the marks; a template is as trusted as weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Self, SupportsIndex, cast

from gnomon.errors import CheckpointError
from gnomon.text.segments import PromptBuilder

_FIRST_MARK = 0xD800
_NUM_MARKS = 0x7F0
CUT_MARK = "\udfff"
"""A mark that stands for no character: where a continued message ends."""


def _reads(name: str) -> Callable[..., Any]:
    """A method that only answers a question about the text."""

    def method(self: Any, *args: Any) -> Any:
        return getattr(self._real(), name)(*(plain(argument) for argument in args))

    return method


def _rewrites(name: str) -> Callable[..., Any]:
    """A method that makes new characters; all of them count as the user's."""

    def method(self: Any, *args: Any) -> Any:
        return self._of_user(getattr(self._real(), name)(*args))

    return method


class Traced(str):
    """A str whose buffer holds marks. Made by `traced_type`, which knows the marks."""

    _mark: ClassVar[dict[int, int]] = {}
    _unmark: ClassVar[dict[int, int]] = {}
    __slots__ = ("_cached",)
    _cached: str

    @classmethod
    def _of_user(cls, text: str) -> Self:
        """All of a plain text as the user's."""
        return cls(text.translate(cls._mark))

    def _real(self) -> str:
        """The text as it would be without marks: of the same length, place by place."""
        try:
            return self._cached
        except AttributeError:
            self._cached = str.__str__(self).translate(self._unmark)
            return self._cached

    def _piece(self, start: int, stop: int) -> Self:
        return type(self)(str.__getitem__(self, slice(start, stop)))

    def _pieces(self, parts: Iterable[str], gap: int | None) -> list[Self]:
        """Parts of the real text in order, `gap` characters apart; None: apart by white space."""
        pieces = []
        place = 0
        for part in parts:
            if gap is None:
                place = self._real().index(part, place)
            pieces.append(self._piece(place, place + len(part)))
            place += len(part) + (gap or 0)
        return pieces

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return self._of_user(repr(self._real()))

    def __hash__(self) -> int:
        return hash(self._real())

    def __eq__(self, other: object) -> bool:
        return bool(self._real() == plain(other))

    def __ne__(self, other: object) -> bool:
        return bool(self._real() != plain(other))

    def __lt__(self, other: str) -> bool:
        return bool(self._real() < plain(other))

    def __le__(self, other: str) -> bool:
        return bool(self._real() <= plain(other))

    def __gt__(self, other: str) -> bool:
        return bool(self._real() > plain(other))

    def __ge__(self, other: str) -> bool:
        return bool(self._real() >= plain(other))

    def __contains__(self, part: object) -> bool:
        return plain(part) in self._real()

    def __iter__(self) -> Iterator[Self]:
        return (type(self)(character) for character in str.__iter__(self))

    def __getitem__(self, key: SupportsIndex | slice) -> Self:
        return type(self)(str.__getitem__(self, key))

    def __add__(self, other: str) -> Self:
        return type(self)(str.__add__(self, other))

    def __radd__(self, other: str) -> Self:
        return type(self)(str.__add__(other, self))

    def __mul__(self, times: SupportsIndex) -> Self:
        return type(self)(str.__mul__(self, times))

    __rmul__ = __mul__

    def join(self, parts: Iterable[str]) -> Self:
        return type(self)(str.join(self, parts))

    def strip(self, chars: str | None = None) -> Self:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> Self:
        return self._piece(len(self) - len(self._real().lstrip(plain(chars))), len(self))

    def rstrip(self, chars: str | None = None) -> Self:
        return self._piece(0, len(self._real().rstrip(plain(chars))))

    def removeprefix(self, prefix: str) -> Self:
        return self._piece(len(self) - len(self._real().removeprefix(plain(prefix))), len(self))

    def removesuffix(self, suffix: str) -> Self:
        return self._piece(0, len(self._real().removesuffix(plain(suffix))))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        parts = self._real().split(plain(sep), maxsplit)
        return self._pieces(parts, gap=None if sep is None else len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        parts = self._real().rsplit(plain(sep), maxsplit)
        return self._pieces(parts, gap=None if sep is None else len(sep))

    def splitlines(self, keepends: bool = False) -> list[Any]:
        return self._pieces(self._real().splitlines(keepends), gap=0 if keepends else None)

    def partition(self, sep: str) -> tuple[Any, Any, Any]:
        first, middle, last = self._pieces(self._real().partition(plain(sep)), gap=0)
        return first, middle, last

    def rpartition(self, sep: str) -> tuple[Any, Any, Any]:
        first, middle, last = self._pieces(self._real().rpartition(plain(sep)), gap=0)
        return first, middle, last

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> Self:
        if not old:
            return type(self)(str.replace(self, old, new, count))
        return type(self)(str.join(new, self.split(old, count)))

    startswith = _reads("startswith")
    endswith = _reads("endswith")
    find = _reads("find")
    rfind = _reads("rfind")
    index = _reads("index")
    rindex = _reads("rindex")
    count = _reads("count")
    isalnum = _reads("isalnum")
    isalpha = _reads("isalpha")
    isascii = _reads("isascii")
    isdecimal = _reads("isdecimal")
    isdigit = _reads("isdigit")
    isidentifier = _reads("isidentifier")
    islower = _reads("islower")
    isnumeric = _reads("isnumeric")
    isprintable = _reads("isprintable")
    isspace = _reads("isspace")
    istitle = _reads("istitle")
    isupper = _reads("isupper")
    upper = _rewrites("upper")
    lower = _rewrites("lower")
    title = _rewrites("title")
    capitalize = _rewrites("capitalize")
    casefold = _rewrites("casefold")
    swapcase = _rewrites("swapcase")


def plain(value: Any) -> Any:
    """A value of a template, all the way down, with the real text for every Traced."""
    if isinstance(value, Traced):
        return value._real()
    if isinstance(value, dict):
        return {plain(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(inner) for inner in value)
    return value


class Tracer:
    """Marks and reads back text for one set of control tokens."""

    def __init__(self, control_tokens: Iterable[str], source: str) -> None:
        names = sorted(control_tokens, key=lambda name: (-len(name), name))
        characters = sorted(set("".join(names)))
        if len(characters) > _NUM_MARKS:
            raise CheckpointError(
                f"{source}: its added tokens are spelt with {len(characters)} different "
                f"characters; chat templates work with at most {_NUM_MARKS}"
            )
        mark = {ord(c): _FIRST_MARK + place for place, c in enumerate(characters)}
        unmark = {marked: real for real, marked in mark.items()}
        self._unmark = unmark
        self._type = cast(
            type[Traced], type("TracedText", (Traced,), {"_mark": mark, "_unmark": unmark})
        )
        self._control = re.compile("|".join(map(re.escape, names))) if names else None

    def of_user(self, value: Any) -> Any:
        """JSON of a request, all the way down, with every text and key as the user's."""
        if isinstance(value, str):
            return self._type._of_user(value)
        if isinstance(value, dict):
            return {self.of_user(key): self.of_user(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.of_user(inner) for inner in value]
        return value

    def joined(self, pieces: Iterable[str]) -> Traced:
        """Pieces put together; what was marked in them stays marked."""
        return self._type("".join(pieces))

    def segments(self, rendered: str) -> PromptBuilder:
        """Rendered text, cut at the control tokens that the template itself wrote."""
        buffer = str.__str__(rendered)
        out = PromptBuilder()
        place = 0
        for match in self._control.finditer(buffer) if self._control else ():
            out.text(buffer[place : match.start()].translate(self._unmark))
            out.special(match.group())
            place = match.end()
        out.text(buffer[place:].translate(self._unmark))
        return out
