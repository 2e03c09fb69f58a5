"""The matrix product on a device against NumPy in double precision."""

from dataclasses import replace

import numpy as np
import pytest

from llmq.dtypes import BF16, F32, I32
from llmq.ops.matmul import matmul
from llmq.ref.matmul import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import run

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize(
    "operand, out", [(F32, F32), (BF16, BF16), (BF16, F32)], ids=["f32", "bf16", "bf16_to_f32"]
)
def test_product(dev, rng, case, operand, out):
    M, N, K, trans_a, trans_b = SMALL[case]
    a = rng.normal(size=(K, M) if trans_a else (M, K)).astype(operand.numpy)
    b = rng.normal(size=(N, K) if trans_b else (K, N)).astype(operand.numpy)
    bias = rng.normal(size=N).astype(out.numpy)
    start = rng.normal(size=(M, N)).astype(out.numpy)
    left, right = (x.astype(np.float64) for x in (a.T if trans_a else a, b.T if trans_b else b))
    for accumulate in (False, True):
        for with_bias in (False,) if accumulate else (False, True):

            def call(dev, out, a, b, bias, accumulate=accumulate):
                flags = {"trans_a": trans_a, "trans_b": trans_b, "accumulate": accumulate}
                matmul(dev, out, a, b, bias=bias, **flags)

            arrays = {
                "out": start if accumulate else np.full_like(start, np.nan),
                "a": a,
                "b": b,
                "bias": bias if with_bias else None,
            }
            got = run(dev, call, arrays)["out"].astype(np.float64)
            want = left @ right + accumulate * start.astype(np.float64)
            want += with_bias * bias.astype(np.float64)
            # F32 sums of K products of about 1 in any order, the partial sums below 4 sqrt(K) <=
            # 48; BF16 results are rounded once more.
            rtol = 2.0**-8 if out == BF16 else 0
            np.testing.assert_allclose(got, want, rtol=rtol, atol=48 * K * 2.0**-24)


def test_counts_and_checks():
    dev = PlanDevice(replace(HOST_SPEC, library_workspace=1024))

    def make(name, shape, dtype=BF16):
        return dev.alloc(name, shape, dtype, "Activations")

    out, a, b = make("out", (8, 16)), make("a", (8, 32)), make("b", (16, 32))
    matmul(dev, out, a, b, trans_b=True, accumulate=True)
    assert dev.flops["matmul"] == 2 * 8 * 16 * 32
    assert dev.bytes["matmul"] == 2 * (2 * 8 * 16 + 8 * 32 + 16 * 32)  # out twice, no workspace
    assert dev.sizes().stack == 1024
    with pytest.raises(ValueError, match=r"matmul: b must have shape \(32, 16\)"):
        matmul(dev, out, a, b)
    with pytest.raises(ValueError, match="matmul: out must have 2 dimensions"):
        matmul(dev, make("out", (1, 8, 16)), a, b, trans_b=True)
    with pytest.raises(TypeError, match="matmul: b must be BF16, got F32"):
        matmul(dev, out, a, make("b", (16, 32), F32), trans_b=True)
    with pytest.raises(TypeError, match="matmul: a must be F32 or BF16, got I32"):
        matmul(dev, out, make("a", (8, 32), I32), b, trans_b=True)
    with pytest.raises(TypeError, match="matmul: out must be F32 where a is F32"):
        matmul(dev, out, make("a", (8, 32), F32), make("b", (16, 32), F32), trans_b=True)
    with pytest.raises(TypeError, match="matmul: bias must be BF16, got F32"):
        matmul(dev, out, a, b, trans_b=True, bias=make("bias", (16,), F32))
    with pytest.raises(ValueError, match="bias and accumulate exclude each other"):
        bias = make("bias", (16,))
        matmul(dev, out, a, b, trans_b=True, bias=bias, accumulate=True)
