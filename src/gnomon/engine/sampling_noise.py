"""The noise of sampling: one Gumbel number per token that could be drawn, a function of its key.

In:  seed (64 bits), position of the token in its sequence, choice index, per row; the vocabulary.
Out: float64 [M, V], the same on every platform and in every batch up to the last bits of log().
Maths: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), key =
the seed, counter = (position, choice, purpose, token // 4): the four words are of four tokens.
A word w is the uniform number u = (w + 1/2) / 2^32; −log(1 − u) is exponential, and minus its
logarithm a Gumbel number. Those that win are large and come of small u, where u is finest.
No state, so preemption, batching, overlap and drafts cannot change a draw: whoever asks for
(seed, position, choice, token) gets the same number.
Not here: what is drawn with it (sampling_draw.py); the same numbers on a GPU (sampling_triton.py).
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
TOKENS_A_BLOCK: Final = 4
MOST_BLOCKS: Final = 1 << 18  # computed at once: bounds the memory of large batches


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


def noise_words(
    seed: Words, position: NDArray[np.int64], choice: NDArray[np.int64], num_tokens: int
) -> Words:
    """A word below 2^32 per row and token, [M, V]; positions are taken modulo 2^32."""
    seeds = seed[:, None]
    positions = position.astype(np.uint64)[:, None]
    choices = choice.astype(np.uint64)[:, None]
    block = np.arange(-(-num_tokens // TOKENS_A_BLOCK), dtype=np.uint64)[None, :]
    purpose = np.full((1, 1), SAMPLE_PURPOSE, dtype=np.uint64)
    words = philox(
        (positions & MASK32, choices & MASK32, purpose, block),
        (seeds & MASK32, seeds >> np.uint64(32)),
    )
    return np.stack(words, axis=-1).reshape(len(seed), -1)[:, :num_tokens]


def gumbels(
    seed: Words, position: NDArray[np.int64], choice: NDArray[np.int64], num_tokens: int
) -> NDArray[np.float64]:
    """Standard Gumbel numbers [M, num_tokens] of rows with these keys, each [M]."""
    out = np.empty((len(seed), num_tokens))
    at_once = max(1, MOST_BLOCKS * TOKENS_A_BLOCK // max(1, num_tokens))
    for start in range(0, len(seed), at_once):
        rows = slice(start, start + at_once)
        words = noise_words(seed[rows], position[rows], choice[rows], num_tokens)
        uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
        out[rows] = -np.log(-np.log1p(-uniform))
    return out


def derived_seed(engine_seed: int, request_id: str) -> int:
    """The seed of a request that names none: 64 bits of blake2b over (engine seed, request id)."""
    text = f"{engine_seed}:{request_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
