"""References of codes of exponentials of logits, against torch's gradient in F64."""

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16, E4M3, E5M2
from llmq.ref import exp_codes as ref
from llmq.ref.cross_entropy import cross_entropy_forward_backward
from llmq.ref.matmul_exp_codes import TILE, exp_codes_again, matmul_exp_codes


@pytest.mark.parametrize("size", [1.0, 12.0], ids=["near", "far"])
def test_equals_torch(rng, size):
    """size: of logits; if it is large, some rows' codes are made again."""
    rows, columns, K, vocab = ref.CASES["blocks"]
    z_loss, scale = 1e-3, 2.0**-14
    x, weight = (
        (rng.normal(size=(n, K)) * (size * K**-0.5) ** 0.5).astype(E4M3.numpy)
        for n in (rows, columns)
    )
    half, two = np.full(1, 0.5, np.float32), np.full(1, 2, np.float32)
    targets = rng.integers(0, vocab, rows).astype(np.int32)
    targets[::5] = -100
    counted = targets >= 0
    losses, lse, factors, own, shift, picked = np.full((6, rows), np.nan, np.float32)
    e, sums = np.empty((rows, columns), E5M2.numpy), np.empty((-(-columns // TILE), rows), "f4")
    masks, listed = np.empty(-(-rows // 32), np.int32), np.empty(1 + rows, np.int32)
    listed_x, turned = np.zeros_like(x), np.empty((columns, rows), E5M2.numpy)
    d = rng.normal(size=(rows, K)).astype(BF16.numpy)
    ref.exp_codes_shift(shift, x, weight, half, two, targets, rows, K)
    sizes = (rows, columns, K, vocab)
    matmul_exp_codes(e, sums, picked, x, weight, half, two, shift, targets, *sizes)
    results = (losses, lse, factors, own, masks, shift)
    ref.exp_codes_finish(*results, sums, picked, targets, rows, len(sums), z_loss, 57344.0, 4096.0)
    ref.exp_codes_gather(listed, listed_x, masks, x, rows, K)
    exp_codes_again(e, listed_x, weight, half, two, shift, targets, listed, *sizes)
    assert (listed[0] > 0) == (size > 10)
    ref.exp_codes_turn(turned, e, factors, own, targets, rows, columns, 1 / scale)
    before = d.astype(np.float64)
    ref.exp_codes_input(d, factors, own, weight, two, targets, rows, K)

    wide = torch.from_numpy(weight.astype(np.float64))
    # Logits rounded as they are kept.
    logits = (torch.from_numpy(x.astype(np.float64)) @ wide[:vocab].T).bfloat16().double()
    logits.requires_grad_()
    wanted = logits.logsumexp(1)
    loss = torch.nn.functional.cross_entropy(
        logits, torch.from_numpy(targets).long(), reduction="none", ignore_index=-100
    )
    (loss + z_loss / 2 * wanted**2)[torch.from_numpy(counted)].sum().backward()
    gradient = logits.grad.numpy()
    # A logit that F32's sum has rounded the other way is off by 2^-8 of itself.
    np.testing.assert_allclose(lse, wanted.detach(), rtol=2**-8)
    np.testing.assert_allclose(losses, loss.detach(), rtol=2**-8, atol=2**-8 * size)
    rows_of, of_target = np.flatnonzero(counted), targets[counted]
    np.testing.assert_allclose(own[counted], gradient[rows_of, of_target], atol=0.02)
    found = e.astype(np.float64) * factors[:, None]
    assert not found[rows_of, of_target].any() and not found[~counted].any()
    found[rows_of, of_target] = own[rows_of]
    again = turned.T.astype(np.float64) * scale
    # Two bits, once or twice; nothing below 2^-17 of the target's probability.
    for values, rtol in ((found, 0.16), (again, 0.3)):
        assert not values[:, vocab:].any()
        close = np.isclose(values[:, :vocab], gradient, rtol=rtol, atol=2**-16)
        assert close.mean() > 0.995
    by = 2 * own[:, None] * weight[np.maximum(targets, 0)].astype(np.float64)
    want = np.where(counted[:, None], before * factors[:, None] + by, 0)
    np.testing.assert_allclose(d.astype(np.float64), want, rtol=2**-8, atol=2**-20)


def error(found, want):
    return np.linalg.norm(found - want) / np.linalg.norm(want)


def test_errors_beside_those_of_codes_of_the_gradient(rng):
    """Of both products' results, where cross-entropy writes codes of the gradient.

    The input's gradient has a smaller error, since a target's is exact: its probability may be
    nearly 1. Codes of the others are rounded twice for the weight's, without much of a difference.
    """
    rows, columns, K, size, scale = 512, 4096, 64, 2.0, 2.0**-15
    x = rng.normal(size=(rows, K)).astype(E4M3.numpy)
    weight = (rng.normal(size=(columns, K)) * size * K**-0.5).astype(E4M3.numpy)
    wide_x, wide = x.astype(np.float64), weight.astype(np.float64)
    logits = wide_x @ wide.T
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    # Tokens as often as the model says.
    targets = (p.cumsum(1) > rng.random((rows, 1))).argmax(1).astype(np.int32)
    p[np.arange(rows), targets] -= 1
    exact = p @ wide, p.T @ wide_x

    one, codes = np.ones(1, np.float32), np.empty((rows, columns), E5M2.numpy)
    losses, lse, factors, own, shift, picked = np.empty((6, rows), np.float32)
    cross_entropy_forward_backward(
        logits.astype(BF16.numpy),
        losses,
        lse,
        targets,
        codes,
        rows,
        columns,
        columns,
        0.0,
        1 / scale,
    )
    before = codes.astype(np.float64) * scale
    errors = error(before @ wide, exact[0]), error(before.T @ wide_x, exact[1])

    sums, masks = np.empty((-(-columns // TILE), rows), "f4"), np.empty(rows // 32, np.int32)
    turned = np.empty((columns, rows), E5M2.numpy)
    ref.exp_codes_shift(shift, x, weight, one, one, targets, rows, K)
    sizes = (rows, columns, K, columns)
    matmul_exp_codes(codes, sums, picked, x, weight, one, one, shift, targets, *sizes)
    results = (losses, lse, factors, own, masks, shift)
    ref.exp_codes_finish(*results, sums, picked, targets, rows, len(sums), 0.0, 57344.0, 4096.0)
    assert not masks.any()
    ref.exp_codes_turn(turned, codes, factors, own, targets, rows, columns, 1 / scale)
    d = (codes.astype(np.float32) @ wide.astype(np.float32)).astype(BF16.numpy)
    ref.exp_codes_input(d, factors, own, weight, one, targets, rows, K)
    found = (
        error(d.astype(np.float64), exact[0]),
        error(turned.astype(np.float64) * scale @ wide_x, exact[1]),
    )
    assert found[0] < 0.6 * errors[0] < 0.03
    assert found[1] < 1.2 * errors[1] < 0.06
