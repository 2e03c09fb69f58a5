"""Reference of Muon's kernels against torch's operations."""

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16, E4M3
from llmq.ref.common import decode_fp8
from llmq.ref.update import muon as ref
from tests.harness import step_scalars


def to_torch(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.astype(np.float32))


@pytest.mark.parametrize("n", [384, 2 * ref.BLOCK + 128], ids=["short", "three_blocks"])
def test_propose_is_torchs_momentum(rng, n):
    momentum = 0.95
    m, change = np.zeros(n, np.float32), np.empty(n, BF16.numpy)
    buffer = torch.zeros(n)
    for step in range(3):
        grad = rng.normal(size=n).astype(np.float32)
        scalars = step_scalars(step=step, grad_scale=0.25)
        ref.muon_propose(change, grad, m, None, scalars, 1 - momentum, 3, 0, n)
        of_torch = to_torch(grad) / 4
        buffer.lerp_(of_torch, 1 - momentum)
        want = of_torch.lerp(buffer, momentum)
        np.testing.assert_allclose(m, buffer.numpy(), rtol=1e-5, atol=1e-6)  # in another order
        # Rounding to BF16 once, of numbers that may lie on both sides of a border.
        np.testing.assert_allclose(change.astype(np.float32), want.numpy(), rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_rounded_momentum_is_right_on_average(rng, dtype):
    n = 128 * 512
    grad, change = rng.normal(size=128).astype(np.float32), np.empty(n, BF16.numpy)
    m, scale = np.zeros(n, dtype.numpy), None
    if dtype == E4M3:
        scale = np.zeros(n // 128, np.float32)
    scalars = step_scalars(step=1, grad_scale=1, seed=4)
    ref.muon_propose(change, np.tile(grad, 512), m, scale, scalars, 0.05, 3, 0, n)
    values = m.astype(np.float32) if scale is None else decode_fp8(m.reshape(-1, 128))
    values = values.reshape(-1, 128) * (1 if scale is None else scale[:, None])
    # A code is off by at most an eighth of the number, 512 of them by less on average.
    step = np.abs(grad * 0.05).max() * (2.0**-7 if scale is None else 2.0**-3)
    np.testing.assert_allclose(values.mean(axis=0), grad * 0.05, atol=5 * step / 512**0.5)


@pytest.mark.parametrize("size", [1e-9, 1.0, 300.0])
def test_normalize_is_torchs(rng, size):
    x = (size * rng.normal(size=(24, 40))).astype(BF16.numpy)
    of_torch = to_torch(x).bfloat16()
    of_torch.div_(of_torch.norm().clamp(min=1e-7))
    partials = np.square(x.astype(np.float64)).sum(axis=1)[None]
    ref.muon_normalize(x[None], x[None], partials, partials.size, x.size)
    np.testing.assert_allclose(
        # torch may round the norm to its neighbour in BF16.
        x.astype(np.float32), of_torch.float().numpy(), rtol=2.0**-6, atol=1e-9
    )  # fmt: skip


def test_apply(rng):
    n, lr, decay = 256, 0.02, 0.1
    param = rng.normal(size=n).astype(np.float32)
    change, work = rng.normal(size=n).astype(BF16.numpy), np.empty(n, BF16.numpy)
    want, u = param.astype(np.float64), change.astype(np.float64)
    want = want * (1 - lr / 4 * decay) - lr / 4 * u
    scalars = step_scalars(lr=lr)
    ref.muon_apply(param, work, change, scalars, 0.25, decay, 1, 0, n)
    np.testing.assert_allclose(param, want, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(work, param.astype(BF16.numpy))
