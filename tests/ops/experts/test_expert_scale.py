"""Factors of experts on a device against the reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.base.tensor import Accumulator
from llmq.ops.experts import expert_rows, expert_scale
from tests.harness import host_device, run, step_scalars
from tests.ops.experts.test_expert_rows import choices, eighths, sorted_arrays


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("S, E, top_k, kind", [(700, 5, 2, "different"), (9, 32, 4, "one_expert")])
def test_factors_of_experts_and_their_gradients(dev, rng, S, E, top_k, kind, dtype, wanted):
    chosen = choices(rng, S, E, top_k, kind)
    arrays = sorted_arrays(chosen, E) | {
        "out": np.full((S, top_k), np.nan, np.float32),
        "weights": eighths(rng, (S, top_k), F32),
        "scale": eighths(rng, E, dtype),
        "d_weights": eighths(rng, (S, top_k), F32),
        "d_scale": np.ones(E, np.float32),
        "scalars": step_scalars(),
    }

    def call(dev, order, place, starts, chosen, out, weights, scale, d_weights, d_scale, scalars):
        expert_rows.sort_rows(dev, order, place, starts, chosen)
        expert_scale.forward(dev, out, weights, scale, chosen)
        target = Accumulator(d_scale, True, scalars, 0) if wanted else None
        expert_scale.backward(dev, d_weights, target, weights, scale, order, starts)

    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    for name in ("out", "d_weights", "d_scale"):
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
