"""rmsnorm's kernels against their references."""

import itertools
from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, I32
from llmq.base.operand import Fp8Out
from llmq.base.tensor import Accumulator
from llmq.ops import rmsnorm
from llmq.ops.common import RowLayout, row_layout
from llmq.ref.rmsnorm import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.abs_max import check_abs_max
from tests.exact import coarse, nan, run_exact
from tests.fp8_out import check_codes, check_fp8, outputs, with_fp8
from tests.harness import host_device, run, step_scalars

EPS = 1e-6
SMALL = [name for name in CASES if not name.startswith("qwen")]
# F32 rows are twice as long, so that two of its cases have the warps of the next BF16 case.
BOTH = ["narrow", "warp_per_row", "widest"]
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
SHAPES = pytest.mark.parametrize(
    "shape, dtype",
    [(CASES[name], BF16) for name in SMALL] + [(CASES[name], F32) for name in BOTH],
    ids=[f"{name}-bf16" for name in SMALL] + [f"{name}-f32" for name in BOTH],
)


@SHAPES
def test_forward(dev, rng, shape, dtype):
    rows, C = shape
    arrays = {
        "out": nan(shape, dtype),
        "rstd": nan(rows, F32),
        "x": coarse(rng, shape, dtype),
        "weight": coarse(rng, C, dtype),
    }
    run_exact(dev, lambda dev, **t: rmsnorm.forward(dev, **t, eps=EPS), arrays)


@SHAPES
def test_forward_residual(dev, rng, shape, dtype):
    rows, C = shape
    arrays = {
        "residual_out": nan(shape, dtype),
        "out": nan(shape, dtype),
        "rstd": nan(rows, F32),
        "residual": coarse(rng, shape, dtype),
        "branch": coarse(rng, shape, dtype),
        "weight": coarse(rng, C, dtype),
    }
    got = run_exact(dev, lambda dev, **t: rmsnorm.forward_residual(dev, **t, eps=EPS), arrays)

    del arrays["residual_out"]  # the same in place
    in_place = run(
        dev,
        lambda dev, residual, **t: rmsnorm.forward_residual(
            dev, residual, residual=residual, **t, eps=EPS
        ),
        arrays,
    )
    np.testing.assert_array_equal(in_place["residual"], got["residual_out"])
    np.testing.assert_array_equal(in_place["out"], got["out"])


@SHAPES
def test_post(dev, rng, shape, dtype):
    rows, C = shape
    arrays = {
        "out": nan(shape, dtype),
        "rstd": nan(rows, F32),
        "x": coarse(rng, shape, dtype),
        "residual": coarse(rng, shape, dtype),
        "weight": coarse(rng, C, dtype),
    }
    got = run_exact(dev, lambda dev, **t: rmsnorm.post(dev, **t, eps=EPS), arrays)
    run_exact(dev, lambda dev, **t: rmsnorm.post(dev, **t, eps=EPS), arrays | {"residual": None})

    del arrays["out"]  # the same in place
    in_place = run(
        dev,
        lambda dev, residual, **t: rmsnorm.post(dev, residual, residual=residual, **t, eps=EPS),
        arrays,
    )
    np.testing.assert_array_equal(in_place["residual"], got["out"])


def call_backward(accumulate: bool):
    """rmsnorm.backward on tensors by name; d_x None: in place over d_residual."""

    def call(dev, d_x, d_weight, scalars, d_residual, **t):
        target = Accumulator(d_weight, accumulate, scalars, 3)
        rmsnorm.backward(dev, d_x or d_residual, target, d_residual=d_residual, **t)

    return call


