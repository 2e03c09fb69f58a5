"""Reference of the gradient norm against its definition."""

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16, STAT, STATS
from llmq.ref.update import global_norm as ref
from tests.harness import step_scalars


@pytest.mark.parametrize("dtype", [np.float32, BF16.numpy])
def test_partials_add_up_to_torchs_norm(rng, dtype):
    xs = [rng.normal(size=shape).astype(dtype) for shape in ((3,), (300, 500))]
    stats = np.zeros(len(STATS))
    for x in xs:
        partials = np.full(6, np.nan)
        ref.global_norm_partials(partials, x, x.size)
        ref.global_norm_sum(stats, partials, 6)
    tensors = [torch.from_numpy(x.astype(np.float64)) for x in xs]
    want = torch.nn.utils.get_total_norm(tensors).item() ** 2
    # F32 sums over 64k squares, added up by the BLAS in some hundred strands.
    np.testing.assert_allclose(stats[STAT["norm_squared"]], want, rtol=1e-5)


@pytest.mark.parametrize(
    "squared, tokens, clip, norm, scale, skip",
    [
        (900.0, 10, 0.0, 3.0, 0.1, 0),  # no clipping
        (900.0, 10, 5.0, 3.0, 0.1, 0),  # below the limit
        (900.0, 10, 1.5, 3.0, 0.05, 0),  # clipped to half
        (0.0, 10, 1.0, 0.0, 0.1, 0),
        (np.inf, 10, 1.0, np.inf, 0.0, 1),
        (np.nan, 10, 1.0, np.nan, 0.0, 1),
        (0.0, 0, 1.0, 0.0, 0.0, 1),  # all targets masked
    ],
)
def test_finish(squared, tokens, clip, norm, scale, skip):
    stats = np.zeros(len(STATS))
    stats[STAT["norm_squared"]], stats[STAT["count"]] = squared, tokens
    words = step_scalars(grad_clip=clip, lr=7, skip_update=1 - skip, grad_scale=9)
    ref.global_norm_finish(stats, words)
    assert stats[STAT["norm"]] == norm or np.isnan(norm)
    np.testing.assert_array_equal(
        words, step_scalars(grad_clip=clip, lr=7, skip_update=skip, grad_scale=scale)
    )
