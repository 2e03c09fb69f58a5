"""The attention reference against torch, finite differences and itself."""

import numpy as np
import pytest
import torch

from llmq.ref import attention as ref

SMALL = {name: case for name, case in ref.CASES.items() if not name.startswith("qwen")}


def _inputs(rng, case, dtype=np.float32):
    batch, seq_len, heads, kv_heads, head_dim = case
    qkv = rng.normal(size=(batch, seq_len, heads + 2 * kv_heads, head_dim)).astype(dtype)
    return qkv, rng.normal(size=(batch, seq_len, heads, head_dim)).astype(dtype)


def _forward(qkv, heads, kv_heads):
    batch, seq_len, _, head_dim = qkv.shape
    out = np.full((batch, seq_len, heads, head_dim), np.nan, qkv.dtype)
    lse = np.full((batch, heads, seq_len), np.nan, np.result_type(qkv.dtype, np.float32))
    ref.attention_forward(out, lse, qkv, seq_len, heads, kv_heads)
    return out, lse


def _backward(qkv, d_out, heads, kv_heads):
    out, lse = _forward(qkv, heads, kv_heads)
    d_qkv = np.full(qkv.shape, np.nan, qkv.dtype)
    sizes = (qkv.shape[1], heads, kv_heads)
    ref.attention_backward(d_qkv, d_out, out, lse, qkv, np.empty(0, np.uint8), 1, *sizes)
    return d_qkv


def _torch(qkv, d_out, heads, kv_heads):
    """out, lse and d_qkv by torch in F64."""
    packed = torch.from_numpy(qkv.astype(np.float64)).requires_grad_()
    q, k, v = (x.transpose(1, 2) for x in packed.split([heads, kv_heads, kv_heads], 2))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    (d_qkv,) = torch.autograd.grad(out, packed, torch.from_numpy(d_out.astype(np.float64)))
    scores = q @ k.repeat_interleave(heads // kv_heads, 1).transpose(2, 3) / qkv.shape[-1] ** 0.5
    future = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    lse = scores.masked_fill(future, -torch.inf).logsumexp(-1)
    return out.detach().numpy(), lse.detach().numpy(), d_qkv.numpy()


@pytest.mark.parametrize("tile", [ref.TILE, 1], ids=["whole_batch", "cut_batch"])
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_equals_torch(rng, monkeypatch, case, tile):
    monkeypatch.setattr(ref, "TILE", tile)
    qkv, d_out = _inputs(rng, case)
    heads = case[2:4]
    want_out, want_lse, want_d_qkv = _torch(qkv, d_out, *heads)
    out, lse = _forward(qkv, *heads)
    # F32 sums of at most 150 terms of size 1, in another order than torch's F64.
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(out, want_out, **tolerance)
    np.testing.assert_allclose(lse, want_lse, **tolerance)
    np.testing.assert_allclose(_backward(qkv, d_out, *heads), want_d_qkv, **tolerance)


def test_backward_equals_finite_differences(rng):
    case = (1, 5, 4, 2, 16)
    qkv, d_out = _inputs(rng, case, np.float64)
    d_qkv = _backward(qkv, d_out, *case[2:4])
    direction = rng.normal(size=qkv.shape)
    loss = [np.sum(d_out * _forward(qkv + s * 1e-5 * direction, *case[2:4])[0]) for s in (1, -1)]
    # F64 central differences: an error of 1e-10 by the step, 1e-11 by rounding.
    np.testing.assert_allclose(
        (loss[0] - loss[1]) / 2e-5, np.sum(d_qkv * direction), rtol=1e-8, atol=1e-8
    )


def test_large_scores_do_not_overflow(rng):
    qkv, d_out = _inputs(rng, (1, 70, 2, 1, 64))
    qkv *= 40
    out, lse = _forward(qkv, 2, 1)
    assert lse.max() > 200  # beyond exp's range in F32
    assert np.isfinite(out).all()
    assert np.isfinite(_backward(qkv, d_out, 2, 1)).all()


def test_decoding_in_pieces_equals_the_forward(rng):
    batch, seq_len, heads, kv_heads, head_dim = case = (2, 23, 4, 2, 64)
    qkv, _ = _inputs(rng, case)
    want, _ = _forward(qkv, heads, kv_heads)
    k_cache, v_cache = (np.full((batch, 32, kv_heads, head_dim), np.nan, np.float32) for _ in "kv")
    position = 0
    for n in (9, 1, 1, 12):
        piece = slice(position, position + n)
        out = np.full((batch, n, heads, head_dim), np.nan, np.float32)
        sizes = (position, n, 32, heads, kv_heads)
        ref.attention_decode(out, k_cache, v_cache, qkv[:, piece], *sizes)
        # Another order of the same F32 sums.
        np.testing.assert_allclose(out, want[:, piece], rtol=1e-5, atol=1e-6)
        position += n
    np.testing.assert_array_equal(k_cache[:, :seq_len], qkv[:, :, heads : heads + kv_heads])
    np.testing.assert_array_equal(v_cache[:, :seq_len], qkv[:, :, heads + kv_heads :])
    assert np.isnan(k_cache[:, seq_len:]).all()
