"""References of cross_entropy against torch."""

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16, E4M3, E5M2, TOKEN_STATS
from llmq.ref.loss import cross_entropy as ref

STAT = {name: index for index, name in enumerate(TOKEN_STATS)}


def _rows(rows, V, Vp, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, Vp)) * 3
    logits[:, V:] = np.nan  # padding is ignored
    targets = rng.integers(0, V, rows).astype(np.int32)
    targets[1::3] = -100
    return logits, targets


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("rows, V, Vp", [(4, 61, 64), (9, 20000, 20032)])
def test_loss_and_gradient_equal_torch(rows, V, Vp, z_loss, weighted):
    logits, targets = _rows(rows, V, Vp)
    x = torch.tensor(logits[:, :V], requires_grad=True)
    counted = torch.tensor(targets) >= 0
    want_losses = torch.nn.functional.cross_entropy(
        x, torch.tensor(targets).long(), reduction="none", ignore_index=-100
    )
    want_lse = torch.logsumexp(x, dim=1)
    weights = np.random.default_rng(1).normal(size=rows) if weighted else None
    weight = torch.tensor(np.ones(rows) if weights is None else weights)
    objective = want_losses + z_loss / 2 * want_lse**2
    objective = (objective * weight)[counted].sum()
    (gradient,) = torch.autograd.grad(objective, x)

    losses, lse, only_losses, only_lse = (np.full(rows, np.nan) for _ in range(4))
    ref.cross_entropy_forward(only_losses, only_lse, logits, targets, rows, V, Vp)
    args = (targets, None, rows, V, Vp, z_loss, 1.0, weights)
    ref.cross_entropy_forward_backward(logits, losses, lse, *args)
    # F64 on both sides: rounding in another order; p - 1 cancels, hence the absolute part.
    np.testing.assert_allclose(losses, want_losses.detach().numpy(), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, want_lse.detach().numpy(), rtol=1e-13)
    np.testing.assert_allclose(logits[:, :V], gradient.numpy(), rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(logits[:, V:], 0)
    np.testing.assert_array_equal(logits[targets < 0], 0)
    np.testing.assert_array_equal(losses[targets < 0], 0)
    np.testing.assert_array_equal(only_losses, losses)
    np.testing.assert_array_equal(only_lse, lse)


def test_huge_logits_do_not_overflow():
    logits = np.array([[1e4, -1e4, 1e4, 0]], np.float32)
    losses, lse = np.empty(1, np.float32), np.empty(1, np.float32)
    with np.errstate(all="raise", under="ignore"):
        args = (np.zeros(1, np.int32), None, 1, 4, 4, 0.0, 1.0)
        ref.cross_entropy_forward_backward(logits, losses, lse, *args)
    np.testing.assert_array_equal(logits, [[-0.5, 0, 0.5, 0]])
    # log 2, rounded where F32 has a spacing of 2^-10.
    assert abs(losses[0] - np.log(2)) <= 2**-10


def test_bf16_gradient_is_the_rounded_f32_gradient():
    logits, targets = _rows(5, 61, 64)
    narrow = logits.astype(BF16.numpy)
    wide = narrow.astype(np.float32)
    results = []
    for x in (wide, narrow):
        losses, lse = np.empty(5, np.float32), np.empty(5, np.float32)
        ref.cross_entropy_forward_backward(x, losses, lse, targets, None, 5, 61, 64, 0.1, 1.0)
        results.append((losses, lse))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(narrow, wide.astype(BF16.numpy))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_codes_are_the_f32_gradient_in_fp8(dtype):
    logits, targets = _rows(5, 61, 64)
    wide, narrow = logits.astype(BF16.numpy).astype(np.float32), logits.astype(BF16.numpy)
    losses, lse = np.empty(5, np.float32), np.empty(5, np.float32)
    codes = np.full((5, 64), 0xA5, np.uint8).view(dtype.numpy)
    ref.cross_entropy_forward_backward(wide, losses, lse, targets, None, 5, 61, 64, 0.1, 1.0)
    ref.cross_entropy_forward_backward(narrow, losses, lse, targets, codes, 5, 61, 64, 0.1, 256.0)
    np.testing.assert_array_equal(codes, (wide * np.float32(256)).astype(dtype.numpy))
    assert narrow.tobytes() == logits.astype(BF16.numpy).tobytes()


def test_stats_add_and_take_the_maximum():
    B, T = 2, 1500
    rng = np.random.default_rng(0)
    targets = rng.integers(-1, 9, (B, T)).astype(np.int32)
    counted = targets >= 0
    losses = rng.random((B, T)).astype(np.float32) * counted
    lse = rng.random((B, T)).astype(np.float32) + 1
    lse[~counted] = 100  # masked rows do not count
    stats = np.arange(len(TOKEN_STATS), dtype=np.float64)
    ref.cross_entropy_stats(stats, losses, lse, targets, B * T, T)
    want = np.arange(len(TOKEN_STATS), dtype=np.float64)
    want[STAT["loss"]] += losses.astype(np.float64).sum()
    want[STAT["count"]] += counted.sum()
    want[STAT["loss_1k"]] += losses[:, :1024].astype(np.float64).sum()
    want[STAT["tokens_1k"]] += counted[:, :1024].sum()
    want[STAT["lse_max"]] = max(want[STAT["lse_max"]], lse[counted].max())
    want[STAT["lse_sum"]] += lse[counted].astype(np.float64).sum()
    np.testing.assert_array_equal(stats, want)

    stats[STAT["lse_max"]] = 0
    ref.cross_entropy_stats(stats, losses, lse, targets, B * T, T)
    assert stats[STAT["lse_max"]] == lse[counted].max()
