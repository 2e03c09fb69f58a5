"""Gated attention on a device against its reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.ops.attention import attention_gate
from llmq.ref.attention.attention_gate import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, compared, host_device, run

SMALL = {name: shape for name, shape in CASES.items() if "qwen" not in name}
SHAPES = pytest.mark.parametrize("name", SMALL)
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)


@DTYPES
@SHAPES
def test_split_and_merge(dev, rng, name, dtype):
    rows, Hq, Hkv, Hd = SMALL[name]
    product = rng.normal(size=(rows, 2 * (Hq + Hkv) * Hd)).astype(dtype.numpy)
    arrays = {
        "qkv": np.full((rows, (Hq + 2 * Hkv) * Hd), np.nan, dtype.numpy),
        "gate": np.full((rows, Hq * Hd), np.nan, dtype.numpy),
        "product": product,
    }
    heads = {"heads": Hq, "kv_heads": Hkv}
    parts = compared(dev, lambda dev, **t: attention_gate.split(dev, **t, **heads), arrays)
    parts["product"] = np.full_like(product, np.nan)
    back = compared(dev, lambda dev, **t: attention_gate.merge(dev, **t, **heads), parts)
    np.testing.assert_array_equal(back["product"], product)


@DTYPES
@SHAPES
def test_gate(dev, rng, name, dtype):
    rows, Hq, _, Hd = SMALL[name]
    x, gate, d_out = rng.normal(size=(3, rows, Hq * Hd)).astype(dtype.numpy)
    arrays = {"out": np.full_like(x, np.nan), "x": x, "gate": gate}
    back = {"d_x": np.full_like(x, np.nan), "d_gate": np.full_like(x, np.nan), "d_out": d_out}
    back |= {"x": x, "gate": gate}
    for call, given in ((attention_gate.forward, arrays), (attention_gate.backward, back)):
        got, want = run(dev, call, given), run(host_device(), call, given)
        for key in given:
            a, b = got[key].astype(np.float32), want[key].astype(np.float32)
            # exp of two libraries; BF16 rounds now and then to the other neighbour.
            rtol = 2**-7 if dtype == BF16 else 1e-6
            np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-7)


WIDE = {"product": ((3, 60), BF16), "qkv": ((3, 40), BF16), "gate": ((3, 20), BF16)}
WRONG = [
    (WIDE, ValueError, ".* must be a multiple of 8 on a GPU, got 10"),
    ({"product": ((3, 50), BF16)}, ValueError, "columns must be a multiple of 6, got 50"),
    ({"product": ((3, 48), F32)}, TypeError, "qkv must be F32"),
    ({"gate": ((3, 24), BF16)}, ValueError, "gate must have shape"),
]


@pytest.mark.parametrize("change, error, text", WRONG)
def test_wrong_arguments_raise(change, error, text):
    specs = {"qkv": ((3, 32), BF16), "gate": ((3, 16), BF16), "product": ((3, 48), BF16)} | change
    plan = PlanDevice(GPU_SPEC)
    tensors = {k: plan.alloc(k, *v, "Activations") for k, v in specs.items()}
    with pytest.raises(error, match=f"attention_gate.split: {text}"):
        attention_gate.split(plan, **tensors, heads=2, kv_heads=1)
