"""`make demo`: start a server, talk to it with the official openai client, stop it.

In:  nothing; a model may be named as the first argument, as for `gnomon serve`.
Out: a number planted in a text of 3,000 tokens and asked for, then another one of the same text,
     which is in the cache by now; a sum; a batch of mixed prompts at the same time: each with what
     came and how fast. Exit code 0 only if both numbers and the sum are right (of a random model
     only: that answers came), everything was answered and the server went down in good order.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table

from gnomon.evaluate.needle_context import draw_context

START_LIMIT_S = 300
STOP_LIMIT_S = 60
SEED = 33  # of the text and of what is planted in it
TEXT_CHARS = 7_700  # about 3,000 tokens of the built-in model
DEPTHS = (0.35, 0.8)  # of the planted numbers
SUM = ("What is 378 + 256?", "634")
BATCH = (
    ("The shadow of the pin", 48, 0.0),
    ("Four score and seven years ago", 32, 0.8),
    ("def hour_of(angle):", 40, 0.0),
    ("北はどちらですか", 24, 1.0),
    ("1 + 1 =", 8, 0.0),
    ("To those who look, the sundial tells", 64, 0.6),
    ('{"hour": 12, "shadow":', 24, 0.3),
    ("Once upon a time " * 20, 48, 0.9),
)

console = Console()


class DemoError(Exception):
    """Something did not go as it should; the message says what."""


@dataclass
class Timed:
    """A streamed answer and when its parts came."""

    text: str = ""
    num_tokens: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    finish: str = ""
    first_s: float = 0.0
    total_s: float = 0.0
    began: float = field(default_factory=time.perf_counter)

    def take(self, chunk: Any) -> str:
        """Account for a chunk; its text."""
        if chunk.usage is not None:
            self.num_tokens = chunk.usage.completion_tokens
            self.num_prompt = chunk.usage.prompt_tokens
            self.num_cached = chunk.usage.prompt_tokens_details.cached_tokens
            self.total_s = time.perf_counter() - self.began
        if not chunk.choices:
            return ""
        self.first_s = self.first_s or time.perf_counter() - self.began
        [choice] = chunk.choices
        self.finish = choice.finish_reason or self.finish
        text = choice.delta.content if hasattr(choice, "delta") else choice.text
        self.text += text or ""
        return text or ""

    @property
    def speed(self) -> float:
        """Tokens per second after the first."""
        span = self.total_s - self.first_s
        return (self.num_tokens - 1) / span if span > 0 and self.num_tokens > 1 else 0.0

    def summary(self) -> str:
        """One line for people."""
        return (
            f"{self.num_prompt} prompt tokens ({self.num_cached} from the cache), "
            f"{self.num_tokens} new, first after {self.first_s * 1e3:.0f} ms, "
            f"then {self.speed:.0f} tokens/s, finish: {self.finish}"
        )


def main() -> int:
    """Run the demonstration; the exit code."""
    model = sys.argv[1:2]
    began = time.perf_counter()
    try:
        with running_server(model) as url, client_of(url) as client:
            name, knows_nothing = introduce(client)
            look_numbers_up(client, name, knows_nothing)
            console.print(Rule("a sum"))
            check(ask(client, name, SUM[0], SUM[0]), SUM[1], knows_nothing)
            answer_a_crowd(client, name)
    except (DemoError, openai.OpenAIError) as error:
        console.print(f"[bold red]the demo failed:[/] {escape(str(error))}")
        return 1
    seconds = time.perf_counter() - began
    console.print(f"[bold green]done[/] in {seconds:.0f} s; the server has gone down in good order")
    return 0


@contextlib.contextmanager
def running_server(model: list[str]) -> Iterator[str]:
    """The URL of a server of our own, which is stopped at the end, come what may."""
    with tempfile.NamedTemporaryFile("w+", prefix="gnomon-demo-", suffix=".log") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "gnomon.cli.main", "serve", *model, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            yield wait_until_ready(process, Path(log.name))
            stop(process)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def wait_until_ready(process: subprocess.Popen[str], log: Path) -> str:
    """Wait for the address and for /ready, showing the last line of the server's log."""
    lines: list[str] = []
    assert process.stdout is not None
    out = process.stdout
    threading.Thread(target=lambda: lines.extend([out.readline()]), daemon=True).start()
    began = time.monotonic()
    with console.status("starting gnomon serve") as status:
        while time.monotonic() - began < START_LIMIT_S:
            if process.poll() is not None:
                raise DemoError(f"the server ended, code {process.returncode}:\n{log.read_text()}")
            last = (log.read_text().strip().splitlines() or ["starting"])[-1]
            status.update(f"{escape(last)} ({time.monotonic() - began:.0f} s)")
            found = re.search(r"at (http\S+)/v1", lines[0]) if lines else None
            if found and is_ready(found[1]):
                console.print(f"[green]ready[/] after {time.monotonic() - began:.1f} s: {found[1]}")
                return found[1]
            time.sleep(0.1)
    raise DemoError(f"the server was not ready within {START_LIMIT_S} s:\n{log.read_text()}")