def backward_arrays(rng, shape, dtype, gradient_dtype) -> dict:
    """Inputs whose sums are exact: rstd is a power of two."""
    rows, C = shape
    return {
        "d_x": nan(shape, dtype),
        "d_weight": coarse(rng, C, gradient_dtype),
        "d_out": coarse(rng, shape, dtype),
        "x": coarse(rng, shape, dtype),
        "weight": coarse(rng, C, dtype),
        "rstd": 2.0 ** rng.integers(-2, 2, size=rows).astype(np.float32),
        "d_residual": coarse(rng, shape, dtype),
        "scalars": step_scalars(seed=7, step=2, micro_step=1),
    }


@SHAPES
def test_backward(dev, rng, shape, dtype):
    arrays = backward_arrays(rng, shape, dtype, F32)
    arrays["d_weight"][:] = np.nan
    got = run_exact(dev, call_backward(False), arrays)
    in_place = run(dev, call_backward(False), arrays | {"d_x": None})
    np.testing.assert_array_equal(in_place["d_residual"], got["d_x"])
    np.testing.assert_array_equal(in_place["d_weight"], got["d_weight"])


@pytest.mark.parametrize("gradient_dtype", [F32, BF16], ids=["f32", "bf16"])
def test_backward_adds_to_the_weight_gradient_and_works_without_residual(dev, rng, gradient_dtype):
    arrays = backward_arrays(rng, (19, 136), BF16, gradient_dtype) | {"d_residual": None}
    got = run_exact(dev, call_backward(True), arrays)
    alone = run_exact(dev, call_backward(False), arrays)
    total = arrays["d_weight"].astype(np.float32) + alone["d_weight"].astype(np.float32)
    # Exact in F32; BF16 rounds each of the two by at most a step of 2^-7.
    rtol = 2**-6 if gradient_dtype == BF16 else 0
    np.testing.assert_allclose(got["d_weight"].astype(np.float32), total, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    "name, dtype", [("narrow", BF16), ("narrow", F32), ("widest", BF16)], ids=str
)
def test_abs_max(dev, rng, name, dtype):
    rows, C = shape = CASES[name]
    arrays = {
        "out": nan(shape, dtype),
        "rstd": nan(rows, F32),
        "x": coarse(rng, shape, dtype),
        "weight": coarse(rng, C, dtype),
    }
    arrays["x"][:, -1] = 2  # not 0, which would make a NaN of an infinite weight
    call = partial(rmsnorm.forward, eps=EPS)
    check_abs_max(dev, call, arrays, stored="out", spoiled="weight")

    past = {"residual": coarse(rng, shape, dtype)}
    call = partial(rmsnorm.post, eps=EPS)
    check_abs_max(dev, call, arrays | past, stored="out", spoiled="weight")

    arrays["residual"] = arrays.pop("x")
    arrays |= {"residual_out": nan(shape, dtype), "branch": coarse(rng, shape, dtype)}
    arrays["branch"][:, -1] = 2
    call = partial(rmsnorm.forward_residual, eps=EPS)
    check_abs_max(dev, call, arrays, stored="out", spoiled="weight")

    arrays = backward_arrays(rng, shape, dtype, F32)
    check_abs_max(dev, call_backward(False), arrays, stored="d_x", spoiled="d_residual")


@DTYPES
def test_ordinary_numbers(dev, rng, dtype):
    rows, C = 21, 896
    x, weight, d_out, past = (
        rng.normal(size=s).astype(np.float32).astype(dtype.numpy)
        for s in [(rows, C), C, (rows, C), (rows, C)]
    )
    forward = {"out": nan(x.shape, dtype), "rstd": nan(rows, F32), "x": x, "weight": weight}
    got, want = (
        run(d, lambda dev, **t: rmsnorm.forward(dev, **t, eps=EPS), forward)
        for d in (dev, host_device())
    )
    # 896 squares added in another order: some F32 roundings.
    np.testing.assert_allclose(got["rstd"], want["rstd"], rtol=1e-6)
    # Each of the two roundings to BF16 may turn: two steps of at most 2^-7.
    tolerance = 2e-6 if dtype == F32 else 2**-6
    pair = [a["out"].astype(np.float32) for a in (got, want)]
    np.testing.assert_allclose(*pair, rtol=tolerance)

    arrays = backward_arrays(rng, (rows, C), dtype, F32) | {"d_x": nan(x.shape, dtype)}
    arrays |= {"x": x, "weight": weight, "d_out": d_out, "d_residual": past, "rstd": want["rstd"]}
    got, want = (run(d, call_backward(False), arrays) for d in (dev, host_device()))
    # d_x: a sum of three terms of size 1, rounded to T; d_weight: 21 terms of size 1, F32.
    pair = [a["d_x"].astype(np.float32) for a in (got, want)]
    np.testing.assert_allclose(*pair, rtol=tolerance, atol=2e-6)
    np.testing.assert_allclose(got["d_weight"], want["d_weight"], rtol=1e-5, atol=1e-5)


