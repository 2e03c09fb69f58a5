"""References of the gated norm against transformers' module."""

import numpy as np
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from llmq.base.dtypes import BF16
from llmq.ref.delta import gated_norm as ref

EPS = 1e-6
ROWS, HEADS, SIZE, COLUMNS, OFFSET = 7, 3, 16, 60, 5
SIZES = (EPS, ROWS, HEADS, COLUMNS, OFFSET)
GATE = slice(OFFSET, OFFSET + HEADS * SIZE)


def torch_forward(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x, gate: (rows, heads, size)."""
    rstd = (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
    return weight * (x * rstd) * torch.nn.functional.silu(gate)


def test_gradients_equal_torch(rng):
    x, d_out = rng.normal(size=(2, ROWS, HEADS * SIZE))
    gate, weight = rng.normal(size=(ROWS, COLUMNS)), rng.normal(size=SIZE)
    leaves = [torch.tensor(v, requires_grad=True) for v in (x, gate, weight)]
    heads = [v.unflatten(-1, (HEADS, SIZE)) for v in (leaves[0], leaves[1][:, GATE])]
    want = torch_forward(*heads, leaves[2]).flatten(1)
    gradients = torch.autograd.grad((want * torch.tensor(d_out)).sum(), leaves)

    out, d_x, d_gate = np.full_like(x, np.nan), np.full_like(x, np.nan), np.zeros_like(gate)
    ref.gated_norm_forward(out, x, gate, weight, *SIZES, head_dim=SIZE)
    partial = np.full((2, SIZE), np.nan)
    made = (d_x, d_gate, partial)
    ref.gated_norm_backward(*made, d_out, x, gate, weight, *SIZES, head_dim=SIZE)
    # F64 on both sides: sums in another order.
    for one, other in zip((out, d_x, d_gate, partial.sum(0)), (want, *gradients), strict=True):
        np.testing.assert_allclose(one, other.detach().numpy(), rtol=1e-10, atol=1e-12)


def test_bf16_is_rounded_as_transformers_rounds(rng):
    x, gate = rng.normal(size=(2, ROWS, HEADS * SIZE)).astype(BF16.numpy)
    norm = Qwen3_5RMSNormGated(SIZE, EPS).bfloat16()
    weight = rng.normal(size=SIZE).astype(BF16.numpy)
    norm.weight.data = torch.tensor(weight.astype(np.float32)).bfloat16()
    tensors = [torch.tensor(v.astype(np.float32)).bfloat16().view(-1, SIZE) for v in (x, gate)]
    want, out = norm(*tensors).detach().float().numpy().reshape(x.shape), np.empty_like(x)
    ref.gated_norm_forward(out, x, gate, weight, EPS, ROWS, HEADS, HEADS * SIZE, 0, head_dim=SIZE)
    # rstd and silu may be one F32 rounding off, which now and then turns a rounding to BF16.
    np.testing.assert_allclose(out.astype(np.float32), want, rtol=2**-6)
    assert (out.astype(np.float32) != want).mean() < 1e-2
