"""Pseudo-random orders that any process finds by itself: of seed and epoch alone, random access, no array where there are many.

Up to `TABLE_SIZE` things are put in the order of raw bits of numpy's PCG64 (stable over numpy releases, unlike
Generator.permutation). More are mapped one by one by a Feistel network with cycle walking (Black and Rogaway 2002, "Ciphers
with arbitrary finite domains"): eight rounds on the smallest even number of bits that holds the size, whose round function is
splitmix64's finalizer; a number beyond the size is mapped again until it lies below. Changing either breaks the resumption of
runs that began with an earlier version: tests pin both.
"""

from __future__ import annotations

import numpy as np

TABLE_SIZE = 1 << 20
_ROUNDS = 8


def table(size: int, *key: int) -> np.ndarray:
    """[size] int64: a permutation of 0..size-1, drawn by the key."""
    bits = np.random.PCG64(np.random.SeedSequence(key)).random_raw(size)
    return np.argsort(bits, kind="stable")


def feistel(indices: np.ndarray, size: int, *key: int) -> np.ndarray:
    """Where a permutation of 0..size-1, drawn by the key, takes each of `indices` (int64, below size)."""
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)
    low = np.uint64((1 << half) - 1)
    found = np.asarray(indices, np.uint64).copy()
    walking = np.ones(found.shape, bool)
    while walking.any():
        left, right = found[walking] >> np.uint64(half), found[walking] & low
        for round_key in keys:
            left, right = right, left ^ (_mixed(right + round_key) & low)
        found[walking] = left << np.uint64(half) | right
        walking = found >= size
    return found.astype(np.int64)


def draw(below: int, *key: int) -> int:
    """A number in 0..below-1, drawn by the key."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) % below


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
