"""The sampling noise is Philox4x32-10, keyed by seed, position and choice alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.engine.sampling_noise import derived_seed, philox, uniforms

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


@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 2**40),
    choice=st.integers(0, 127),
)
def test_uniform_is_the_first_53_bits(seed, position, choice):
    key = (seed % 2**64 % 2**32, seed % 2**64 // 2**32)
    word0, word1, _, _ = philox_by_hand((position % 2**32, choice, 0, position // 2**32), key)
    expected = ((word0 >> 5) * 2**26 + (word1 >> 6)) / 2**53
    assert uniforms([seed], [position], [choice])[0] == expected


def test_every_part_of_the_key_matters_and_mates_do_not():
    seeds, positions, choices = [3, 4, 3, 3], [5, 5, 6, 5], [0, 0, 0, 1]
    together = uniforms(seeds, positions, choices)
    assert len(set(together.tolist())) == 4
    alone = [
        uniforms([seed], [position], [choice])[0]
        for seed, position, choice in zip(seeds, positions, choices, strict=True)
    ]
    assert together.tolist() == alone


def test_uniforms_are_uniform():
    values = uniforms([7] * 20000, list(range(20000)), [0] * 20000)
    counts, _ = np.histogram(values, bins=50, range=(0.0, 1.0))
    chi_square = float(((counts - 400.0) ** 2 / 400.0).sum())
    assert chi_square < 85.4  # 99.9 % quantile, 49 degrees of freedom
    assert values.min() >= 0.0
    assert values.max() < 1.0


def test_derived_seeds_differ_by_engine_and_by_request():
    seeds = {derived_seed(engine, name) for engine in (0, 1) for name in ("a", "b", "1:a")}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**64 for seed in seeds)
