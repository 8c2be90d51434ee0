"""How long a request waited for its first step is told once, with its first token."""

from __future__ import annotations

import time

from tests.engine.tiny_engine import prompt, request, run, tiny_core


def test_who_waits_for_a_seat_is_told_so_once() -> None:
    core = tiny_core(max_num_seqs=1)
    arrival = time.monotonic()
    first, second = (
        request(name, prompt(20, salt), num_new=4, arrival_s=arrival)
        for salt, name in enumerate(("first", "second"))
    )
    found = run(core, [first, second])
    told = {name: [delta.queue_s for delta in deltas] for name, deltas in found.items()}
    assert all(waited == 0 for values in told.values() for waited in values[1:])
    # The second one began when the first one's four tokens were there.
    assert told["second"][0] > told["first"][0] > 0


def test_without_an_arrival_nothing_is_claimed() -> None:
    found = run(tiny_core(), [request("anon", prompt(9), num_new=2)])
    assert [delta.queue_s for delta in found["anon"]] == [0.0, 0.0]
