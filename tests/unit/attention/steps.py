"""Random steps, and the same steps as plain Python lists: the oracle of the geometry tests.

In:  hypothesis draws.
Out: ``Step`` (lists of ints, tokens as (request, position) pairs) and the Geometry built from it;
     ``seen`` and ``written`` read a Geometry back into the same plain terms.
Not here: any use of gnomon's own transformations.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from gnomon.attention.geometry import Geometry, PageTable, RowAxis, build_geometry

Token = tuple[int, int]  # request, position
SPARE = 12  # tokens that a request's pages hold beyond its kv_len: room for drafts


@dataclass
class Step:
    """``rows``: the token of each row, None for padding; ``writes``: the tokens written."""

    query_len: list[int]
    kv_len: list[int]
    pages: list[list[int]]
    page_size: int
    compressed: list[list[int]]
    rows: list[Token | None] = field(default_factory=list)
    writes: set[Token] = field(default_factory=set)

    def tokens(self) -> list[Token]:
        return [
            (b, p)
            for b, (q, kv) in enumerate(zip(self.query_len, self.kv_len, strict=True))
            for p in range(kv - q, kv)
        ]

    def slot(self, token: Token) -> int:
        b, p = token
        return self.pages[b][p // self.page_size] * self.page_size + p % self.page_size

    def compressed_slot(self, request: int, entry: int) -> int:
        """One entry for four tokens, two entries a page."""
        return self.compressed[request][entry // 2] * 2 + entry % 2

    def num_pages(self) -> dict[str, int]:
        return {
            "tokens": 1 + max((p for row in self.pages for p in row), default=0),
            "compressed": 1 + max((p for row in self.compressed for p in row), default=0),
        }


def _deal_pages(draw: st.DrawFn, needs: list[int]) -> list[list[int]]:
    numbers = draw(st.permutations(range(1, sum(needs) + 1)))
    pages, start = [], 0
    for need in needs:
        pages.append(list(numbers[start : start + need]))
        start += need
    return pages


@st.composite
def steps(draw: st.DrawFn, min_requests: int = 0, max_requests: int = 5, most: int = 9) -> Step:
    """Mixed steps: decodes, first chunks, later chunks, requests that compute nothing now."""
    num_requests = draw(st.integers(min_requests, max_requests))
    query = [draw(st.integers(0, most)) for _ in range(num_requests)]
    kv = [q + draw(st.integers(0, 25)) for q in query]
    page_size = draw(st.sampled_from([1, 3, 4, 16]))
    pages = _deal_pages(draw, [-(-(n + SPARE) // page_size) for n in kv])
    compressed = _deal_pages(draw, [-(-(n + SPARE) // 8) for n in kv])
    step = Step(query, kv, pages, page_size, compressed)
    step.rows = list(step.tokens())
    step.writes = set(step.tokens())
    return step


def geometry_of(step: Step, label: str = "step") -> Geometry:
    """The Geometry of an untouched Step: groups "tokens" and "compressed" (four to one)."""
    width = max((len(row) for row in step.compressed), default=0)
    table = torch.zeros((len(step.compressed), width), dtype=torch.int32)
    for b, row in enumerate(step.compressed):
        table[b, : len(row)] = torch.tensor(row, dtype=torch.int32)
    tables = {"tokens": step.pages, "compressed": PageTable("compressed", table, 2, 4)}
    return build_geometry(step.query_len, step.kv_len, tables, step.page_size, label=label)


def tokens_of(axis: RowAxis) -> list[Token | None]:
    """Device rows as plain tokens; asserts the padding contract and kv_len = position + 1."""
    found: list[Token | None] = []
    for b, p, kv in zip(
        axis.request.tolist(), axis.position.tolist(), axis.kv_len.tolist(), strict=True
    ):
        if b < 0:
            assert (b, p, kv) == (-1, 0, 0)
            found.append(None)
        else:
            assert kv == p + 1
            found.append((b, p))
    return found


def seen(geometry: Geometry) -> list[tuple[list[int], list[int]] | None]:
    """For each row the slots of every token, and of every compressed entry, that it sees."""
    table, packed = geometry.tables["tokens"], geometry.tables["compressed"]
    result: list[tuple[list[int], list[int]] | None] = []
    for row, token in enumerate(tokens_of(geometry.rows)):
        if token is None:
            result.append(None)
            continue
        request = geometry.rows.request[row]
        kv_len = geometry.rows.kv_len[row]
        entries = int(packed.num_entries(kv_len))
        result.append(
            (
                table.slots(request, torch.arange(int(kv_len))).tolist(),
                packed.entry_slots(request, torch.arange(entries)).tolist(),
            )
        )
    return result


def expected_seen(step: Step) -> list[tuple[list[int], list[int]] | None]:
    """What ``seen`` must find, by plain loops over the step's page lists."""
    return [
        None
        if token is None
        else (
            [step.slot((token[0], p)) for p in range(token[1] + 1)],
            [step.compressed_slot(token[0], e) for e in range((token[1] + 1) // 4)],
        )
        for token in step.rows
    ]


def written(geometry: Geometry, group: str) -> dict[int, Token]:
    """Slot -> the token written there; asserts that no slot is written twice."""
    writes = geometry.writes[group]
    found: dict[int, Token] = {}
    for token, slot in zip(tokens_of(writes.axis), writes.slots.tolist(), strict=True):
        if slot >= 0:
            assert token is not None
            assert slot not in found
            found[slot] = token
    return found


def expected_written(step: Step, group: str) -> dict[int, Token]:
    if group == "tokens":
        return {step.slot(token): token for token in step.writes}
    ends = [(b, p) for b, p in step.writes if p % 4 == 3]
    return {step.compressed_slot(b, p // 4): (b, p) for b, p in ends}


def assert_same(geometry: Geometry, step: Step) -> None:
    """Rows, key sets and writes are those of the plain step, and the full check passes."""
    geometry.check(step.num_pages())
    assert tokens_of(geometry.rows) == step.rows
    assert geometry.requests.query_len.tolist() == step.query_len
    assert geometry.requests.kv_len.tolist() == step.kv_len
    assert seen(geometry) == expected_seen(step)
    for group in ("tokens", "compressed"):
        assert written(geometry, group) == expected_written(step, group)
