"""layernorm's kernels against their references."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, I32
from llmq.base.operand import Fp8Out
from llmq.base.tensor import Accumulator
from llmq.ops import layernorm
from llmq.ref.layernorm import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.abs_max import check_abs_max
from tests.exact import coarse, nan, run_exact
from tests.fp8_out import check_codes, check_fp8, outputs, with_fp8
from tests.harness import host_device, run, step_scalars

EPS = 1e-5
SMALL = [name for name in CASES if not name.startswith("gpt2")]
BOTH = ["narrow", "warp_per_row", "widest"]
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
SHAPES = pytest.mark.parametrize(
    "shape, dtype",
    [(CASES[name], BF16) for name in SMALL] + [(CASES[name], F32) for name in BOTH],
    ids=[f"{name}-bf16" for name in SMALL] + [f"{name}-f32" for name in BOTH],
)


def balanced(rng, shape, dtype, mean) -> np.ndarray:
    """Coarse numbers around an integer mean that is exact, so that all statistics are."""
    half = coarse(rng, (shape[0], shape[1] // 2), F32)
    return (np.concatenate([half, -half], axis=1) + mean).astype(dtype.numpy)


@SHAPES
def test_forward(dev, rng, shape, dtype):
    rows, C = shape
    arrays = {
        "out": nan(shape, dtype),
        "mean": nan(rows, F32),
        "rstd": nan(rows, F32),
        "x": balanced(rng, shape, dtype, mean=3),
        "weight": coarse(rng, C, dtype),
        "bias": coarse(rng, C, dtype),
    }
    got = run_exact(dev, lambda dev, **t: layernorm.forward(dev, **t, eps=EPS), arrays)
    np.testing.assert_array_equal(got["mean"], 3)


@SHAPES
def test_forward_residual(dev, rng, shape, dtype):
    rows, C = shape
    arrays = {
        "residual_out": nan(shape, dtype),
        "out": nan(shape, dtype),
        "mean": nan(rows, F32),
        "rstd": nan(rows, F32),
        "residual": balanced(rng, shape, dtype, mean=-1),
        "branch": balanced(rng, shape, dtype, mean=2),
        "weight": coarse(rng, C, dtype),
        "bias": coarse(rng, C, dtype),
    }
    got = run_exact(dev, lambda dev, **t: layernorm.forward_residual(dev, **t, eps=EPS), arrays)

    def in_place(dev, residual, **t):
        layernorm.forward_residual(dev, residual, residual=residual, **t, eps=EPS)

    del arrays["residual_out"]
    again = run(dev, in_place, arrays)
    np.testing.assert_array_equal(again["residual"], got["residual_out"])
    np.testing.assert_array_equal(again["out"], got["out"])


def call_backward(accumulate: bool):
    """layernorm.backward on tensors by name; d_x None: in place over d_residual."""

    def call(dev, d_x, d_weight, d_bias, scalars, d_residual, **t):
        targets = (Accumulator(d, accumulate, scalars, i) for i, d in enumerate((d_weight, d_bias)))
        layernorm.backward(dev, d_x or d_residual, *targets, d_residual=d_residual, **t)

    return call


def backward_arrays(rng, shape, dtype, gradient_dtype) -> dict:
    """Inputs whose sums are exact: rstd is a power of two, mean an integer."""
    rows, C = shape
    return {
        "d_x": nan(shape, dtype),
        "d_weight": coarse(rng, C, gradient_dtype),
        "d_bias": coarse(rng, C, gradient_dtype),
        "d_out": coarse(rng, shape, dtype),
        "x": coarse(rng, shape, dtype),
        "weight": coarse(rng, C, dtype),
        "mean": rng.integers(-1, 2, size=rows).astype(np.float32),
        "rstd": 2.0 ** rng.integers(-1, 2, size=rows).astype(np.float32),
        "d_residual": coarse(rng, shape, dtype),
        "scalars": step_scalars(seed=7, step=2, micro_step=1),
    }


@SHAPES
def test_backward(dev, rng, shape, dtype):
    arrays = backward_arrays(rng, shape, dtype, F32)
    arrays["d_weight"][:] = arrays["d_bias"][:] = np.nan
    got = run_exact(dev, call_backward(False), arrays)
    in_place = run(dev, call_backward(False), arrays | {"d_x": None})
    np.testing.assert_array_equal(in_place["d_residual"], got["d_x"])
    np.testing.assert_array_equal(in_place["d_weight"], got["d_weight"])


@pytest.mark.parametrize("gradient_dtype", [F32, BF16], ids=["f32", "bf16"])
def test_backward_adds_to_the_gradients_and_works_without_residual(dev, rng, gradient_dtype):
    arrays = backward_arrays(rng, (19, 136), BF16, gradient_dtype) | {"d_residual": None}
    got = run_exact(dev, call_backward(True), arrays)
    alone = run_exact(dev, call_backward(False), arrays)
    for name in ("d_weight", "d_bias"):
        total = arrays[name].astype(np.float32) + alone[name].astype(np.float32)
        # Exact in F32; BF16 rounds each of the two by at most a step of 2^-7.
        rtol = 2**-6 if gradient_dtype == BF16 else 0
        np.testing.assert_allclose(got[name].astype(np.float32), total, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    "name, dtype", [("narrow", BF16), ("narrow", F32), ("widest", BF16)], ids=str
)
def test_abs_max(dev, rng, name, dtype):
    rows, C = shape = CASES[name]
    arrays = {
        "out": nan(shape, dtype),
        "mean": nan(rows, F32),
        "rstd": nan(rows, F32),
        "x": balanced(rng, shape, dtype, mean=50),
        "weight": coarse(rng, C, dtype),
        "bias": coarse(rng, C, dtype),
    }
    call = partial(layernorm.forward, eps=EPS)
    check_abs_max(dev, call, arrays, stored="out", spoiled="bias")

    arrays["residual"] = arrays.pop("x")
    arrays |= {"residual_out": nan(shape, dtype), "branch": coarse(rng, shape, dtype)}
    call = partial(layernorm.forward_residual, eps=EPS)
    check_abs_max(dev, call, arrays, stored="out", spoiled="bias")

    arrays = backward_arrays(rng, shape, dtype, F32)
    # Far from 0: a lane past the end of a row would find something large.
    arrays["x"] += np.asarray(50, dtype.numpy)
    arrays["mean"] += 50
    check_abs_max(dev, call_backward(False), arrays, stored="d_x", spoiled="d_residual")


@DTYPES
def test_ordinary_numbers(dev, rng, dtype):
    rows, C = 21, 768
    x, weight, bias, d_out, past = (
        rng.normal(size=s).astype(np.float32).astype(dtype.numpy)
        for s in [(rows, C), C, C, (rows, C), (rows, C)]
    )
    forward = {name: nan(rows, F32) for name in ("mean", "rstd")} | {"out": nan(x.shape, dtype)}
    forward |= {"x": x + np.float32(1).astype(x.dtype), "weight": weight, "bias": bias}
    got, want = (
        run(d, lambda dev, **t: layernorm.forward(dev, **t, eps=EPS), forward)
        for d in (dev, host_device())
    )
    # 768 numbers added in another order: some F32 roundings.
    np.testing.assert_allclose(got["mean"], want["mean"], rtol=1e-6)
    np.testing.assert_allclose(got["rstd"], want["rstd"], rtol=1e-6)
    # The same for out, where terms of size 1 may cancel; BF16's one rounding may turn.
    tolerance = {"rtol": 2e-6 if dtype == F32 else 2**-7, "atol": 5e-6}
    np.testing.assert_allclose(*(a["out"].astype(np.float32) for a in (got, want)), **tolerance)

    arrays = backward_arrays(rng, (rows, C), dtype, F32)
    arrays |= {"x": forward["x"], "weight": weight, "d_out": d_out, "d_residual": past}
    arrays |= {"mean": want["mean"], "rstd": want["rstd"]}
    got, want = (run(d, call_backward(False), arrays) for d in (dev, host_device()))
    np.testing.assert_allclose(*(a["d_x"].astype(np.float32) for a in (got, want)), **tolerance)
    for name in ("d_weight", "d_bias"):  # 21 terms of size 1, F32
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"mean": ((4,), BF16)}, TypeError, "mean must be F32, got BF16"),
        ({"rstd": ((3,), F32)}, ValueError, "rstd must have shape"),
        ({"out": ((4, 64), F32)}, TypeError, "out must be BF16, got F32"),
        ({"bias": ((32,), BF16)}, ValueError, "bias must have shape"),
        ({"x": ((4, 64), I32)}, TypeError, "x must be F32 or BF16, got I32"),
        ({"x": ((4, 60), BF16)}, ValueError, "C must be a positive multiple of 8"),
    ],
)
def test_wrong_arguments_raise(change, error, text):
    specs = {"out": ((4, 64), BF16), "x": ((4, 64), BF16)}
    specs |= {"mean": ((4,), F32), "rstd": ((4,), F32)}
    specs |= {"weight": ((64,), BF16), "bias": ((64,), BF16)} | change
    plan = PlanDevice(HOST_SPEC)
    tensors = {k: plan.alloc(k, *v, "Activations") for k, v in specs.items()}
    with pytest.raises(error, match=f"layernorm.forward: .*{text}"):
        layernorm.forward(plan, **tensors, eps=EPS)


# -- FP8 results ---------------------------------------------------------------------------------

# rows and C, multiples of 16; in every layout of rows
FP8_SHAPES = [(80, 80), (48, 896), (16, 1536), (48, 3584), (16, 8192)]
FP8_CASES = [(FP8_SHAPES[0], F32, E5M2), *((shape, BF16, E4M3) for shape in FP8_SHAPES)]


@pytest.mark.parametrize(("shape", "dtype", "format"), FP8_CASES, ids=str)
def test_fp8_forward_equals_two_steps(dev, rng, shape, dtype, format):
    rows, C = shape
    arrays = {
        "out": nan(shape, dtype),
        "mean": nan(rows, F32),
        "rstd": nan(rows, F32),
        "x": coarse(rng, shape, dtype),
        "weight": coarse(rng, C, dtype),
        "bias": coarse(rng, C, dtype),
    }
    fused = arrays | {"residual_out": nan(shape, dtype), "residual": arrays["x"]}
    fused["branch"] = coarse(rng, shape, dtype)
    del fused["x"]
    for device in (dev, host_device()):
        call = partial(layernorm.forward, eps=EPS)
        check_fp8(device, call, arrays, "out", format, "codes")
        call = partial(layernorm.forward_residual, eps=EPS)
        check_fp8(device, call, fused, "out", format, "codes")


@pytest.mark.parametrize(("shape", "dtype", "format"), FP8_CASES, ids=str)
def test_fp8_backward_equals_two_steps(dev, rng, shape, dtype, format):
    rows, C = shape
    arrays = {
        "d_x": nan(shape, dtype),
        "d_out": coarse(rng, shape, dtype),
        "x": coarse(rng, shape, dtype),
        "weight": coarse(rng, C, dtype),
        "mean": np.full(rows, 0.25, np.float32),
        "rstd": np.full(rows, 0.5, np.float32),
        "d_residual": coarse(rng, shape, dtype),
        "scalars": step_scalars(),
    }

    def backward(dev, d_x, x, scalars, **t):
        """d_x is always written; the gradients of parameters are of no interest here."""
        d_x = d_x or dev.alloc("d_x", shape, dtype, "Activations")
        targets = {
            name: Accumulator(dev.alloc(name, (C,), F32, "Gradients"), False, scalars, 1)
            for name in ("d_weight", "d_bias")
        }
        layernorm.backward(dev, d_x, x=x, **targets, **t)

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
        "mean": np.full(rows, 0.25, np.float32),
        "rstd": np.full(rows, 0.5, np.float32),
        "d_residual": None,
        "scalars": step_scalars(),
        **{name: nan(C, F32) for name in ("d_weight", "d_bias")},
        "abs_max": np.zeros(1, np.float32),
        **outputs(shape, E4M3, "codes", scale),
    }

    def backward(dev, codes, transposed, scale, saturated, scalars, **t):
        for name in ("d_weight", "d_bias"):
            t[name] = Accumulator(t[name], False, scalars, 1)
        layernorm.backward(dev, **t, fp8=Fp8Out(codes, transposed, scale, saturated))

    got, expected = (run(device, backward, arrays) for device in (dev, host_device()))
    for name in ("d_weight", "d_bias"):
        # Sums over up to 80 rows in another order: relative to the largest.
        atol = 1e-5 * np.abs(expected[name]).max()
        np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=atol)


def test_fp8_of_many_rows_nan_and_infinity(dev, rng):
    rows, C = shape = (4304, 80)  # more rows than blocks, forward too
    arrays = {
        "out": nan(shape, BF16),
        "mean": nan(rows, F32),
        "rstd": nan(rows, F32),
        "x": coarse(rng, shape, BF16),
        "weight": coarse(rng, C, BF16),
        "bias": coarse(rng, C, BF16),
    }
    arrays["weight"][-2:] = np.nan, np.inf
    with np.errstate(invalid="ignore"):  # 0 * inf, in the reference
        for device in (dev, host_device()):
            check_fp8(device, partial(layernorm.forward, eps=EPS), arrays, "out", E4M3, "codes")


def test_fp8_backward_in_place(dev, rng):
    shape = (176, 80)  # more rows than blocks work on at a time
    arrays = backward_arrays(rng, shape, BF16, F32) | {"d_x": None}
    plain = run(dev, call_backward(False), arrays)["d_residual"]
    operands = arrays | outputs(shape, E4M3, "codes", np.float32(2**-8))
    got = run(dev, with_fp8(call_backward(False)), operands)
    np.testing.assert_array_equal(got["d_residual"], plain)
    assert check_codes(got, plain, E4M3, "codes") > 0
