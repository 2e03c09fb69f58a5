"""References of swiglu against torch."""

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16
from llmq.ref.pointwise import swiglu as ref


@pytest.mark.parametrize("gelu", [0, 1])
@pytest.mark.parametrize("rows, F", [(1, 8), (300, 344)])  # the second spans several row blocks
def test_forward_and_gradient_equal_torch(rows, F, gelu):
    rng = np.random.default_rng(rows)
    up_gate, d_out = rng.normal(size=(rows, 2 * F)) * 4, rng.normal(size=(rows, F))
    x = torch.tensor(up_gate, requires_grad=True)
    up, gate = x.split(F, dim=1)
    functional = torch.nn.functional
    want = (functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)) * up
    (want_gradient,) = torch.autograd.grad(want, x, torch.tensor(d_out))

    out, d_up_gate = np.full((rows, F), np.nan), up_gate.copy()
    ref.swiglu_forward(out, up_gate, rows, F, gelu=gelu)
    # In place, twice.
    ref.swiglu_backward(d_up_gate, d_out, d_up_gate, rows, F, None, d_out, gelu=gelu)
    np.testing.assert_array_equal(d_out, out)
    # F64 on both sides: a few roundings in another order. Torch's 1 + tanh cancels far below 0.
    cancels = 1e-12 if gelu else 0
    np.testing.assert_allclose(out, want.detach().numpy(), rtol=1e-13, atol=1e-15 + cancels)
    want_gradient = want_gradient.numpy()
    np.testing.assert_allclose(d_up_gate, want_gradient, rtol=1e-12, atol=1e-14 + cancels)


def test_large_gates_neither_warn_nor_make_nan():
    gate = np.array([-1e4, -100, 100, 1e4, -np.inf, 0, 1, 2], np.float32)
    up_gate = np.concatenate([np.ones(8, np.float32), gate])[None]
    out = np.empty((1, 8), np.float32)
    with np.errstate(all="raise", under="ignore", invalid="ignore"):
        ref.swiglu_forward(out, up_gate, 1, 8)
    np.testing.assert_array_equal(out[0, :4], [0, 0, 100, 1e4])
    # silu(-inf) = -inf * 0: torch returns NaN too.
    assert np.isnan(out[0, 4])


def test_bf16_is_the_rounded_f32_result():
    rng = np.random.default_rng(0)
    up_gate = rng.normal(size=(7, 48)).astype(BF16.numpy)
    wide, narrow = np.empty((7, 24), np.float32), np.empty((7, 24), BF16.numpy)
    ref.swiglu_forward(wide, up_gate.astype(np.float32), 7, 24)
    ref.swiglu_forward(narrow, up_gate, 7, 24)
    np.testing.assert_array_equal(narrow, wide.astype(BF16.numpy))
