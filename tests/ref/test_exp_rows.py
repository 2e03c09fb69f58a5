"""References of rows of exponentials of logits, against torch's gradient in F64."""

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16
from llmq.ref.exp_rows import CASES, exp_rows_finish, exp_rows_shift
from llmq.ref.matmul_fused import TILE, matmul_exp


@pytest.mark.parametrize("size", [3.0, 60.0], ids=["near", "far"])
def test_equals_torch(rng, size):
    """size: of logits; if it is large, some rows are computed again."""
    rows, columns, K, vocab = CASES["blocks"]
    z_loss, limit = 1e-3, float(np.exp(70))
    x, weight = (
        (rng.normal(size=(n, K)) * (size * K**-0.5) ** 0.5).astype(BF16.numpy)
        for n in (rows, columns)
    )
    targets = rng.integers(0, vocab, rows).astype(np.int32)
    targets[::5] = -100
    counted = targets >= 0
    losses, lse, factors, shift, picked = np.full((5, rows), np.nan, np.float32)
    e, sums = np.empty((rows, columns), BF16.numpy), np.empty((-(-columns // TILE), rows), "f4")
    exp_rows_shift(shift, x, weight, targets, rows, K, 32.0)
    operands = (x, weight, *[None] * 4, rows, columns, K)
    matmul_exp(*operands, e, sums, picked, shift, targets, vocab)
    before = x.astype(np.float64)
    exp_rows_finish(
        e, x, losses, lse, factors, sums, shift, picked, weight, targets, rows, columns, vocab, K,
        len(sums), z_loss, limit, scaled=1,
    )  # fmt: skip
    # Logits rounded as they are kept.
    wide = torch.from_numpy(before) @ torch.from_numpy(weight[:vocab].astype(np.float64)).T
    logits = wide.bfloat16().double().requires_grad_()
    wanted = logits.logsumexp(1)
    loss = torch.nn.functional.cross_entropy(
        logits, torch.from_numpy(targets).long(), reduction="none", ignore_index=-100
    )
    (loss + z_loss / 2 * wanted**2)[torch.from_numpy(counted)].sum().backward()
    # A logit that F32's sum has rounded the other way is off by 2^-8 of itself.
    np.testing.assert_allclose(lse, wanted.detach(), rtol=2**-8)
    np.testing.assert_allclose(losses, loss.detach(), rtol=2**-8, atol=2**-8 * size)
    gradient = e.astype(np.float64) * factors[:, None]
    close = np.isclose(gradient[:, :vocab], logits.grad, rtol=2**-7, atol=2**-9)
    assert close[counted].mean() > 0.99 and not gradient[:, vocab:].any()
    assert not gradient[~counted].any()
    assert (factors[counted] == 1).any() == (size > 50) and (factors[counted] != 1).any()
    np.testing.assert_allclose(x.astype(np.float64), before * factors[:, None], rtol=2**-8)
