"""The attention reference against torch, finite differences and itself."""

import numpy as np
import pytest
import torch

from llmq.ref.attention import attention as ref

SMALL = {name: case for name, case in ref.CASES.items() if case[1] <= 150}
CUT_BATCH = (2, 512, 8, 1, 8)  # too many scores for one block of the reference


def _inputs(rng, case, dtype=np.float32):
    batch, seq_len, heads, kv_heads, head_dim = case
    qkv = rng.normal(size=(batch, seq_len, heads + 2 * kv_heads, head_dim)).astype(dtype)
    return qkv, rng.normal(size=(batch, seq_len, heads, head_dim)).astype(dtype)


def _forward(qkv, heads, kv_heads, starts=None, window=None, scale=None):
    batch, seq_len, _, head_dim = qkv.shape
    out = np.full((batch, seq_len, heads, head_dim), np.nan, qkv.dtype)
    lse = np.full((batch, heads, seq_len), np.nan, np.result_type(qkv.dtype, np.float32))
    sizes, scale = (seq_len, heads, kv_heads), scale or head_dim**-0.5
    ref.attention_forward(out, lse, qkv, *sizes, starts, window or seq_len, scale)
    return out, lse


def _backward(qkv, d_out, heads, kv_heads, starts=None, window=None, scale=None):
    out, lse = _forward(qkv, heads, kv_heads, starts, window, scale)
    d_qkv = np.full(qkv.shape, np.nan, qkv.dtype)
    sizes = (qkv.shape[1], heads, kv_heads)
    mask = (starts, window or qkv.shape[1], scale or qkv.shape[-1] ** -0.5)
    inputs = (d_out, out, lse, qkv, np.empty(0, np.uint8), 1)
    ref.attention_backward(d_qkv, None, *inputs, 1, *sizes, *mask)
    return d_qkv


def _torch(qkv, d_out, heads, kv_heads, starts=None, window=None, scale=None):
    """out, lse and d_qkv by torch in F64."""
    batch, seq_len = qkv.shape[:2]
    query, key = torch.arange(seq_len)[:, None], torch.arange(seq_len)
    seen = (key <= query) & (key > query - (window or seq_len)) & torch.ones(batch, 1, 1, 1).bool()
    if starts is not None:
        seen = seen & (key >= torch.from_numpy(starts)[:, None, :, None])
    packed = torch.from_numpy(qkv.astype(np.float64)).requires_grad_()
    q, k, v = (x.transpose(1, 2) for x in packed.split([heads, kv_heads, kv_heads], 2))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, enable_gqa=True, scale=scale
    ).transpose(1, 2)
    (d_qkv,) = torch.autograd.grad(out, packed, torch.from_numpy(d_out.astype(np.float64)))
    scores = q @ k.repeat_interleave(heads // kv_heads, 1).transpose(2, 3)
    scores = scores * (scale or qkv.shape[-1] ** -0.5)
    lse = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
    return out.detach().numpy(), lse.detach().numpy(), d_qkv.numpy()


@pytest.mark.parametrize("case", [*SMALL.values(), CUT_BATCH], ids=[*SMALL, "cut_batch"])
def test_equals_torch(rng, case):
    qkv, d_out = _inputs(rng, case)
    heads = case[2:4]
    want_out, want_lse, want_d_qkv = _torch(qkv, d_out, *heads)
    out, lse = _forward(qkv, *heads)
    # F32 sums of at most 150 terms of size 1, in another order than torch's F64.
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(out, want_out, **tolerance)
    np.testing.assert_allclose(lse, want_lse, **tolerance)
    np.testing.assert_allclose(_backward(qkv, d_out, *heads), want_d_qkv, **tolerance)


@pytest.mark.parametrize("window", [None, 1, 40, 64, 100])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_documents_and_windows_equal_torch(rng, scale, documents, window):
    case = (2, 150, 4, 2, 16)
    qkv, d_out = _inputs(rng, case)
    heads, starts = case[2:4], None
    if documents:
        starts = np.zeros((2, 150), np.int32)
        starts[0, 1:], starts[0, 80:], starts[1, 64:] = 1, 80, 64
    want_out, want_lse, want_d_qkv = _torch(qkv, d_out, *heads, starts, window, scale)
    out, lse = _forward(qkv, *heads, starts, window, scale)
    tolerance = {"rtol": 1e-5, "atol": 1e-5}  # as above
    np.testing.assert_allclose(out, want_out, **tolerance)
    np.testing.assert_allclose(lse, want_lse, **tolerance)
    got = _backward(qkv, d_out, *heads, starts, window, scale)
    np.testing.assert_allclose(got, want_d_qkv, **tolerance)


def test_documents_are_computed_as_if_alone(rng):
    """Bitwise, and whatever their neighbours hold."""
    qkv, d_out = _inputs(rng, (1, 90, 4, 2, 16))
    starts = np.repeat([0, 30, 70], [30, 40, 20])[None].astype(np.int32)
    qkv[:, 30:70], d_out[:, 30:70] = np.nan, np.nan
    out, lse = _forward(qkv, 4, 2, starts)
    d_qkv = _backward(qkv, d_out, 4, 2, starts)
    for part in (slice(0, 30), slice(70, 90)):
        alone = _forward(qkv[:, part], 4, 2)
        np.testing.assert_array_equal(out[:, part], alone[0])
        np.testing.assert_array_equal(lse[:, :, part], alone[1])
        gradient = _backward(qkv[:, part], d_out[:, part], 4, 2)
        np.testing.assert_array_equal(d_qkv[:, part], gradient)


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


def test_parts_of_heads_and_their_sum_are_the_whole(rng):
    heads, kv_heads, seq_len, head_dim = 6, 2, 17, 8
    sizes = (seq_len, heads, kv_heads, None, 5, 0.3)
    qkv = rng.normal(size=(1, seq_len, heads + 2 * kv_heads, head_dim)).astype(np.float32)
    d_out = rng.normal(size=(1, seq_len, heads, head_dim)).astype(np.float32)
    out, lse = np.empty_like(d_out), np.empty((1, heads, seq_len), np.float32)
    ref.attention_forward(out, lse, qkv, *sizes)
    inputs = (d_out, out, lse, qkv, None, 1)
    want, got = np.full_like(qkv, np.nan), np.full_like(qkv, np.nan)
    ref.attention_backward(want, None, *inputs, 1, *sizes)
    d_kv = np.full((2, heads, seq_len, head_dim), np.nan, np.float32)
    ref.attention_backward(got, d_kv, *inputs, heads, *sizes)
    assert np.isnan(got[:, :, heads:]).all()
    ref.attention_sum_heads(got, d_kv, seq_len, heads, kv_heads)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)  # F32 sums in another order
