"""rope's kernels against their references: bit for bit, with any numbers."""

import numpy as np
import pytest

from llmq.dtypes import BF16, F32, I32
from llmq.ops import rope
from llmq.ref.rope import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.abs_max import check_abs_max
from tests.exact import run_exact
from tests.harness import GPU_SPEC, run

SMALL = [name for name in CASES if not name.startswith("qwen")]
BOTH = ["head_80", "head_128"]
SHAPES = pytest.mark.parametrize(
    "shape, dtype",
    [(CASES[name], BF16) for name in SMALL] + [(CASES[name], F32) for name in BOTH],
    ids=[f"{name}-bf16" for name in SMALL] + [f"{name}-f32" for name in BOTH],
)


def inputs(rng, shape, dtype, positions) -> dict:
    B, T, Hq, Hkv, Hd = shape
    qkv = rng.normal(size=(B, T, Hq + 2 * Hkv, Hd)).astype(np.float32)
    return {"qkv": qkv.astype(dtype.numpy), "table": rope.make_table(positions, Hd, 1e4, None)}


@SHAPES
@pytest.mark.parametrize("first_position", [0, 3])
def test_forward(dev, rng, shape, dtype, first_position):
    arrays = inputs(rng, shape, dtype, shape[1] + 4)

    def call(dev, qkv, table):
        rope.forward(dev, qkv, table, shape[2], shape[3], first_position)

    got = run_exact(dev, call, arrays)
    heads = shape[2] + shape[3]
    np.testing.assert_array_equal(got["qkv"][:, :, heads:], arrays["qkv"][:, :, heads:])
    # Position 0 is not rotated, every other one is.
    same = (got["qkv"][:, :, :heads] == arrays["qkv"][:, :, :heads]).all(axis=(0, 2, 3))
    np.testing.assert_array_equal(same, np.arange(shape[1]) + first_position == 0)


@SHAPES
def test_backward(dev, rng, shape, dtype):
    def call(dev, qkv, table):
        rope.backward(dev, qkv, table, shape[2], shape[3])

    run_exact(dev, call, inputs(rng, shape, dtype, shape[1]))


@pytest.mark.parametrize(
    "name, dtype", [("head_64", BF16), ("head_80", F32), ("head_128", BF16)], ids=str
)
def test_abs_max_includes_the_value_heads(dev, rng, name, dtype):
    shape = CASES[name]
    heads = shape[2] + shape[3]

    def call(dev, d_qkv, table, abs_max):
        rope.backward(dev, d_qkv, table, shape[2], shape[3], abs_max=abs_max)

    arrays = inputs(rng, shape, dtype, shape[1])
    arrays["d_qkv"] = arrays.pop("qkv")
    for large in (slice(heads), slice(heads, None)):
        arrays["d_qkv"][:, :, large] *= 8
        check_abs_max(dev, call, arrays, stored="d_qkv", spoiled="d_qkv")

    # Every element is looked at.
    for index in rng.integers(0, arrays["d_qkv"].size, size=8):
        alone = np.zeros_like(arrays["d_qkv"])
        alone.reshape(-1)[index] = 3
        operands = {"d_qkv": alone, "table": arrays["table"], "abs_max": np.zeros(1, np.float32)}
        got = run(dev, call, operands)
        assert got["abs_max"] == np.abs(got["d_qkv"].astype(np.float32)).max() > 2


def test_backward_undoes_forward(dev, rng):
    shape = CASES["head_96"]
    arrays = inputs(rng, shape, F32, shape[1])

    def call(dev, qkv, table):
        rope.forward(dev, qkv, table, shape[2], shape[3])
        rope.backward(dev, qkv, table, shape[2], shape[3])

    got = run_exact(dev, call, arrays)
    # Four products of size 1 and their roundings in F32; cos^2 + sin^2 is 1 to 2^-23.
    np.testing.assert_allclose(got["qkv"], arrays["qkv"], rtol=1e-5, atol=1e-6)


def test_grid_covers_every_pair():
    # 16 heads in chunks of 4, half a head of 64 BF16 in 4 vectors: 16 threads a token.
    assert rope.grid(32768, 16, 4) == 32768 * 16 // 128
    assert rope.grid(32768, 14, 8) == 32768 * 4 * 8 // 128
    assert rope.grid(1, 2, 4) == 1


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"qkv": ((2, 5, 8, 64), I32)}, TypeError, "qkv must be F32 or BF16"),
        ({"qkv": ((2, 5, 7, 64), BF16)}, ValueError, "qkv must have shape"),
        ({"qkv": ((2, 8, 64), BF16)}, ValueError, "qkv must have shape"),
        ({"qkv": ((2, 5, 8, 72), BF16)}, ValueError, "Hd must be a multiple of 16"),
        ({"table": ((7, 32, 2), F32)}, ValueError, "table must have at least 8 rows"),
        ({"table": ((8, 64, 2), F32)}, ValueError, "table must have shape"),
        ({"table": ((8, 32, 2), BF16)}, TypeError, "table must be F32"),
    ],
)
def test_wrong_arguments_raise(change, error, text):
    specs = {"qkv": ((2, 5, 8, 64), BF16), "table": ((8, 32, 2), F32)} | change
    plan = PlanDevice(GPU_SPEC)
    tensors = {k: plan.alloc(k, *v, "Activations") for k, v in specs.items()}
    with pytest.raises(error, match=f"rope.forward: .*{text}"):
        rope.forward(plan, **tensors, num_heads=4, num_kv_heads=2, first_position=3)
