"""Reference of normal random numbers: known answers, distribution, independence of the cut."""

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16
from llmq.ref.pointwise import elementwise as ref

SEED = (5, 6)


def normals(n: int, first: int = 0, seed=SEED, std: float = 1.0, dtype=np.float32) -> np.ndarray:
    out = np.full(n, np.nan, dtype)
    ref.random_normal(out, std, *seed, first, n)
    return out


def test_philox_equals_the_published_vector():
    # philox4x32, 10 rounds, counter 0, key 0 of the Random123 distribution's kat_vectors.
    words = ref.philox((0, 0), np.zeros(1, np.uint64))[:, 0]
    np.testing.assert_array_equal(words, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8])


def test_philox_of_other_counters_and_keys():
    # The algorithm once more, in Python integers.
    def rounds(x, k):
        for _ in range(10):
            p, q = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
            low = 0xFFFFFFFF
            x = [(q >> 32) ^ x[1] ^ k[0], q & low, (p >> 32) ^ x[3] ^ k[1], p & low]
            k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
        return x

    counters = [1, 2**32 - 1, 2**32, 2**45 + 12345]
    got = ref.philox((0xDEADBEEF, 0x12345678), np.array(counters, np.uint64))
    want = [rounds([c & 0xFFFFFFFF, c >> 32, 0, 0], [0xDEADBEEF, 0x12345678]) for c in counters]
    np.testing.assert_array_equal(got.T, want)


def test_distribution_is_normal():
    n = 1 << 18
    x = normals(n, std=2.0).astype(np.float64) / 2
    for power, want, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean() - want) < 5 * np.sqrt(variance / n)  # 5 sigma
    # Largest distance of the distribution functions (Kolmogorov-Smirnov), at one in a million.
    cdf = torch.special.ndtr(torch.from_numpy(np.sort(x))).numpy()
    assert np.abs(cdf - (np.arange(n) + 0.5) / n).max() < 2.7 / np.sqrt(n)
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 5 / np.sqrt(n)


@pytest.mark.parametrize("first, n", [(0, 4), (1, 2), (3, 1), (5, 11), (17, 64)])
def test_a_piece_equals_the_whole(first, n):
    np.testing.assert_array_equal(normals(n, first), normals(100)[first : first + n])


def test_blocks_do_not_show():
    """Each has four numbers a counter; a piece that begins before the seam has none there."""
    seam = 4 * ref.BLOCK
    np.testing.assert_array_equal(normals(seam + 500)[-999:], normals(999, seam - 499))


def test_other_seeds_and_far_elements_are_other_numbers():
    first = normals(64)
    for other in (normals(64, seed=(6, 6)), normals(64, seed=(5, 7)), normals(64, 2**36)):
        assert not np.isin(first, other).any()


def test_bf16_is_the_rounded_f32():
    got = normals(100, std=0.02, dtype=BF16.numpy)
    np.testing.assert_array_equal(got, normals(100, std=0.02).astype(BF16.numpy))
