"""qk_norm's kernels against their references."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.base.tensor import Accumulator
from llmq.ops.attention import qk_norm
from llmq.ops.common import row_layout
from llmq.ref.attention.qk_norm import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.exact import coarse, nan, run_exact
from tests.harness import GPU_SPEC, host_device, run, step_scalars

EPS = 1e-6
SMALL = [name for name in CASES if not name.startswith(("qwen", "olmo"))]
BOTH = ["head_80", "head_128", "head_256", "wide_warp_per_row", "wide_widest"]
WIDE = pytest.mark.parametrize("wide", [False, True], ids=["heads", "wide"])
SHAPES = pytest.mark.parametrize(
    "shape, dtype",
    [(CASES[name], BF16) for name in SMALL] + [(CASES[name], F32) for name in BOTH],
    ids=[f"{name}-bf16" for name in SMALL] + [f"{name}-f32" for name in BOTH],
)


def call_forward(shape, **kind):
    kind |= {"num_heads": shape[2], "num_kv_heads": shape[3], "wide": shape[5]}
    return lambda dev, **t: qk_norm.forward(dev, **t, **kind, eps=EPS)


def widths(shape) -> tuple[int, int, int]:
    """The widths of a row of queries, and of keys; rows of a token."""
    _, _, Hq, Hkv, Hd, wide = shape
    return (Hq * Hd, Hkv * Hd, 2) if wide else (Hd, Hd, Hq + Hkv)


def forward_arrays(rng, shape, dtype) -> dict:
    (B, T, Hq, Hkv, Hd, _), (q, k, rows) = shape, widths(shape)
    return {
        "qkv": coarse(rng, (B, T, Hq + 2 * Hkv, Hd), dtype),
        "raw": nan((B, T, Hq + Hkv, Hd), dtype),
        "rstd": nan((B, T, rows), F32),
        "q_weight": coarse(rng, q, dtype),
        "k_weight": coarse(rng, k, dtype),
    }


@SHAPES
def test_forward(dev, rng, shape, dtype):
    arrays = forward_arrays(rng, shape, dtype)
    got = run_exact(dev, call_forward(shape), arrays)
    heads = shape[2] + shape[3]
    np.testing.assert_array_equal(got["raw"], arrays["qkv"][:, :, :heads])
    np.testing.assert_array_equal(got["qkv"][:, :, heads:], arrays["qkv"][:, :, heads:])


def test_queries_alone(dev, rng):
    """Without keys, the queries have the bits that they have beside some."""
    shape = CASES["head_64"]
    both = forward_arrays(rng, shape, BF16) | {
        "d_q_weight": nan(64, F32),
        "scalars": step_scalars(),
    }
    queries = slice(shape[2])
    alone = both | {n: both[n][:, :, queries].copy() for n in ("qkv", "raw", "rstd")}

    def call(dev, qkv, raw, rstd, q_weight, k_weight, d_q_weight, scalars):
        heads = {"num_heads": shape[2], "num_kv_heads": shape[3] if qkv.shape[2] > 4 else 0}
        qk_norm.forward(dev, qkv, raw, rstd, q_weight, k_weight, EPS, **heads)
        target = Accumulator(d_q_weight, False, scalars, 0)
        qk_norm.backward(dev, qkv, target, None, raw, rstd, q_weight, k_weight, **heads)

    got, want = run(dev, call, alone), run(dev, call, both)
    for name in ("qkv", "raw", "rstd"):
        np.testing.assert_array_equal(got[name], want[name][:, :, queries])
    np.testing.assert_array_equal(got["d_q_weight"], want["d_q_weight"])


def call_backward(shape, accumulate: bool, offset: bool = False):
    def call(dev, d_q_weight, d_k_weight, scalars, **t):
        given = {"d_q_weight": d_q_weight, "d_k_weight": d_k_weight}
        targets = {
            name: None if d is None else Accumulator(d, accumulate, scalars, i)
            for i, (name, d) in enumerate(given.items(), start=1)
        }
        kind = {"num_heads": shape[2], "num_kv_heads": shape[3], "wide": shape[5]}
        qk_norm.backward(dev, **targets, **t, **kind, offset=offset)

    return call


def backward_arrays(rng, shape, dtype, gradient_dtype) -> dict:
    """Inputs whose sums are exact: rstd is a power of two."""
    (B, T, Hq, Hkv, Hd, _), (q, k, rows) = shape, widths(shape)
    return {
        "d_qkv": coarse(rng, (B, T, Hq + 2 * Hkv, Hd), dtype),
        "d_q_weight": coarse(rng, q, gradient_dtype),
        "d_k_weight": coarse(rng, k, gradient_dtype),
        "raw": coarse(rng, (B, T, Hq + Hkv, Hd), dtype),
        "rstd": 2.0 ** rng.integers(-2, 2, size=(B, T, rows)).astype(np.float32),
        "q_weight": coarse(rng, q, dtype),
        "k_weight": coarse(rng, k, dtype),
        "scalars": step_scalars(seed=7, step=2, micro_step=1),
    }


@SHAPES
def test_backward(dev, rng, shape, dtype):
    arrays = backward_arrays(rng, shape, dtype, F32)
    arrays["d_q_weight"][:] = arrays["d_k_weight"][:] = np.nan
    got = run_exact(dev, call_backward(shape, False), arrays)
    heads = shape[2] + shape[3]
    np.testing.assert_array_equal(got["d_qkv"][:, :, heads:], arrays["d_qkv"][:, :, heads:])
    for name in ("d_k_weight", "d_q_weight"):  # then nobody wants any sums
        arrays[name] = None
        frozen = run_exact(dev, call_backward(shape, False), arrays)
        np.testing.assert_array_equal(frozen["d_qkv"], got["d_qkv"])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", ["head_256", "wide_warp_per_row"])
def test_offset(dev, rng, name, dtype):
    shape = CASES[name]
    run_exact(dev, call_forward(shape, offset=True), forward_arrays(rng, shape, dtype))
    run_exact(dev, call_forward(shape, once=True), forward_arrays(rng, shape, dtype))
    arrays = backward_arrays(rng, shape, dtype, F32)
    run_exact(dev, call_backward(shape, False, offset=True), arrays)


@WIDE
@pytest.mark.parametrize("gradient_dtype", [F32, BF16], ids=["f32", "bf16"])
def test_backward_adds_to_the_weight_gradients(dev, rng, gradient_dtype, wide):
    # 100 tokens: each block of the emulator's grid loops, and the last turn is not full.
    shape = (2, 50, 7, 3, 64, wide)
    arrays = backward_arrays(rng, shape, BF16, gradient_dtype)
    got = run_exact(dev, call_backward(shape, True), arrays)
    alone = run_exact(dev, call_backward(shape, False), arrays)
    for name in ("d_q_weight", "d_k_weight"):
        total = arrays[name].astype(np.float32) + alone[name].astype(np.float32)
        # Exact in F32; BF16 rounds each of the two by at most a step of 2^-7.
        rtol = 2**-6 if gradient_dtype == BF16 else 0
        np.testing.assert_allclose(got[name].astype(np.float32), total, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", ["head_80", "wide_four_warps_per_row"])
def test_ordinary_numbers(dev, rng, name, dtype):
    shape = CASES[name]
    arrays = forward_arrays(rng, shape, dtype)
    for name in ("qkv", "q_weight", "k_weight"):
        values = rng.normal(size=arrays[name].shape).astype(np.float32)
        arrays[name] = values.astype(dtype.numpy)
    got, want = (run(d, call_forward(shape), arrays) for d in (dev, host_device()))
    # Up to 3200 squares added in another order: some F32 roundings.
    np.testing.assert_allclose(got["rstd"], want["rstd"], rtol=1e-6)
    # Each of the two roundings to BF16 may turn: two steps of at most 2^-7.
    tolerance = {"rtol": 2e-6 if dtype == F32 else 2**-6, "atol": 2e-6}
    np.testing.assert_allclose(*(a["qkv"].astype(np.float32) for a in (got, want)), **tolerance)

    backward = backward_arrays(rng, shape, dtype, F32)
    backward |= {name: want[name] for name in ("raw", "rstd", "q_weight", "k_weight")}
    d_qkv = rng.normal(size=arrays["qkv"].shape).astype(np.float32)
    backward["d_qkv"] = d_qkv.astype(dtype.numpy)
    got, want = (run(d, call_backward(shape, False), backward) for d in (dev, host_device()))
    # A difference of two terms of size 1, rounded to T.
    np.testing.assert_allclose(*(a["d_qkv"].astype(np.float32) for a in (got, want)), **tolerance)
    for name in ("d_q_weight", "d_k_weight"):  # 21 terms of size 1, F32
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-5)


def test_wide_grid_divides_blocks_as_channels():
    layout = row_layout(2048, 2, qk_norm.LANE_VECTORS)
    assert qk_norm.wide_grid(layout, 16384, (16, 16), 8, 264) == (132, 132, 256)
    assert qk_norm.wide_grid(layout, 1, (16, 16), 8, 264) == (1, 1, 256)
    assert qk_norm.wide_grid(layout, 16384, (80, 1), 8, 8) == (7, 1, 256)
    assert qk_norm.wide_grid(layout, 16384, (80, 1), 8, 1) == (1, 1, 256)


def test_grid_gives_each_kind_of_head_its_share():
    assert [qk_norm.group_size(d) for d in (64, 80, 96, 128, 256)] == [8, 16, 16, 16, 32]
    assert qk_norm.grid(32768, 14, 2, group=8, max_blocks=528) == (462, 66)
    assert qk_norm.grid(1, 1, 1, group=8, max_blocks=528) == (1, 1)
    assert qk_norm.grid(1000, 64, 1, group=8, max_blocks=8) == (7, 1)


def of_head_dim(Hd: int, queries: int, keys: int) -> dict[str, tuple]:
    """Tensors with heads of this size, and weights of these."""
    tensors = {"qkv": ((1, 2, 8, Hd), BF16), "raw": ((1, 2, 6, Hd), BF16)}
    return tensors | {"q_weight": ((queries,), BF16), "k_weight": ((keys,), BF16)}


WRONG_HEAD = of_head_dim(68, 68, 68), "Hd must be a multiple of 8 on a GPU"
WRONG_ROW = of_head_dim(3, 12, 6), r"num_heads\*Hd must be a multiple of 8 on a GPU"


@pytest.mark.parametrize("wide, change, text", [(False, *WRONG_HEAD), (True, *WRONG_ROW)])
def test_wrong_sizes_raise(wide, change, text):
    specs = change | {"rstd": ((1, 2, 2 if wide else 6), F32)}
    plan = PlanDevice(GPU_SPEC)
    tensors = {k: plan.alloc(k, *v, "Activations") for k, v in specs.items()}
    with pytest.raises(ValueError, match=f"qk_norm.forward: .*{text}"):
        qk_norm.forward(plan, **tensors, eps=EPS, num_heads=4, num_kv_heads=2, wide=wide)