def stop(process: subprocess.Popen[str]) -> None:
    """Ask the server to go down, and see that it does so in good order."""
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise DemoError(f"the server did not stop within {STOP_LIMIT_S} s") from None
    if code != 0:
        raise DemoError(f"the server stopped with code {code}")


def introduce(client: openai.OpenAI) -> tuple[str, bool]:
    """Say which model is served; its name, and whether its weights are random."""
    [model] = client.models.list().data
    root = str(model.to_dict()["root"])
    length = model.to_dict()["max_model_len"]
    console.print(f"model [bold]{escape(model.id)}[/], context of {length} tokens")
    is_random = root.startswith("random:")
    if is_random:
        console.print(
            "[dim]its weights are random: the machinery is real, what it says is noise[/]"
        )
    return str(model.id), is_random


def look_numbers_up(client: openai.OpenAI, model: str, knows_nothing: bool) -> None:
    """Plant numbers in a long text and ask for two of them; the second time it is in the cache."""
    context = draw_context(random.Random(SEED), TEXT_CHARS, DEPTHS, num_keys=4)
    console.print(Rule("numbers planted in a long text"))
    found = []
    for asked in context.asked:
        planted = re.findall(rf"[^.\n]*{asked.fact.value}\.", context.text)[0].strip()
        console.print(f"planted at {asked.depth:.0%}: [yellow]{escape(planted)}[/]")
        shown = f"[dim]({len(context.text):,} characters of text)[/] {escape(asked.question)}"
        found.append(ask(client, model, context.prompt(asked), shown))
        check(found[-1], asked.fact.value, knows_nothing)
    first, second = found
    if second.num_cached == 0:
        raise DemoError("the second question should have found the text in the cache")
    console.print(f"from the cache: {first.first_s / second.first_s:.1f} times as fast")


def check(answer: Timed, expected: str, knows_nothing: bool) -> None:
    """DemoError if the answer is wrong; of a model that knows nothing, if there is none."""
    if not answer.num_tokens or (expected not in answer.text and not knows_nothing):
        raise DemoError(f"the answer should be {expected}, and it is {answer.text!r}")
    if expected in answer.text:
        console.print(f"[green]right[/]: {expected} it is")


def ask(client: openai.OpenAI, model: str, message: str, shown: str) -> Timed:
    """One question, its answer printed as it comes."""
    console.print(f"[bold cyan]user[/]       {shown}", highlight=False)
    console.print("[bold magenta]assistant[/]  ", end="")
    timed = Timed()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": message}],
        max_tokens=32,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        console.print(timed.take(chunk), end="", markup=False, highlight=False)
    console.print()
    console.print(f"[dim]{timed.summary()}[/]")
    return timed


def answer_a_crowd(client: openai.OpenAI, model: str) -> None:
    """Prompts of several kinds and lengths, all at the same time."""
    console.print(Rule(f"{len(BATCH)} prompts at the same time"))
    began = time.perf_counter()
    with ThreadPoolExecutor(len(BATCH)) as pool:
        answers = list(pool.map(lambda one: complete(client, model, *one), BATCH))
    seconds = time.perf_counter() - began
    table = Table(expand=True)
    for name in ("prompt", "text"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=2)
    for name in ("new", "first ms", "tok/s", "finish"):
        table.add_column(name, justify="right", no_wrap=True)
    for (prompt, _, _), timed in zip(BATCH, answers, strict=True):
        table.add_row(
            escape(prompt),
            escape(timed.text.replace("\n", "⏎")),
            str(timed.num_tokens),
            f"{timed.first_s * 1e3:.0f}",
            f"{timed.speed:.0f}",
            timed.finish,
        )
    console.print(table)
    total = sum(timed.num_tokens for timed in answers)
    console.print(f"[dim]{total} tokens in {seconds:.2f} s: {total / seconds:.0f} tokens/s[/]")
    for (prompt, limit, _), timed in zip(BATCH, answers, strict=True):
        if timed.finish not in ("stop", "length") or timed.num_tokens > limit:
            raise DemoError(f"{prompt!r} was not answered: {timed.summary()}")


def complete(
    client: openai.OpenAI, model: str, prompt: str, max_tokens: int, temperature: float
) -> Timed:
    """Stream one completion to its end."""
    timed = Timed()
    stream = client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        timed.take(chunk)
    return timed


def client_of(url: str) -> openai.OpenAI:
    """The official client; it retries nothing, so that a failure is seen."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)


def is_ready(url: str) -> bool:
    """Whether the server says that it takes requests."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


if __name__ == "__main__":
    sys.exit(main())