def test_row_layout_holds_every_row():
    for itemsize, lane_vectors in itertools.product((2, 4), (3, 4)):
        for columns in range(8, 8193, 8):
            layout = row_layout(columns, itemsize, lane_vectors)
            held = layout.warps * 32 * layout.vectors * 16
            assert held >= columns * itemsize > held - layout.warps * 32 * 16
            assert layout.vectors <= lane_vectors
    assert row_layout(896, 2, 4) == RowLayout(warps=1, vectors=4)
    assert row_layout(1536, 2, 4) == RowLayout(warps=2, vectors=3)
    assert RowLayout(warps=2, vectors=3).launch(20, block_warps=8, max_blocks=264) == (5, 256)
    assert RowLayout(warps=2, vectors=3).launch(32768, block_warps=8, max_blocks=264) == (264, 256)
    assert RowLayout(warps=16, vectors=4).launch(20, block_warps=8, max_blocks=264) == (20, 512)


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"rstd": ((4,), BF16)}, TypeError, "rstd must be F32, got BF16"),
        ({"out": ((4, 64), F32)}, TypeError, "out must be BF16, got F32"),
        ({"out": ((4, 32), BF16)}, ValueError, "out must have shape"),
        ({"weight": ((32,), BF16)}, ValueError, "weight must have shape"),
        ({"x": ((4, 64), I32)}, TypeError, "x must be F32 or BF16, got I32"),
        ({"x": ((2, 2, 64), BF16)}, ValueError, "x must have shape"),
        ({"x": ((4, 60), BF16)}, ValueError, "C must be a positive multiple of 8"),
        ({"x": ((4, 8200), BF16)}, ValueError, "at most 8192"),
    ],
)
def test_wrong_arguments_raise(change, error, text):
    specs = {"out": ((4, 64), BF16), "rstd": ((4,), F32), "x": ((4, 64), BF16)}
    specs |= {"weight": ((64,), BF16)} | change
    plan = PlanDevice(HOST_SPEC)
    tensors = {k: plan.alloc(k, *v, "Activations") for k, v in specs.items()}
    with pytest.raises(error, match=f"rmsnorm.forward: .*{text}"):
        rmsnorm.forward(plan, **tensors, eps=EPS)


@pytest.mark.parametrize(
    "shape, dtype, error, text",
    [((2,), F32, ValueError, "shape"), ((1,), BF16, TypeError, "must be F32, got BF16")],
)
def test_wrong_abs_max_raises(shape, dtype, error, text):
    specs = {"out": ((4, 64), BF16), "rstd": ((4,), F32), "x": ((4, 64), BF16)}
    specs |= {"weight": ((64,), BF16), "abs_max": (shape, dtype)}
    plan = PlanDevice(HOST_SPEC)
    tensors = {k: plan.alloc(k, *v, "Activations") for k, v in specs.items()}
    with pytest.raises(error, match=f"rmsnorm.forward: abs_max .*{text}"):
        rmsnorm.forward(plan, **tensors, eps=EPS)


