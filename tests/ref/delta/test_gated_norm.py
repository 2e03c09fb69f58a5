"""References of the gated norm against transformers' module."""

import numpy as np
import pytest
import torch
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridRMSNormGated,
)
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


@pytest.mark.parametrize("gate_first", [False, True])
def test_gradients_equal_torch(rng, gate_first):
    x, d_out = rng.normal(size=(2, ROWS, HEADS * SIZE))
    gate, weight = rng.normal(size=(ROWS, COLUMNS)), rng.normal(size=(HEADS, SIZE))
    weight = weight if gate_first else weight[:1]
    leaves = [torch.tensor(v, requires_grad=True) for v in (x, gate, weight)]
    heads = [v.unflatten(-1, (HEADS, SIZE)) for v in (leaves[0], leaves[1][:, GATE])]
    if gate_first:
        gated = heads[0] * torch.nn.functional.silu(heads[1])
        rstd = (gated.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
        want = (leaves[2] * (gated * rstd)).flatten(1)
    else:
        want = torch_forward(*heads, leaves[2]).flatten(1)
    gradients = torch.autograd.grad((want * torch.tensor(d_out)).sum(), leaves)

    out, d_x, d_gate = np.full_like(x, np.nan), np.full_like(x, np.nan), np.zeros_like(gate)
    how = {"head_dim": SIZE, "gate_first": int(gate_first)}
    ref.gated_norm_forward(out, x, gate, weight, *SIZES, **how)
    partial = np.full((2, weight.size), np.nan)
    made = (d_x, d_gate, partial)
    ref.gated_norm_backward(*made, d_out, x, gate, weight, *SIZES, **how)
    got = (out, d_x, d_gate, partial.sum(0).reshape(weight.shape))
    # F64 on both sides: sums in another order.
    for one, other in zip(got, (want, *gradients), strict=True):
        np.testing.assert_allclose(one, other.detach().numpy(), rtol=1e-10, atol=1e-12)


MODULES = {
    False: lambda: Qwen3_5RMSNormGated(SIZE, EPS),
    True: lambda: GraniteMoeHybridRMSNormGated(HEADS * SIZE, SIZE, EPS),
}


@pytest.mark.parametrize("gate_first", MODULES)
def test_bf16_is_rounded_as_transformers_rounds(rng, gate_first):
    """Mamba-2's norm gets a state that is not rounded, and the next product rounds its result."""
    x, gate = rng.normal(size=(2, ROWS, HEADS * SIZE)).astype(BF16.numpy)
    norm = MODULES[gate_first]().bfloat16()
    weight = rng.normal(size=norm.weight.shape).astype(BF16.numpy)
    norm.weight.data = torch.tensor(weight.astype(np.float32)).bfloat16()
    width = HEADS * SIZE if gate_first else SIZE
    tensors = [torch.tensor(v.astype(np.float32)).view(-1, width) for v in (x, gate)]
    tensors = [t if gate_first else t.bfloat16() for t in tensors]
    want = norm(*tensors).detach().bfloat16().float().numpy().reshape(x.shape)
    out = np.empty_like(x)
    how = {"head_dim": SIZE, "gate_first": int(gate_first)}
    sizes = (EPS, ROWS, HEADS, HEADS * SIZE, 0)
    ref.gated_norm_forward(out, x, gate, weight.reshape(-1, SIZE), *sizes, **how)
    # rstd and silu may be one F32 rounding off, which now and then turns a rounding to BF16.
    np.testing.assert_allclose(out.astype(np.float32), want, rtol=2**-6)
    assert (out.astype(np.float32) != want).mean() < 1e-2
