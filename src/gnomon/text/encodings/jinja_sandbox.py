"""The room in which a checkpoint's chat template runs.

In:  the template's text; variables, in which every string of a user is Traced (traced.py).
Out: rendered text with the user's characters still marked.
The environment has what transformers gives to a template (trim_blocks, lstrip_blocks, break and
continue, tojson without HTML escapes, raise_exception, strftime_now, the generation block) and no
more. It is Jinja's immutable sandbox: no private attribute, no change of a list or a mapping. The
output is bounded as it grows, and so is what `*` and `**` can make.
The time is bounded too, inside of `time_limit`: a template is honest, but one that looks at all
messages for each of them takes hours where somebody sends enough. Every round of a loop, every
call and every item that a filter hands on looks whether there is time left.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from types import GeneratorType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gnomon.text.encodings.traced import Tracer, plain

MAX_RENDERED_CHARS = 16 * 1024 * 1024
"""A million tokens are about four million characters."""
MAX_ITEMS = 1024 * 1024
MAX_SECONDS = 10.0
"""CPU time of the thread that renders; a conversation of a million tokens takes one or two."""
_MAX_POWER_BITS = 4096
_TICKS_PER_LOOK = 64  # at the clock, which costs as much as a round of a loop


class TemplateRefusal(Exception):
    """The template called raise_exception: it does not accept these messages."""


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}`: marks what a model writes, for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Time(threading.local):
    """Of each thread that renders: when its CPU time is over, and what it has counted."""

    end = math.inf
    ticks = 0


class TemplateRoom(ImmutableSandboxedEnvironment):
    """A sandbox for one template and one set of control tokens."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, tracer: Tracer) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, jinja2.ext.loopcontrols],
        )
        self._tracer = tracer
        self._time = _Time()
        self.concat = self._concat  # type: ignore[method-assign]  # Jinja asks the instance
        self.filters["tojson"] = self._tojson
        self.filters["join"] = self._join
        self.filters = {name: self._watched(one) for name, one in self.filters.items()}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    @contextlib.contextmanager
    def time_limit(self) -> Iterator[None]:
        """What this thread renders inside has MAX_SECONDS; SecurityError when they are over."""
        self._time.end = time.thread_time() + MAX_SECONDS
        try:
            yield
        finally:
            self._time.end = math.inf

    def tick(self) -> None:
        """Something that a template can repeat is about to happen."""
        now = self._time
        now.ticks += 1
        if now.ticks % _TICKS_PER_LOOK == 0:
            self._look()

    def _look(self) -> None:
        if time.thread_time() > self._time.end:
            raise SecurityError(f"the chat template takes more than {MAX_SECONDS:g} s")

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of a macro, a function, a method."""
        __self.tick()
        return super().call(__context, __obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        """The syntax tree, with a tick at the head of each loop's body."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(jinja2.nodes.For):
            tick = jinja2.nodes.EnvironmentAttribute("tick")
            call = jinja2.nodes.ExprStmt(jinja2.nodes.Call(tick, [], [], None, None))
            loop.body.insert(0, call.set_lineno(loop.lineno).set_environment(self))
        return tree

    def _watched(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """A filter behind a look at the clock, since one (tojson, sort) may go through everything.

        If it hands its items on one by one, they tick.
        """

        @functools.wraps(apply)  # with Jinja's own marks, which are attributes
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._look()
            found = apply(*args, **kwargs)
            return self._ticking(found) if isinstance(found, GeneratorType) else found

        return watched

    def _ticking(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.tick()
            yield item

    def variables(self, source: str) -> frozenset[str]:
        """The names that a template reads and does not set itself."""
        return frozenset(jinja2.meta.find_undeclared_variables(self.parse(source)))

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Raise at once; Jinja would print nothing for it and go on."""
        raise SecurityError(f"the template asks a {type(obj).__name__} for {attribute!r}")

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """`*` and `**`, if the result is of a sensible size."""
        sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        times = [abs(side) for side in (left, right) if isinstance(side, int)]
        most = MAX_RENDERED_CHARS if isinstance(left, str) or isinstance(right, str) else MAX_ITEMS
        if operator == "*" and sizes and times and sizes[0] * times[0] > most:
            raise SecurityError(f"the template repeats a text or a list {times[0]} times")
        if operator == "**" and len(times) == 2 and right * left.bit_length() > _MAX_POWER_BITS:
            raise SecurityError(f"the template computes {left} ** {right}")
        return super().call_binop(context, operator, left, right)

    def _concat(self, pieces: Iterable[str]) -> str:
        """Put output together, of the template and of each macro; stop when it is too much."""
        kept = []
        length = 0
        for piece in pieces:
            length += len(piece)
            if length > MAX_RENDERED_CHARS:
                raise SecurityError(
                    f"the chat template writes more than {MAX_RENDERED_CHARS} characters"
                )
            kept.append(piece)
        return self._tracer.joined(kept)

    def _join(self, value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        """Jinja's `join`; its own loses track of what compares how."""
        if attribute is not None:
            value = (self.getattr(item, attribute) for item in value)
        return self._tracer.joined([""]).__add__(d).join(str(item) for item in value)

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON of the real text, all of it the user's: no value can spell a control token."""
        text = json.dumps(
            plain(value),
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
        marked: str = self._tracer.of_user(text)
        return marked


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusal(plain(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(plain(format))
