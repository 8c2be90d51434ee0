"""The noise of sampling: one uniform number per sampled token, a pure function of its key.

In:  seed (64 bits), position of the token in its sequence, choice index: arrays of one length.
Out: float64 in [0, 1) with 53 random bits, the same on every platform and in every batch.
Maths: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), key =
the seed, counter = (position, choice, purpose, 0). No state, so preemption, batching, overlap and
drafts cannot change a draw: whoever asks for (seed, position, choice) gets the same number.
Not here: what is drawn with it (sampler.py).
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

NUM_ROUNDS: Final = 10
MASK32: Final = np.uint64(0xFFFF_FFFF)
MASK64: Final = 0xFFFF_FFFF_FFFF_FFFF
MULTIPLIERS: Final = (np.uint64(0xD251_1F53), np.uint64(0xCD9E_8D57))
KEY_STEPS: Final = (np.uint64(0x9E37_79B9), np.uint64(0xBB67_AE85))
SAMPLE_PURPOSE: Final = 0
"""Third counter word of draws that pick a token; later uses of the seed take other numbers."""


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> list[Words]:
    """Philox4x32-10: four words below 2^32 (held in uint64) per element, for a two-word key."""
    shift = np.uint64(32)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        product0 = MULTIPLIERS[0] * c0
        product1 = MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> shift) ^ c1 ^ k0,
            product1 & MASK32,
            (product0 >> shift) ^ c3 ^ k1,
            product0 & MASK32,
        )
        k0 = (k0 + KEY_STEPS[0]) & MASK32
        k1 = (k1 + KEY_STEPS[1]) & MASK32
    return [c0, c1, c2, c3]


def uniforms(seeds: list[int], positions: list[int], choices: list[int]) -> NDArray[np.float64]:
    """One number in [0, 1) per (seed, position, choice); seeds are taken modulo 2^64."""
    seed = np.array([value & MASK64 for value in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    choice = np.array(choices, dtype=np.uint64)
    purpose = np.full_like(seed, SAMPLE_PURPOSE)
    high, low, _, _ = philox(
        (position & MASK32, choice & MASK32, purpose, position >> np.uint64(32)),
        (seed & MASK32, seed >> np.uint64(32)),
    )
    bits = (high >> np.uint64(5)) * np.uint64(1 << 26) + (low >> np.uint64(6))  # 27 + 26 bits
    return bits.astype(np.float64) * 2.0**-53


def derived_seed(engine_seed: int, request_id: str) -> int:
    """The seed of a request that names none: 64 bits of blake2b over (engine seed, request id)."""
    text = f"{engine_seed}:{request_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
