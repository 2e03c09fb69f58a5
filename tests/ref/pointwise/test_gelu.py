"""References of gelu against torch."""

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16
from llmq.ref.pointwise import gelu as ref


@pytest.mark.parametrize("shape", [(8,), (130, 1016)])  # the second spans several blocks
def test_forward_and_gradient_equal_torch(shape):
    rng = np.random.default_rng(0)
    x, d_out = rng.normal(size=shape) * 3, rng.normal(size=shape)
    tx = torch.tensor(x, requires_grad=True)
    want = torch.nn.functional.gelu(tx, approximate="tanh")
    (want_gradient,) = torch.autograd.grad(want, tx, torch.tensor(d_out))

    out, d_x = np.full(shape, np.nan), x.copy()
    ref.gelu_forward(out, x, x.size)
    ref.gelu_backward(d_x, d_out, d_x, x.size, None, d_out)  # in place, twice
    np.testing.assert_array_equal(d_out, out)
    # F64 on both sides. Torch's 1 + tanh(u) cancels for negative x, ours does not: absolute error.
    np.testing.assert_allclose(out, want.detach().numpy(), rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(d_x, want_gradient.numpy(), rtol=1e-12, atol=1e-13)


def test_the_square_of_relu_and_its_gradient_equal_torch():
    rng = np.random.default_rng(0)
    x, d_out = rng.normal(size=(2, 64))
    tx = torch.tensor(x, requires_grad=True)
    (want,) = torch.autograd.grad(torch.relu(tx) ** 2, tx, torch.tensor(d_out))
    out, d_x = np.full(64, np.nan), np.full(64, np.nan)
    ref.gelu_forward(out, x, 64, relu2=1)
    ref.gelu_backward(d_x, d_out, x, 64, relu2=1)
    np.testing.assert_array_equal(out, np.maximum(x, 0) ** 2)
    np.testing.assert_array_equal(d_x, want.numpy())


def test_large_arguments_neither_warn_nor_make_nan():
    x = np.array([-1e4, -100, 0, 100, 1e4], np.float32)
    out, d_x = np.empty_like(x), np.empty_like(x)
    with np.errstate(all="raise", under="ignore"):
        ref.gelu_forward(out, x, x.size)
        ref.gelu_backward(d_x, np.ones_like(x), x, x.size)
    np.testing.assert_array_equal(out, [0, 0, 0, 100, 1e4])
    np.testing.assert_array_equal(d_x, [0, 0, 0.5, 1, 1])


def test_bf16_is_the_rounded_f32_result():
    x = np.random.default_rng(0).normal(size=64).astype(BF16.numpy)
    wide, narrow = np.empty(64, np.float32), np.empty(64, BF16.numpy)
    ref.gelu_forward(wide, x.astype(np.float32), 64)
    ref.gelu_forward(narrow, x, 64)
    np.testing.assert_array_equal(narrow, wide.astype(BF16.numpy))
