"""The RMSNorm of values on a device against its reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.ops.attention import value_norm
from llmq.ref.attention.value_norm import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, host_device, run

SMALL = {name: shape for name, shape in CASES.items() if "gemma" not in name}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_forward_and_backward(dev, rng, name, dtype):
    B, T, Hq, Hkv, Hd, keys = SMALL[name]
    qkv, d_qkv = rng.normal(size=(2, B, T, Hq + 2 * Hkv, Hd)).astype(dtype.numpy)
    product = rng.normal(size=(B * T, (Hq + Hkv) * Hd)).astype(dtype.numpy) if keys else None
    arrays = {"qkv": qkv, "rstd": np.full((B, T, Hkv), np.nan, np.float32), "product": product}

    def forward(dev, qkv, rstd, product=None):
        value_norm.forward(dev, qkv, rstd, product, 1e-6, Hq, Hkv)

    def backward(dev, d_qkv, qkv, rstd, d_product=None):
        value_norm.backward(dev, d_product, d_qkv, qkv, rstd, Hq, Hkv)

    made = run(host_device(), forward, arrays)
    back = {"d_qkv": d_qkv, "qkv": made["qkv"], "rstd": made["rstd"]}
    back["d_product"] = None if product is None else np.full_like(product, np.nan)
    for call, given in ((forward, arrays), (backward, back)):
        given = {key: value for key, value in given.items() if value is not None}
        got, want = run(dev, call, given), run(host_device(), call, given)
        for key in given:
            a, b = got[key].astype(np.float32), want[key].astype(np.float32)
            # Sums in another order; BF16 rounds now and then to the other neighbour.
            rtol = 2**-7 if dtype == BF16 else 2e-6
            np.testing.assert_allclose(a, b, rtol=rtol, atol=2e-6)


def test_wrong_arguments_raise():
    plan = PlanDevice(GPU_SPEC)
    qkv, rstd = (plan.alloc("x", shape, F32, "Activations") for shape in ((1, 2, 4, 12), (1, 2, 1)))
    with pytest.raises(ValueError, match="Hd must be a multiple of 8 on a GPU, got 12"):
        value_norm.forward(plan, qkv, rstd, None, 1e-6, 2, 1)
