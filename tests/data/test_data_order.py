"""The random order of the data against known vectors: Philox, libstdc++'s shuffle, llm.q."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from llmq.data.epoch_plan import FILE_ORDER, epoch_order, philox_4x32, shuffled

TRAIN_SEED, EVAL_SEED = 0x83B45442, 0x384B4524


def test_philox_known_answers():
    # kat_vectors of Random123, philox4x32 with 10 rounds
    assert philox_4x32((0, 0), (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox_4x32((ones, ones), (ones,) * 4) == (
        *(0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    )
    assert philox_4x32(
        (0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    ) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.mark.parametrize(
    ("seed", "epoch", "which", "engine_seed", "n", "first"),
    [
        (TRAIN_SEED, 0, 0, 1674209159, 12, [5, 2, 11, 7, 9, 4, 0, 3, 6, 8, 1, 10]),
        (TRAIN_SEED, 0, 0, 1674209159, 97655, [64115, 12393, 13944, 19632, 82918]),
        (TRAIN_SEED, 1, 3, 1946354301, 11, [0, 6, 3, 8, 5, 2, 1, 10, 4, 9, 7]),
        (EVAL_SEED, 0, 0, 3329333824, 20, [17, 10, 3, 11, 6, 9, 0, 8, 16, 18, 7, 14, 12]),
        (42, 0, FILE_ORDER, 916120045, 5, [0, 3, 4, 1, 2]),
        (TRAIN_SEED, 0, FILE_ORDER, 2266180644, 8, [0, 5, 7, 4, 2, 3, 1, 6]),
    ],
)
def test_orders_of_llmq(seed, epoch, which, engine_seed, n, first):
    assert philox_4x32((seed, 0), (epoch, which, 0, 0))[0] == engine_seed
    order = epoch_order(n, seed, epoch, which)
    assert order[: len(first)].tolist() == first
    np.testing.assert_array_equal(np.sort(order), np.arange(n))
    assert order.dtype == np.int32


# CRC-32 of the int32 permutations of std::ranges::shuffle, g++ 12.2, default_random_engine(seed).
# 46340 is the last length with one draw for two elements, and many rejected draws.
GXX = [
    (1, 1, 0x2144DF1C),
    (1, 2, 0xA988DFF7),
    (1, 3, 0x2F523F95),
    (0, 50, 0xE75E2322),
    (2147483647, 51, 0xE7CB58A3),
    (4294967295, 1000, 0xC484FBFB),
    (1674209159, 4096, 0x04E53E00),
    (12345, 46339, 0x89F548E6),
    (12345, 46340, 0xEB4FFECD),
    (12345, 46341, 0x1BD33B75),
    (777, 100000, 0xE8BD437C),
    (99, 200001, 0xAE62878A),
]


@pytest.mark.parametrize(("engine_seed", "n", "crc"), GXX)
def test_shuffle_is_that_of_libstdcxx(engine_seed, n, crc):
    assert zlib.crc32(shuffled(n, engine_seed).tobytes()) == crc


def test_seed_has_64_bits():
    wide = 7 | 1 << 32
    assert epoch_order(50, wide, 0, 0).tolist() != epoch_order(50, 7, 0, 0).tolist()
