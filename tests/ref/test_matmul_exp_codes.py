"""References of logits' fp8 product with codes of exponentials behind it, against torch in F64."""

import numpy as np
import torch

from llmq.base.dtypes import E4M3, E5M2
from llmq.ref.matmul_exp_codes import CASES, TILE, exp_codes_again, matmul_exp_codes


def test_equals_torch(rng):
    M, N, K, vocab = CASES["tiles"]
    a, b = (rng.normal(size=(n, K)).astype(E4M3.numpy) for n in (M, N))
    scales = [np.full(1, x, np.float32) for x in (0.25, 1.5)]
    shift = rng.normal(size=M).astype(np.float32)
    targets = rng.integers(0, vocab, M).astype(np.int32)
    targets[::3] = -1
    e = np.full((M, N), np.nan, E5M2.numpy)
    sums, logits = np.full((-(-N // TILE), M), np.nan, np.float32), np.full(M, np.nan, np.float32)
    operands = (a, b, *scales, shift, targets)
    matmul_exp_codes(e, sums, logits, *operands, M, N, K, vocab)
    wide = [torch.from_numpy(x.astype(np.float64)) for x in (a, b, shift)]
    exact = 0.375 * (wide[0] @ wide[1].T)
    rows, columns = np.flatnonzero(targets >= 0), targets[targets >= 0]
    # BF16 keeps 8 bits of a logit.
    np.testing.assert_allclose(logits[rows], exact[rows, columns], rtol=2**-8, atol=2**-10)
    assert np.isnan(logits[targets < 0]).all()
    want = (exact.to(torch.bfloat16).double() - wide[2][:, None]).exp()
    want[:, vocab:] = 0
    want[rows, columns] = 0
    found = e.astype(np.float64)
    # Two bits of what is normal; the smallest number is 2^-16.
    np.testing.assert_allclose(found, want.clamp(max=57344), rtol=2**-3 * 1.01, atol=2**-17 * 1.01)
    by_tile = torch.nn.functional.pad(want, (0, -N % TILE)).view(M, -1, TILE).sum(2).T
    np.testing.assert_allclose(sums, by_tile, rtol=0.05)

    some, changed = np.array([7, 40, 41], np.int32), np.zeros_like(e)
    listed = np.array([3, *some, *[9] * (M - 3)], np.int32)
    of_some = np.concatenate([a[some], a[3:]])
    again = (changed, of_some, b, *scales, shift, targets, listed)
    exp_codes_again(*again, M, N, K, vocab)
    np.testing.assert_array_equal(changed[some].view(np.uint8), e[some].view(np.uint8))
    assert not np.delete(changed, some, axis=0).astype(np.float32).any()
