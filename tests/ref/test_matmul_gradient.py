"""Reference of a product that is added to a gradient, against torch in F64."""

import numpy as np
import torch

from llmq.base.dtypes import BF16, E4M3
from llmq.ref.matmul_gradient import CASES, matmul_gradient
from tests.harness import step_scalars


def test_equals_torch(rng):
    """The product's rounding leaves half a unit of BF16's last place, the sum's a whole."""
    M, N, K = CASES["tiles"]
    a, b = (rng.normal(size=(n, K)).astype(E4M3.numpy) for n in (M, N))
    scales = [np.array([s], np.float32) for s in (0.3, 0.7)]
    before = (rng.normal(size=(M, N)) * 30).astype(BF16.numpy)
    wide = [torch.from_numpy(x.astype(np.float64)) for x in (a, b, before)]
    product = wide[0] @ wide[1].T * (float(scales[0][0]) * float(scales[1][0]))
    rounded = product.abs() * 2**-8 + 1e-4  # 1e-4: what F32 sums lose
    d, sizes = before.copy(), (M, N, K)
    matmul_gradient(d, a, b, *scales, step_scalars(), 0, 1, *sizes, part_steps=0)
    assert ((torch.from_numpy(d.astype(np.float64)) - product).abs() <= rounded).all()
    found = []
    for micro_step in range(16):
        d, scalars = before.copy(), step_scalars(seed=1, micro_step=micro_step)
        matmul_gradient(d, a, b, *scales, scalars, 1, 1, *sizes, part_steps=0)
        found.append(torch.from_numpy(d.astype(np.float64)))
    want = wide[2] + product
    error = torch.stack(found) - want
    assert (error.abs() <= rounded + want.abs() * 2**-7 + 1e-4).all()
    # Rounded up as often as it is far from the lower neighbour: no mean error of many.
    assert error.mean().abs() < want.abs().mean() * 2**-7 / 100
