"""The sampling noise is Philox4x32-10, keyed by seed, position, choice and token alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.engine import sampling_noise
from gnomon.engine.sampling_noise import derived_seed, gumbels, noise_words, philox

# Known answers of the Random123 distribution (kat_vectors, philox4x32 10): counter, key, output.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_by_hand(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Ten rounds in Python's unbounded integers."""
    x = list(counter)
    k = list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [
            (second >> 32) ^ x[1] ^ k[0],
            second % 2**32,
            (first >> 32) ^ x[3] ^ k[1],
            first % 2**32,
        ]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(x)


def words(values: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], dtype=np.uint64) for value in values)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter, key, answer):
    assert tuple(int(word[0]) for word in philox(words(counter), words(key))) == answer
    assert philox_by_hand(counter, key) == answer


def keys(seeds: list[int], positions: list[int], choices: list[int]) -> tuple[np.ndarray, ...]:
    masked = [seed % 2**64 for seed in seeds]
    return np.array(masked, np.uint64), np.array(positions), np.array(choices)


@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 2**32 - 1),
    choice=st.integers(0, 127),
    num_tokens=st.integers(1, 19),
)
def test_tokens_take_the_words_in_turn(seed, position, choice, num_tokens):
    key = (seed % 2**64 % 2**32, seed % 2**64 // 2**32)
    expected = [
        philox_by_hand((position, choice, 0, token // 4), key)[token % 4]
        for token in range(num_tokens)
    ]
    found = noise_words(*keys([seed], [position], [choice]), num_tokens)
    assert found.tolist() == [expected]
    noise = gumbels(*keys([seed], [position], [choice]), num_tokens)
    by_hand = [-math.log(-math.log1p(-(word + 0.5) / 2**32)) for word in expected]
    np.testing.assert_allclose(noise, [by_hand], rtol=1e-12, atol=1e-12)


def test_every_part_of_the_key_matters_and_mates_do_not():
    rows = keys([3, 4, 3, 3], [5, 5, 6, 5], [0, 0, 0, 1])
    together = gumbels(*rows, 9)
    assert len(set(together.reshape(-1).tolist())) == 36
    alone = [gumbels(*(part[i : i + 1] for part in rows), 9)[0].tolist() for i in range(4)]
    assert together.tolist() == alone


def test_large_batches_are_made_in_parts_of_the_same_numbers(monkeypatch):
    rows = keys(list(range(7)), [2] * 7, [0] * 7)
    whole = gumbels(*rows, 10)
    monkeypatch.setattr(sampling_noise, "MOST_BLOCKS", 5)
    np.testing.assert_array_equal(gumbels(*rows, 10), whole)


def test_noise_is_uniform_and_finite():
    words = noise_words(*keys([7] * 200, list(range(200)), [0] * 200), 100)
    counts, _ = np.histogram(words, bins=50, range=(0, 2**32))
    chi_square = float(((counts - 400.0) ** 2 / 400.0).sum())
    assert chi_square < 85.4  # 99.9 % quantile, 49 degrees of freedom
    edges = np.array([0, 2**32 - 1], np.float64)
    assert np.isfinite(-np.log(-np.log1p(-(edges + 0.5) / 2**32))).all()


def test_derived_seeds_differ_by_engine_and_by_request():
    seeds = {derived_seed(engine, name) for engine in (0, 1) for name in ("a", "b", "1:a")}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**64 for seed in seeds)
