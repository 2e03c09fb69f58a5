"""Reference of logits' product with exponentials behind it, against torch in F64."""

import numpy as np
import torch

from llmq.base.dtypes import BF16
from llmq.ref.matmul_exp import CASES, TILE, matmul_exp


def test_equals_torch(rng):
    M, N, K, vocab = CASES["tiles"]
    a, b = (rng.normal(size=(n, K)).astype(BF16.numpy) for n in (M, N))
    shift = rng.normal(size=M).astype(np.float32)
    targets = rng.integers(0, vocab, M).astype(np.int32)
    targets[::3] = -1
    e = np.full((M, N), np.nan, BF16.numpy)
    sums, logits = np.full((4, M), np.nan, np.float32), np.full(M, np.nan, np.float32)
    matmul_exp(e, sums, logits, a, b, shift, targets, M, N, K, vocab)
    wide = [torch.from_numpy(x.astype(np.float64)) for x in (a, b, shift)]
    exact = wide[0] @ wide[1].T
    counted = torch.from_numpy(targets >= 0)
    of_target = exact.gather(1, torch.from_numpy(targets).clamp(min=0).long()[:, None])[:, 0]
    # BF16 keeps 8 bits of a logit.
    np.testing.assert_allclose(logits[counted], of_target[counted], rtol=2**-8, atol=2**-10)
    assert np.isnan(logits[~counted]).all()
    # A logit rounded as logits are, but where F32's sum rounds the other way.
    want = (exact.to(torch.bfloat16).double() - wide[2][:, None]).exp()
    want[:, vocab:] = 0
    found = e.astype(np.float64)
    close = np.isclose(found, want, rtol=2**-8)
    assert close.mean() > 0.999
    np.testing.assert_allclose(found, want, rtol=0.2)
    by_tile = torch.nn.functional.pad(want, (0, -N % TILE)).view(M, -1, TILE).sum(2).T
    np.testing.assert_allclose(sums, by_tile, rtol=0.05)
