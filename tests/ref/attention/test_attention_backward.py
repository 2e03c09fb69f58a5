"""Attention's backward in two steps, against the reference of the one that is checked by torch."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16
from llmq.ref.attention.attention import attention_backward, attention_forward
from llmq.ref.attention.attention_backward import CASES, attention_gradient, attention_statistics

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


@pytest.mark.parametrize("own_scale", [None, 0.3])
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_equals_one_step(rng, case, own_scale):
    batch, seq_len, heads, kv_heads, head_dim = case
    scale = own_scale or head_dim**-0.5
    shape = (batch, seq_len, heads + 2 * kv_heads, head_dim)
    qkv = rng.normal(size=shape).astype(BF16.numpy)
    d_out = rng.normal(size=(batch, seq_len, heads, head_dim)).astype(BF16.numpy)
    out, lse = np.empty_like(d_out), np.empty((batch, heads, seq_len), np.float32)
    seen = (None, seq_len, scale)
    attention_forward(out, lse, qkv, seq_len, heads, kv_heads, *seen)
    want, got = np.empty_like(qkv), np.full_like(qkv, np.nan)
    sizes = (seq_len, heads, kv_heads)
    attention_backward(want, None, d_out, out, lse, qkv, None, 1, 1, *sizes, *seen)
    statistics = np.full((batch, heads, seq_len // 64, 2, 64), np.nan, np.float32)
    taken = np.full(3, 7, np.int32)
    attention_statistics(statistics, taken, d_out, out, lse, 3, seq_len, heads)
    assert not taken.any()
    np.testing.assert_array_equal(
        statistics[0, 0, 0, 0], lse[0, 0, :64] * np.float32(np.log2(np.e))
    )
    rows = batch * seq_len
    attention_gradient(
        *(got.reshape(rows, -1), d_out.reshape(rows, -1), statistics, qkv.reshape(rows, -1)),
        *(taken, None, 1, batch, *sizes, scale, np.nan),
    )
    # lse goes to base 2 and back: 2^-23 of it, which probabilities have as a relative error.
    np.testing.assert_allclose(
        got.astype(np.float32), want.astype(np.float32), rtol=2**-7, atol=1e-5
    )


def gradient_of(qkv, d_out, heads, kv_heads):
    """d_qkv in F64, and out of it."""
    batch, seq_len, _, head_dim = qkv.shape
    scale = head_dim**-0.5
    out, lse = np.empty_like(d_out), np.empty((batch, heads, seq_len))
    attention_forward(out, lse, qkv, seq_len, heads, kv_heads, None, seq_len, scale)
    statistics = np.full((batch, heads, seq_len // 64, 2, 64), np.nan)
    taken, rows = np.full(3, 7, np.int32), batch * seq_len
    attention_statistics(statistics, taken, d_out, out, lse, 3, seq_len, heads)
    d_qkv = np.full((rows, qkv.size // rows), np.nan)
    given = (d_qkv, d_out.reshape(rows, -1), statistics, qkv.reshape(rows, -1), taken, None)
    attention_gradient(*given, 1, batch, seq_len, heads, kv_heads, scale, np.nan)
    return d_qkv.reshape(qkv.shape), out


@pytest.mark.parametrize("heads, kv_heads, head_dim", [(1, 1, 64), (4, 2, 64), (3, 1, 128)])
def test_gradients_are_slopes(rng, heads, kv_heads, head_dim):
    """Along random directions, of queries, of keys and of values alone."""
    h, shape = 1e-5, (2, 128, heads + 2 * kv_heads, head_dim)
    qkv, d_out = rng.normal(size=shape), rng.normal(size=(2, 128, heads, head_dim))
    d_qkv, _ = gradient_of(qkv, d_out, heads, kv_heads)
    for part in np.split(np.arange(shape[2]), [heads, heads + kv_heads]):
        direction = np.zeros(shape)
        direction[:, :, part] = rng.normal(size=(2, 128, len(part), head_dim))
        ends = [
            (gradient_of(qkv + s * h * direction, d_out, heads, kv_heads)[1] * d_out).sum()
            for s in (1, -1)
        ]
        # LOG2E is F32's, which probabilities have to the power of their scores: some 1e-7.
        assert (d_qkv * direction).sum() == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=2e-6)