def test_plan_counts_every_byte_once():
    plan = PlanDevice(HOST_SPEC)
    big = [plan.alloc(f"x{i}", (64, 128), BF16, "Activations") for i in range(4)]
    weight, rstd = plan.alloc("w", (128,), BF16, "Weights"), plan.alloc("r", (64,), F32, "Stack")
    scalars, d_weight = plan.alloc("s", (16,), I32, "Stack"), plan.alloc("d", (128,), F32, "Stack")
    target = Accumulator(d_weight, False, scalars, 0)
    rmsnorm.backward(plan, big[0], target, big[1], big[2], weight, rstd, big[3])
    partial = 8 * 128 * 4  # 64 rows of 8 a block
    assert plan.bytes["rmsnorm_backward"] == 4 * 64 * 128 * 2 + 2 * 128 + 4 * 64 + partial
    assert plan.bytes["rmsnorm_backward_weight"] == partial + 2 * 4 * 128 + 64
    assert plan.stack.used == 0 and plan.stack.high_water_mark == partial


# -- FP8 results ---------------------------------------------------------------------------------

# rows and C, multiples of 16; in every layout of rows
FP8_SHAPES = [(80, 80), (48, 896), (16, 1536), (48, 3584), (16, 8192)]
FP8_CASES = [(FP8_SHAPES[0], F32, E5M2), *((shape, BF16, E4M3) for shape in FP8_SHAPES)]


@pytest.mark.parametrize(("shape", "dtype", "format"), FP8_CASES, ids=str)
def test_fp8_forward_equals_two_steps(dev, rng, shape, dtype, format):
    rows, C = shape
    arrays = {
        "out": nan(shape, dtype),
        "rstd": nan(rows, F32),
        "x": coarse(rng, shape, dtype),
        "weight": coarse(rng, C, dtype),
    }
    fused = arrays | {"residual_out": nan(shape, dtype), "residual": arrays["x"]}
    fused["branch"] = coarse(rng, shape, dtype)
    del fused["x"]
    post = arrays | {"residual": coarse(rng, shape, dtype)}

    def call_post(dev, out, x, **t):
        """out is always written."""
        rmsnorm.post(dev, out or dev.alloc("o", shape, dtype, "Activations"), x=x, **t, eps=EPS)

    for device in (dev, host_device()):
        call = partial(rmsnorm.forward, eps=EPS)
        check_fp8(device, call, arrays, "out", format, "codes")
        check_fp8(device, call_post, post, "out", format, "codes")
        call = partial(rmsnorm.forward_residual, eps=EPS)
        check_fp8(device, call, fused, "out", format, "codes")


@pytest.mark.parametrize(("shape", "dtype", "format"), FP8_CASES, ids=str)
def test_fp8_backward_equals_two_steps(dev, rng, shape, dtype, format):
    rows, C = shape
    arrays = {
        "d_x": nan(shape, dtype),
        "d_out": coarse(rng, shape, dtype),
        "x": coarse(rng, shape, dtype),
        "weight": coarse(rng, C, dtype),
        "rstd": np.full(rows, 0.5, np.float32),
        "d_residual": coarse(rng, shape, dtype),
        "scalars": step_scalars(),
    }

    def backward(dev, d_x, x, scalars, **t):
        """d_x is always written; the gradients of parameters are of no interest here."""
        d_x = d_x or dev.alloc("d_x", shape, dtype, "Activations")
        targets = {
            name: Accumulator(dev.alloc(name, (C,), F32, "Gradients"), False, scalars, 1)
            for name in ("d_weight",)
        }
        rmsnorm.backward(dev, d_x, x=x, **targets, **t)

    for device in (dev, host_device()):
        check_fp8(device, backward, arrays, "d_x", format, "codes")


