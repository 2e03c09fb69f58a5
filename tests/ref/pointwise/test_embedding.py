"""References of embedding against torch."""

import numpy as np
import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from llmq.base.dtypes import BF16
from llmq.ref.pointwise import embedding as ref
from tests.harness import step_scalars

B, T, C, V, P = 3, 21, 16, 40, 32


def _backward(d_weight, d_out, tokens, scalars, salt, scale=1.0, padding=-1):
    n, channels = tokens.size, d_out.shape[-1]
    order = np.empty(n, np.int32)
    ref.embedding_sort(order, np.empty(n, np.int32), tokens, n, len(d_weight), 8)
    more = (order, scalars, n, channels, scale, padding, 0, len(d_weight), salt)
    ref.embedding_backward(d_weight, None, d_out, tokens, *more)
    ref.embedding_finish(d_weight, None, tokens, *more)


@pytest.mark.parametrize("first_position", [0, 4])
def test_lookup_equals_torch(first_position):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, V, (B, T)).astype(np.int32)
    weight, positions = rng.normal(size=(V, C)), rng.normal(size=(P, C))
    want = torch.nn.functional.embedding(torch.tensor(tokens), torch.tensor(weight)).numpy()
    out = np.full((B, T, C), np.nan)
    ref.embedding_forward(out, tokens, weight, None, B * T, T, C, None)
    np.testing.assert_array_equal(out, want)
    starts = np.full((B, T), -first_position, np.int32)
    ref.embedding_forward(out, tokens, weight, positions, B * T, T, C, starts)
    np.testing.assert_array_equal(out, want + positions[first_position : first_position + T])


def test_sum_with_positions_is_rounded_once():
    rng = np.random.default_rng(0)
    weight, positions = (rng.normal(size=(8, C)).astype(BF16.numpy) for _ in range(2))
    tokens = np.arange(8, dtype=np.int32)[None]
    out = np.empty((1, 8, C), BF16.numpy)
    ref.embedding_forward(out, tokens, weight, positions, 8, 8, C, None)
    want = weight.astype(np.float32) + positions.astype(np.float32)
    np.testing.assert_array_equal(out[0], want.astype(BF16.numpy))


def test_scaled_lookup_is_that_of_gemma3():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, V, (B, T)).astype(np.int32)
    weight, d_out = rng.normal(size=(V, 72)), rng.normal(size=(B, T, 72))
    for dtype, torch_dtype in ((BF16.numpy, torch.bfloat16), (np.float64, torch.float64)):
        lookup = Gemma3TextScaledWordEmbedding(V, 72, None, embed_scale=72**0.5)
        lookup.weight.data = torch.tensor(weight).to(torch_dtype)
        want = lookup(torch.tensor(tokens))
        scale = lookup.embed_scale.to(torch_dtype).item()
        out = np.empty((B, T, 72), dtype)
        ref.embedding_forward(out, tokens, weight.astype(dtype), None, B * T, T, 72, None, scale)
        np.testing.assert_array_equal(out.astype(np.float64), want.detach().double().numpy())
    (d_want,) = torch.autograd.grad(want, lookup.weight, torch.tensor(d_out))
    d_weight = np.zeros((V, 72))
    _backward(d_weight, d_out, tokens, step_scalars(), 1, scale)
    # F64 on both sides: the product is rounded once a sum, not once an element.
    np.testing.assert_allclose(d_weight, d_want.numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("padding", [0, 3, V - 1])
def test_the_row_of_padding_gets_no_gradient_as_in_torch(padding):
    rng = np.random.default_rng(0)
    d_out = rng.normal(size=(B, T, C))
    for tokens in (rng.integers(0, 5, (B, T)), np.full((B, T), padding)):
        lookup = torch.nn.Embedding(V, C, padding, dtype=torch.float64)
        lookup(torch.tensor(tokens)).backward(torch.tensor(d_out))
        d_weight = np.ones((V, C))
        _backward(d_weight, d_out, tokens.astype(np.int32), step_scalars(), 1, padding=padding)
        # F64, in another order.
        np.testing.assert_allclose(d_weight - 1, lookup.weight.grad.numpy(), atol=1e-13)


def test_order_groups_equal_ids_and_keeps_their_order():
    tokens = np.array([[9, 1, 9, 0, 17, 1, 9, 8]], np.int32)
    order = np.empty(8, np.int32)
    ref.embedding_sort(order, np.empty(8, np.int32), tokens, 8, 32, 8)
    np.testing.assert_array_equal(tokens[0, order], [0, 8, 1, 1, 9, 9, 9, 17])
    np.testing.assert_array_equal(order, [3, 7, 1, 5, 0, 2, 6, 4])


def test_gradients_equal_torch():
    rng = np.random.default_rng(1)
    tokens = (rng.zipf(1.3, size=(B, T)) % V).astype(np.int32)
    d_out, before = rng.normal(size=(B, T, C)), rng.normal(size=(V, C))
    weight = torch.zeros((V, C), dtype=torch.float64, requires_grad=True)
    positions = torch.zeros((P, C), dtype=torch.float64, requires_grad=True)
    out = torch.nn.functional.embedding(torch.tensor(tokens), weight) + positions[:T]
    want_weight, want_positions = torch.autograd.grad(out, (weight, positions), torch.tensor(d_out))

    d_weight = before.copy()
    _backward(d_weight, d_out, tokens, step_scalars(), 0)
    # F64: only the order of the additions differs.
    np.testing.assert_allclose(d_weight, before + want_weight.numpy(), rtol=1e-12, atol=1e-13)
    absent = np.setdiff1d(np.arange(V), tokens)
    assert absent.size
    np.testing.assert_array_equal(d_weight[absent], before[absent])

    d_position = np.full((P, C), np.nan)
    ref.embedding_backward_positions(d_position, d_out, step_scalars(), P, B, T, C, 0, 0)
    np.testing.assert_allclose(d_position, want_positions.numpy(), rtol=1e-12)
    ref.embedding_backward_positions(d_position, d_out, step_scalars(), T, B, T, C, 1, 0)
    np.testing.assert_allclose(d_position, 2 * want_positions.numpy(), rtol=1e-12)


def test_bf16_gradient_is_unbiased_and_leaves_absent_rows():
    """Many salts average to the exact sum."""
    tokens = np.array([[2, 5, 2]], np.int32)
    d_out = np.full((1, 3, C), 1e-3, BF16.numpy)
    exact = 1 + 2 * float(d_out[0, 0, 0])
    total = np.zeros((8, C))
    for salt in range(1000):
        d_weight = np.ones((8, C), BF16.numpy)
        _backward(d_weight, d_out, tokens, step_scalars(seed=1), salt)
        total += d_weight.astype(np.float64)
    np.testing.assert_array_equal(np.delete(total, [2, 5], axis=0), 1000)
    # 16,000 draws of 1 or 1 + 2^-7: the standard error is below 2^-8 / sqrt(16000) = 3.1e-5.
    assert abs(total[2].mean() / 1000 - exact) < 4 * 3.1e-5
