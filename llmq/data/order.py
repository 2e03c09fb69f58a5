"""Random orders that follow from seeds alone: llm.q's, and a faster one of our own.

At llm.q Philox seeds a C++ engine, which drives libstdc++'s shuffle. It takes a microsecond per
element, so packed documents and weighted files, which llm.q does not have, are ordered by a hash.
"""

from __future__ import annotations

import functools
import threading

import numpy as np


def philox_4x32(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Philox-4x32-10 (Salmon et al. 2011): four random 32-bit words for one counter."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF
        c2, c3 = (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


# ------------------------------------------------------------------------------------------------
# The order of llm.q


# The engine is std::default_random_engine of libstdc++: state = state * 16807 mod (2^31 - 1).
_LEHMER_A = 16807
_LEHMER_M = 2**31 - 1
_ENGINE_RANGE = _LEHMER_M - 2  # largest minus smallest value that the engine returns
_BLOCK = 256  # draws computed at once; a rejected draw costs one more block


@functools.cache
def _lehmer_powers() -> np.ndarray:
    """a^1 … a^_BLOCK mod m, uint64: any state times these gives the next _BLOCK states."""
    powers = [pow(_LEHMER_A, k, _LEHMER_M) for k in range(1, _BLOCK + 1)]
    return np.array(powers, np.uint64)


def _uniform_integers(state: int, ends: np.ndarray) -> np.ndarray:
    """std::uniform_int_distribution: draw i is uniform in 0..ends[i]-1, int64.

    state: the engine's, 1 <= state < m. A draw beyond the largest multiple of ends[i] is thrown
    away and drawn again, so everything after it moves by one: draws are made a block at a time and
    a block ends at its first rejected draw.
    """
    out = np.empty(len(ends), np.int64)
    done = 0
    while done < len(ends):
        end = ends[done : done + _BLOCK]
        states = np.uint64(state) * _lehmer_powers()[: len(end)] % np.uint64(_LEHMER_M)
        draws = states.astype(np.int64) - 1
        scale = _ENGINE_RANGE // end
        rejected = draws >= end * scale
        taken = int(rejected.argmax()) if rejected.any() else len(end)
        out[done : done + taken] = draws[:taken] // scale[:taken]
        done += taken
        state = int(states[min(taken, len(end) - 1)])
    return out


def shuffled(n: int, engine_seed: int) -> np.ndarray:
    """The int32 permutation of 0..n-1 that libstdc++'s std::ranges::shuffle makes with that seed.

    Element i is swapped with a random element of 0..i, for i = 1, 2, …. While n * n fits into the
    engine's range, one draw gives the partners of two consecutive elements.
    """
    if n < 2:
        return np.zeros(n, np.int32)
    state = engine_seed % _LEHMER_M or 1
    if _ENGINE_RANGE // n >= n:
        single = 1 - n % 2  # with an even n, element 1 has a draw of its own
        first = np.arange(1 + single, n, 2, dtype=np.int64)  # first element of each pair
        ends = np.concatenate([np.full(single, 2, np.int64), (first + 1) * (first + 2)])
        draws = _uniform_integers(state, ends)
        partners = np.empty(n - 1, np.int64)
        partners[:single] = draws[:single]
        partners[single::2], partners[single + 1 :: 2] = np.divmod(draws[single:], first + 2)
    else:
        partners = _uniform_integers(state, np.arange(2, n + 1, dtype=np.int64))
    order = list(range(n))
    for i, j in enumerate(partners.tolist(), 1):
        order[i], order[j] = order[j], order[i]
    return np.array(order, np.int32)


FILE_ORDER = 0x73653753  # second counter word of the file shuffle; the i-th file's chunks use i
_order_lock = threading.Lock()


@functools.lru_cache(maxsize=8)
def _cached_order(n: int, seed: int, epoch: int, which: int) -> np.ndarray:
    word = philox_4x32((seed & 0xFFFFFFFF, seed >> 32), (epoch, which, 0, 0))[0]
    order = shuffled(n, word)
    order.flags.writeable = False
    return order


def epoch_order(n: int, seed: int, epoch: int, which: int) -> np.ndarray:
    """Permutation (n,) int32 of the files (which = FILE_ORDER) or of the which-th file's chunks.

    Computed once for all ranks of the process: they ask for the same one at about the same time.
    """
    with _order_lock:
        return _cached_order(n, seed, epoch, which)


# ------------------------------------------------------------------------------------------------
# An order by hashes


def hashed_order(n: int, seed: int, epoch: int, which: int) -> np.ndarray:
    """A permutation (n,) int64 of 0..n-1, by another rule than `epoch_order`; not cached."""
    return np.argsort(hashes(n, seed, epoch, which))


def hashes(n: int, seed: int, epoch: int, which: int) -> np.ndarray:
    """A random number for each of 0..n-1, no two alike, uint32 (n,). n: at most 2^32.

    Every step is a bijection of 32-bit numbers. Without ties, sorting by them gives the same order
    on every machine and with every version of NumPy.
    """
    words = philox_4x32((seed & 0xFFFFFFFF, seed >> 32), (epoch, which, _HASHED, 0))
    x = np.arange(n, dtype=np.uint32)
    for word, multiplier in zip(words, _MULTIPLIERS, strict=True):
        x ^= np.uint32(word)
        x ^= x >> np.uint32(16)
        x *= np.uint32(multiplier)
    x ^= x >> np.uint32(15)
    return x


_HASHED = 0x6B636170  # third counter word, 0 in llm.q's orders
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B, 0x85EBCA6B, 0xC2B2AE35)  # odd, from well-known hashes
