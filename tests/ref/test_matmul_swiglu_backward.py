"""Reference of the down product's input gradient with the activation's behind it, against torch."""

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16, E4M3, E5M2
from llmq.ref.matmul_swiglu_backward import CASES, matmul_swiglu_backward


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("gelu", [0, 1])
def test_equals_torch(rng, gelu, fp8):
    """d_out is rounded to BF16, and what is computed of that is, too."""
    M, F, K, R = CASES["tiles"]

    def made(dtype, *shape, scale=1.0):
        array = (rng.normal(size=shape) * scale).astype(dtype.numpy)
        return array, torch.from_numpy(array.astype(np.float64))

    a, a64 = made(E5M2 if fp8 else BF16, M, K)
    b, b64 = made(E4M3 if fp8 else BF16, *((F, K) if fp8 else (K, F)))
    h, h64 = made(BF16, M, R)
    tail, tail64 = made(BF16, R, F)
    up_gate, wide = made(BF16, M, 2 * F, scale=4)
    scales = [np.array([s], np.float32) for s in (0.25, 0.5)] if fp8 else [None, None]
    d_out = (0.125 * (a64 @ b64.T) if fp8 else a64 @ b64) + h64 @ tail64

    wide.requires_grad_()
    up, gate = wide.split(F, dim=1)
    functional = torch.nn.functional
    out64 = (functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)) * up
    (want,) = torch.autograd.grad(out64, wide, d_out)

    d_up_gate = np.full((M, 2 * F), np.nan, BF16.numpy)
    out, abs_max = np.full((M, F), np.nan, BF16.numpy), np.zeros(1, np.float32)
    matmul_swiglu_backward(
        d_up_gate, a, b, h, tail, *scales, up_gate, M, F, K, abs_max,
        None, None, None, None, out, gelu=gelu,
    )  # fmt: skip
    # Half a unit of BF16's last place, twice where d_out was rounded first; beside what F32 loses.
    np.testing.assert_allclose(out.astype(np.float64), out64.detach(), rtol=2**-8, atol=1e-4)
    np.testing.assert_allclose(d_up_gate.astype(np.float64), want, rtol=2**-7, atol=2e-3)
    assert abs_max[0] == np.abs(d_up_gate.astype(np.float32)).max()
