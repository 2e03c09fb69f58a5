"""Random orders that follow from seeds alone: llm.q's, and one of our own.

At llm.q Philox seeds a C++ engine, which drives libstdc++'s shuffle, one swap after the other.
Packed documents and weighted files, which llm.q does not have, are ordered by a hash.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

Progress = Callable[[int, int], None]


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
_BLOCK = 1 << 16  # draws and swaps computed at once: they stay in the processor's cache


@functools.cache
def _lehmer_powers() -> np.ndarray:
    """a^1 … a^_BLOCK mod m, uint64: any state times these gives the next _BLOCK states."""
    powers = np.array([_LEHMER_A], np.uint64)
    while len(powers) < _BLOCK:
        powers = np.concatenate([powers, _modulo(powers * powers[-1])])
    return powers


def _modulo(x: np.ndarray) -> np.ndarray:
    """x mod m, for products of two numbers from 1 to m - 1, of which none is a multiple of m."""
    m = np.uint64(_LEHMER_M)
    x = (x & m) + (x >> np.uint64(31))  # 2^31 is 1 mod m
    return (x & m) + (x >> np.uint64(31))


def _uniform_integers(state: int, ends: np.ndarray) -> tuple[np.ndarray, int]:
    """std::uniform_int_distribution: draw i is uniform in 0..ends[i]-1, int64; the state behind.

    state: the engine's, 1 <= state < m. ends: at most _BLOCK. A draw beyond the largest multiple of
    ends[i] is thrown away and drawn again, so everything after it moves by one.
    """
    out = np.empty(len(ends), np.int64)
    done = 0
    while done < len(ends):
        end = ends[done:]
        scale = _ENGINE_RANGE // end
        limits = end * scale
        states = _modulo(np.uint64(state) * _lehmer_powers()[: len(end)])
        draws = states.astype(np.int64) - 1
        # How many draws before each were thrown away depends on which ends these met. Each look
        # is right up to the first draw at least that the one before had wrong.
        rejected, before = draws >= limits, np.zeros(len(end), bool)
        while not np.array_equal(rejected, before):
            before = rejected
            at = np.arange(len(end)) - np.cumsum(rejected) + rejected
            rejected = draws >= limits[at]
        taken = ~rejected
        count = int(taken.sum())
        out[done : done + count] = draws[taken] // scale[:count]
        done, state = done + count, int(states[-1])
    return out, state


def _partners(n: int, engine_seed: int) -> Iterator[tuple[int, np.ndarray]]:
    """The elements that 1, 2, … n-1 are swapped with, int64, a block at a time: its first element,
    and the partners. While n * n fits into the engine's range, one draw gives those of two."""
    state, start = engine_seed % _LEHMER_M or 1, 1
    paired = _ENGINE_RANGE // n >= n
    if paired and n % 2 == 0:  # element 1 has a draw of its own
        draws, state = _uniform_integers(state, np.array([2], np.int64))
        yield 1, draws
        start = 2
    while start < n:
        stop = min(start + _BLOCK, n)
        if paired:
            first = np.arange(start, stop, 2, dtype=np.int64)
            draws, state = _uniform_integers(state, (first + 1) * (first + 2))
            yield start, np.stack(np.divmod(draws, first + 2), axis=1).reshape(-1)
        else:
            draws, state = _uniform_integers(state, np.arange(start + 1, stop + 1, dtype=np.int64))
            yield start, draws
        start = stop


def shuffled(n: int, engine_seed: int, progress: Progress = lambda done, total: None) -> np.ndarray:
    """The int32 permutation of 0..n-1 that libstdc++'s std::ranges::shuffle makes with that seed.

    Element i is swapped with a random element of 0..i, for i = 1, 2, …. progress: told of elements
    done and of all, after each block.
    """
    order = np.arange(n, dtype=np.int32)
    for start, partners in _partners(n, engine_seed) if n > 1 else ():
        _swap(order, start, partners)
        progress(start + len(partners), n)
    return order


def _swap(order: np.ndarray, start: int, partners: np.ndarray) -> None:
    """Swap order[start + i] with order[partners[i]] for i = 0, 1, …, where partners[i] is at most
    start + i, and the elements from start on are still in their place.

    So a swap puts the number of the element at its partner's place, and brings what was last put
    there: by the swap before that had the same partner; else it is what was there before the block,
    or, for a partner in the block, what that one's own swap has brought.
    """
    count = len(partners)
    elements = np.arange(start, start + count)
    # Sorted by partner, then by place: one number of both is faster than a stable argsort.
    both = np.sort(partners * _BLOCK + np.arange(count))
    by_partner = both % _BLOCK
    is_last = np.append(np.diff(both // _BLOCK) != 0, True)
    again = np.flatnonzero(~is_last)
    brought = np.full(count, -1, np.int64)
    outside = partners < start
    brought[outside] = order[partners[outside]]
    own = partners == elements
    brought[own] = elements[own]
    brought[by_partner[again + 1]] = elements[by_partner[again]]
    waiting = np.flatnonzero(brought < 0)
    while len(waiting):
        brought[waiting] = brought[partners[waiting] - start]
        waiting = waiting[brought[waiting] < 0]
    order[start : start + count] = brought
    last = by_partner[is_last]
    order[partners[last]] = elements[last]


REPORT_SECONDS = 2.0  # between two lines about a shuffle that takes longer


def _tell_now_and_then() -> Progress:
    """Say on standard error how far a shuffle is, and nothing about a short one."""
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= REPORT_SECONDS:
            last = time.monotonic()
            print(f"shuffling {total:,} sequences: {done / total:.0%}", file=sys.stderr, flush=True)

    return tell


FILE_ORDER = 0x73653753  # second counter word of the file shuffle; the i-th file's chunks use i
_order_lock = threading.Lock()


@functools.lru_cache(maxsize=8)
def _cached_order(n: int, seed: int, epoch: int, which: int) -> np.ndarray:
    word = philox_4x32((seed & 0xFFFFFFFF, seed >> 32), (epoch, which, 0, 0))[0]
    order = shuffled(n, word, _tell_now_and_then())
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