@pytest.mark.parametrize("shape", FP8_SHAPES, ids=str)
def test_gradients_of_parameters_do_not_depend_on_fp8(dev, rng, shape):
    rows, C = shape
    scale = np.float32(0.1)
    arrays = {
        "d_x": nan(shape, BF16),
        "d_out": rng.normal(size=shape).astype(BF16.numpy),
        "x": rng.normal(size=shape).astype(BF16.numpy),
        "weight": coarse(rng, C, BF16),
        "rstd": np.full(rows, 0.5, np.float32),
        "d_residual": None,
        "scalars": step_scalars(),
        **{name: nan(C, F32) for name in ("d_weight",)},
        "abs_max": np.zeros(1, np.float32),
        **outputs(shape, E4M3, "codes", scale),
    }

    def backward(dev, codes, transposed, scale, saturated, scalars, **t):
        for name in ("d_weight",):
            t[name] = Accumulator(t[name], False, scalars, 1)
        rmsnorm.backward(dev, **t, fp8=Fp8Out(codes, transposed, scale, saturated))

    got, expected = (run(device, backward, arrays) for device in (dev, host_device()))
    for name in ("d_weight",):
        # Sums over up to 80 rows in another order: relative to the largest.
        atol = 1e-5 * np.abs(expected[name]).max()
        np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=atol)


def test_fp8_of_many_rows_nan_and_infinity(dev, rng):
    rows, C = shape = (4304, 80)  # more rows than blocks, forward too
    arrays = {
        "out": nan(shape, BF16),
        "rstd": nan(rows, F32),
        "x": coarse(rng, shape, BF16),
        "weight": coarse(rng, C, BF16),
    }
    arrays["weight"][-2:] = np.nan, np.inf
    with np.errstate(invalid="ignore"):  # 0 * inf, in the reference
        for device in (dev, host_device()):
            check_fp8(device, partial(rmsnorm.forward, eps=EPS), arrays, "out", E4M3, "codes")


def test_fp8_backward_in_place(dev, rng):
    shape = (176, 80)  # more rows than blocks work on at a time
    arrays = backward_arrays(rng, shape, BF16, F32) | {"d_x": None}
    plain = run(dev, call_backward(False), arrays)["d_residual"]
    operands = arrays | outputs(shape, E4M3, "codes", np.float32(2**-8))
    got = run(dev, with_fp8(call_backward(False)), operands)
    np.testing.assert_array_equal(got["d_residual"], plain)
    assert check_codes(got, plain, E4M3, "codes") > 0


def test_wrong_fp8_arguments_and_traffic():
    plan = PlanDevice(HOST_SPEC)

    def make(shape, dtype):
        return plan.alloc("x", shape, dtype, "Activations")

    def forward(out, codes, transposed, rows=32):
        fp8 = Fp8Out(codes, transposed, make((1,), F32), make((1,), I32))
        x, weight, rstd = make((rows, 64), BF16), make((64,), BF16), make((rows,), F32)
        rmsnorm.forward(plan, out, rstd, x, weight, EPS, fp8=fp8)

    codes = make((32, 64), E4M3)
    forward(None, codes, None)
    assert plan.bytes["rmsnorm_forward"] == 32 * 64 * (2 + 1) + 32 * 4 + 64 * 2 + 4 + 8
    with pytest.raises(TypeError, match=r"rmsnorm\.forward: out must be a tensor, got None"):
        rmsnorm.forward(plan, None, make((32,), F32), make((32, 64), BF16), make((64,), BF16), EPS)
    with pytest.raises(TypeError, match=r"fp8\.codes or fp8\.transposed must be a tensor, both"):
        forward(None, None, None)
    with pytest.raises(TypeError, match=r"fp8\.codes must be E4M3 or E5M2, got BF16"):
        forward(None, make((32, 64), BF16), None)
    with pytest.raises(
        TypeError, match=r"fp8\.transposed must be None, only fp8\.codes is written"
    ):
        forward(None, codes, make((64, 32), E4M3))
    forward(None, make((24, 64), E4M3), None, rows=24)
