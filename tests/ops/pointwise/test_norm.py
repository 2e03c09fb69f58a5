"""norm's kernels against their references."""

import itertools
from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, I32
from llmq.base.operand import Fp8Out
from llmq.base.tensor import Accumulator
from llmq.ops.common import RowLayout, row_layout
from llmq.ops.pointwise import norm
from llmq.ref.pointwise.norm import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.abs_max import check_abs_max
from tests.exact import coarse, nan, run_exact
from tests.fp8_out import check_codes, check_fp8, outputs, with_fp8
from tests.harness import GPU_SPEC, host_device, run, step_scalars

EPS = 1e-6
SMALL = [name for name in CASES if not name.startswith(("qwen", "gpt2"))]
# F32 rows are twice as long, so that two of its cases have the warps of the next BF16 case.
BOTH = [kind + name for kind in ("", "layer_") for name in ("narrow", "warp_per_row", "widest")]
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
CENTRED = pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
SHAPES = pytest.mark.parametrize(
    "case, dtype",
    [(CASES[name], BF16) for name in SMALL] + [(CASES[name], F32) for name in BOTH],
    ids=[f"{name}-bf16" for name in SMALL] + [f"{name}-f32" for name in BOTH],
)


def rows_around(rng, shape, dtype, mean: int | None) -> np.ndarray:
    """Coarse numbers, around an integer mean that is exact, so that all statistics are."""
    if mean is None:
        return coarse(rng, shape, dtype)
    half = coarse(rng, (shape[0], shape[1] // 2), F32)
    return (np.concatenate([half, -half], axis=1) + mean).astype(dtype.numpy)


def forward_arrays(rng, shape, dtype, centred: bool, mean: int | None = None) -> dict:
    """norm.forward's; mean: of x, None where it may be any."""
    rows, C = shape
    return {
        "out": nan(shape, dtype),
        "mean": nan(rows, F32) if centred else None,
        "rstd": nan(rows, F32),
        "x": rows_around(rng, shape, dtype, mean),
        "weight": coarse(rng, C, dtype),
        "bias": coarse(rng, C, dtype) if centred else None,
    }


def post_arrays(rng, arrays: dict) -> dict:
    """norm.post's, with those of an RMSNorm's forward."""
    past = coarse(rng, arrays["x"].shape, BF16).astype(arrays["x"].dtype)
    return {k: arrays[k] for k in ("out", "rstd", "x", "weight")} | {"residual": past}


@SHAPES
def test_forward(dev, rng, case, dtype):
    *shape, centred = case
    arrays = forward_arrays(rng, shape, dtype, centred, 3 if centred else None)
    got = run_exact(dev, lambda dev, **t: norm.forward(dev, **t, eps=EPS), arrays)
    if centred:
        np.testing.assert_array_equal(got["mean"], 3)


@SHAPES
def test_forward_residual(dev, rng, case, dtype):
    *shape, centred = case
    arrays = forward_arrays(rng, shape, dtype, centred) | {"residual_out": nan(shape, dtype)}
    arrays["residual"] = rows_around(rng, shape, dtype, -1 if centred else None)
    arrays["branch"] = rows_around(rng, shape, dtype, 2 if centred else None)
    del arrays["x"]
    got = run_exact(dev, lambda dev, **t: norm.forward_residual(dev, **t, eps=EPS), arrays)

    def in_place(dev, residual, **t):
        norm.forward_residual(dev, residual, residual=residual, **t, eps=EPS)

    del arrays["residual_out"]
    again = run(dev, in_place, arrays)
    np.testing.assert_array_equal(again["residual"], got["residual_out"])
    np.testing.assert_array_equal(again["out"], got["out"])


@SHAPES
def test_post(dev, rng, case, dtype):
    *shape, centred = case
    if centred:
        return
    arrays = post_arrays(rng, forward_arrays(rng, shape, dtype, centred))
    got = run_exact(dev, lambda dev, **t: norm.post(dev, **t, eps=EPS), arrays)
    run_exact(dev, lambda dev, **t: norm.post(dev, **t, eps=EPS), arrays | {"residual": None})

    def in_place(dev, residual, **t):
        norm.post(dev, residual, residual=residual, **t, eps=EPS)

    del arrays["out"]
    again = run(dev, in_place, arrays)
    np.testing.assert_array_equal(again["residual"], got["out"])


@DTYPES
def test_offset(dev, rng, dtype):
    shape = CASES["warp_per_row"][:2]
    arrays = forward_arrays(rng, shape, dtype, False)
    got = run_exact(dev, lambda dev, **t: norm.forward(dev, **t, eps=EPS, offset=True), arrays)
    fused = arrays | {"residual_out": nan(shape, dtype), "residual": arrays["x"]}
    fused["branch"] = coarse(rng, shape, dtype)
    del fused["x"]
    call = partial(norm.forward_residual, eps=EPS, offset=True)
    run_exact(dev, lambda dev, **t: call(dev, **t), fused)
    post = post_arrays(rng, arrays)
    call = partial(norm.post, eps=EPS, offset=True)
    run_exact(dev, lambda dev, **t: call(dev, **t), post)
    alone = run_exact(dev, lambda dev, **t: call(dev, **t), post | {"residual": None})
    np.testing.assert_array_equal(alone["out"], got["out"])
    once = run_exact(dev, lambda dev, **t: norm.forward(dev, **t, eps=EPS, once=True), arrays)
    want = run(dev, lambda dev, **t: norm.post(dev, **t, eps=EPS), post | {"residual": None})
    np.testing.assert_array_equal(once["out"], want["out"])
    call = partial(norm.forward_residual, eps=EPS, once=True)
    run_exact(dev, lambda dev, **t: call(dev, **t), fused)
    run_exact(
        dev, call_backward(False, offset=True), backward_arrays(rng, shape, dtype, F32, False)
    )
    plan, tensors = planned(specs())
    with pytest.raises(TypeError, match=r"norm.forward: offset must be False with mean"):
        norm.forward(plan, **tensors, eps=EPS, offset=True)


def call_backward(accumulate: bool, offset: bool = False):
    """norm.backward on tensors by name; d_x None: in place over d_residual."""

    def call(dev, d_x, d_weight, d_bias, scalars, d_residual, **t):
        targets = (
            None if d is None else Accumulator(d, accumulate, scalars, i)
            for i, d in enumerate((d_weight, d_bias))
        )
        d_x = d_x or d_residual
        norm.backward(dev, d_x, *targets, d_residual=d_residual, offset=offset, **t)

    return call


def backward_arrays(rng, shape, dtype, gradient_dtype, centred: bool) -> dict:
    """Inputs whose sums are exact: rstd is a power of two, mean an integer."""
    rows, C = shape
    return {
        "d_x": nan(shape, dtype),
        "d_weight": coarse(rng, C, gradient_dtype),
        "d_bias": coarse(rng, C, gradient_dtype) if centred else None,
        "d_out": coarse(rng, shape, dtype),
        "x": coarse(rng, shape, dtype),
        "weight": coarse(rng, C, dtype),
        "mean": rng.integers(-1, 2, size=rows).astype(np.float32) if centred else None,
        "rstd": 2.0 ** rng.integers(-1 if centred else -2, 2, size=rows).astype(np.float32),
        "d_residual": coarse(rng, shape, dtype),
        "scalars": step_scalars(seed=7, step=2, micro_step=1),
    }


def parameters(centred: bool) -> list[str]:
    """The gradients that there are of parameters."""
    return ["d_weight", "d_bias"] if centred else ["d_weight"]


@SHAPES
def test_backward(dev, rng, case, dtype):
    *shape, centred = case
    arrays = backward_arrays(rng, shape, dtype, F32, centred)
    for name in parameters(centred):
        arrays[name][:] = np.nan
    got = run_exact(dev, call_backward(False), arrays)
    in_place = run(dev, call_backward(False), arrays | {"d_x": None})
    np.testing.assert_array_equal(in_place["d_residual"], got["d_x"])
    np.testing.assert_array_equal(in_place["d_weight"], got["d_weight"])
    nobody = arrays | dict.fromkeys(parameters(centred))
    frozen = run_exact(dev, call_backward(False), nobody)
    np.testing.assert_array_equal(frozen["d_x"], got["d_x"])


@CENTRED
@pytest.mark.parametrize("gradient_dtype", [F32, BF16], ids=["f32", "bf16"])
def test_backward_adds_to_the_gradients_and_works_without_residual(
    dev, rng, gradient_dtype, centred
):
    arrays = backward_arrays(rng, (19, 136), BF16, gradient_dtype, centred)
    arrays["d_residual"] = None
    got = run_exact(dev, call_backward(True), arrays)
    alone = run_exact(dev, call_backward(False), arrays)
    for name in parameters(centred):
        total = arrays[name].astype(np.float32) + alone[name].astype(np.float32)
        # Exact in F32; BF16 rounds each of the two by at most a step of 2^-7.
        rtol = 2**-6 if gradient_dtype == BF16 else 0
        np.testing.assert_allclose(got[name].astype(np.float32), total, rtol=rtol, atol=rtol)


@CENTRED
@pytest.mark.parametrize(
    "name, dtype", [("narrow", BF16), ("narrow", F32), ("two_warps_per_row", BF16)], ids=str
)
def test_abs_max(dev, rng, name, dtype, centred):
    *shape, _ = CASES[name]
    arrays = forward_arrays(rng, shape, dtype, centred, 50 if centred else None)
    spoiled = "bias" if centred else "weight"
    arrays["x"][:, -1] += 0 if centred else 2 - arrays["x"][:, -1]  # no NaN of an infinite weight
    call = partial(norm.forward, eps=EPS)
    check_abs_max(dev, call, arrays, stored="out", spoiled=spoiled)
    if not centred:
        call = partial(norm.post, eps=EPS)
        check_abs_max(dev, call, post_arrays(rng, arrays), stored="out", spoiled=spoiled)

    arrays["residual"] = arrays.pop("x")
    arrays |= {"residual_out": nan(shape, dtype), "branch": coarse(rng, shape, dtype)}
    if not centred:
        arrays["branch"][:, -1] = 2
    call = partial(norm.forward_residual, eps=EPS)
    check_abs_max(dev, call, arrays, stored="out", spoiled=spoiled)

    arrays = backward_arrays(rng, shape, dtype, F32, centred)
    if centred:  # far from 0: a lane past the end of a row would find something large
        arrays["x"] += np.asarray(50, dtype.numpy)
        arrays["mean"] += 50
    check_abs_max(dev, call_backward(False), arrays, stored="d_x", spoiled="d_residual")


@CENTRED
@DTYPES
def test_ordinary_numbers(dev, rng, dtype, centred):
    rows, C = 21, 768 if centred else 896
    x, weight, bias, d_out, past = (
        rng.normal(size=s).astype(np.float32).astype(dtype.numpy)
        for s in [(rows, C), C, C, (rows, C), (rows, C)]
    )
    forward = forward_arrays(rng, (rows, C), dtype, centred) | {"x": x, "weight": weight}
    if centred:
        forward |= {"x": x + np.float32(1).astype(x.dtype), "bias": bias}
    got, want = (
        run(d, lambda dev, **t: norm.forward(dev, **t, eps=EPS), forward)
        for d in (dev, host_device())
    )
    # Hundreds of numbers added in another order: some F32 roundings.
    for name in ("mean", "rstd") if centred else ("rstd",):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6)
    if centred:
        # The same for out, where terms of size 1 may cancel; BF16's one rounding may turn.
        tolerance = {"rtol": 2e-6 if dtype == F32 else 2**-7, "atol": 5e-6}
    else:
        # Each of the two roundings to BF16 may turn: two steps of at most 2^-7.
        tolerance = {"rtol": 2e-6 if dtype == F32 else 2**-6}
    np.testing.assert_allclose(*(a["out"].astype(np.float32) for a in (got, want)), **tolerance)

    arrays = backward_arrays(rng, (rows, C), dtype, F32, centred)
    arrays |= {"x": forward["x"], "weight": weight, "d_out": d_out, "d_residual": past}
    arrays |= {"mean": want["mean"], "rstd": want["rstd"]}
    got, want = (run(d, call_backward(False), arrays) for d in (dev, host_device()))
    # d_x: a sum of three terms of size 1, rounded to T.
    tolerance = {"atol": 2e-6} | tolerance
    np.testing.assert_allclose(*(a["d_x"].astype(np.float32) for a in (got, want)), **tolerance)
    for name in parameters(centred):  # 21 terms of size 1, F32
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-5)


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


def specs(centred: bool = True) -> dict[str, tuple]:
    """Shapes and dtypes of norm.forward's arguments that fit."""
    stats = {"mean": ((4,), F32) if centred else None, "rstd": ((4,), F32)}
    parameters = {"weight": ((64,), BF16), "bias": ((64,), BF16) if centred else None}
    return {"out": ((4, 64), BF16), "x": ((4, 64), BF16), **stats, **parameters}


def of_width(C: int) -> dict[str, tuple]:
    """Tensors of LayerNorm with so many channels."""
    rows = dict.fromkeys(("out", "x"), ((4, C), BF16))
    return rows | dict.fromkeys(("weight", "bias"), ((C,), BF16)) | {"mean": ((4,), F32)}


def planned(specs: dict[str, tuple | None]) -> tuple[PlanDevice, dict]:
    """The tensors, on a device."""
    plan = PlanDevice(GPU_SPEC)
    return plan, {k: v and plan.alloc(k, *v, "Activations") for k, v in specs.items()}


@CENTRED
@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"out": None}, TypeError, "out or fp8 must be given"),
        (of_width(60), ValueError, "C must be a multiple of 8 on a GPU"),
        (of_width(8200), ValueError, "C must be at most 8192 on a GPU"),
    ],
)
def test_wrong_arguments_raise(change, error, text, centred):
    plan, tensors = planned(specs(centred) | change)
    with pytest.raises(error, match=f"norm.forward: .*{text}"):
        norm.forward(plan, **tensors, eps=EPS)


@pytest.mark.parametrize("name", ["mean", "bias"])
def test_mean_and_bias_are_given_together(name):
    plan, tensors = planned(specs() | {name: None})
    with pytest.raises(TypeError, match="mean and bias are given together"):
        norm.forward(plan, **tensors, eps=EPS)


def test_plan_counts_every_byte_once():
    plan = PlanDevice(HOST_SPEC)
    big = [plan.alloc(f"x{i}", (64, 128), BF16, "Activations") for i in range(4)]
    weight, rstd = plan.alloc("w", (128,), BF16, "Weights"), plan.alloc("r", (64,), F32, "Stack")
    scalars, d_weight = plan.alloc("s", (16,), I32, "Stack"), plan.alloc("d", (128,), F32, "Stack")
    target = Accumulator(d_weight, False, scalars, 0)
    norm.backward(plan, big[0], target, None, big[1], big[2], weight, None, rstd, big[3])
    partial = 16 * 128 * 4  # 64 rows of 4 a block
    assert plan.bytes["norm_backward"] == 4 * 64 * 128 * 2 + 2 * 128 + 4 * 64 + partial
    assert plan.bytes["column_sum"] == partial + 2 * 4 * 128 + 64
    with pytest.raises(TypeError, match=r"norm.backward: d_bias must be None without mean"):
        norm.backward(plan, big[0], target, target, big[1], big[2], weight, None, rstd, big[3])
    assert plan.stack.used == 0 and plan.stack.high_water_mark == partial


# -- FP8 results ---------------------------------------------------------------------------------

# rows and C, multiples of 16; in every layout of rows
FP8_SHAPES = [(80, 80), (48, 896), (16, 1536), (48, 3584), (16, 8192)]
FP8_CASES = [(FP8_SHAPES[0], F32, E5M2), *((shape, BF16, E4M3) for shape in FP8_SHAPES)]


@CENTRED
@pytest.mark.parametrize(("shape", "dtype", "format"), FP8_CASES, ids=str)
def test_fp8_forward_equals_two_steps(dev, rng, shape, dtype, format, centred):
    arrays = forward_arrays(rng, shape, dtype, centred)
    fused = arrays | {"residual_out": nan(shape, dtype), "residual": arrays["x"]}
    fused["branch"] = coarse(rng, shape, dtype)
    del fused["x"]

    for device in (dev, host_device()):
        call = partial(norm.forward, eps=EPS)
        check_fp8(device, call, arrays, "out", format, "codes")
        if not centred:
            call = partial(norm.post, eps=EPS)
            check_fp8(device, call, post_arrays(rng, arrays), "out", format, "codes")
        call = partial(norm.forward_residual, eps=EPS)
        check_fp8(device, call, fused, "out", format, "codes")


@CENTRED
@pytest.mark.parametrize(("shape", "dtype", "format"), FP8_CASES, ids=str)
def test_fp8_backward_equals_two_steps(dev, rng, shape, dtype, format, centred):
    rows, C = shape
    arrays = backward_arrays(rng, shape, dtype, F32, centred)
    arrays["rstd"] = np.full(rows, 0.5, np.float32)
    arrays["mean"] = np.full(rows, 0.25, np.float32) if centred else None
    for name in ("d_weight", "d_bias"):
        del arrays[name]

    def backward(dev, d_x, x, scalars, **t):
        """d_x is always written; the gradients of parameters are of no interest here."""
        d_x = d_x or dev.alloc("d_x", shape, dtype, "Activations")
        targets = {
            name: Accumulator(dev.alloc(name, (C,), F32, "Gradients"), False, scalars, 1)
            for name in parameters(centred)
        }
        norm.backward(dev, d_x, x=x, **{"d_bias": None} | targets, **t)

    for device in (dev, host_device()):
        check_fp8(device, backward, arrays, "d_x", format, "codes")


@CENTRED
@pytest.mark.parametrize("shape", FP8_SHAPES, ids=str)
def test_gradients_of_parameters_do_not_depend_on_fp8(dev, rng, shape, centred):
    rows, C = shape
    arrays = {
        **backward_arrays(rng, shape, BF16, F32, centred),
        "d_out": rng.normal(size=shape).astype(BF16.numpy),
        "x": rng.normal(size=shape).astype(BF16.numpy),
        "mean": np.full(rows, 0.25, np.float32) if centred else None,
        "rstd": np.full(rows, 0.5, np.float32),
        "d_residual": None,
        **{name: nan(C, F32) for name in parameters(centred)},
        "abs_max": np.zeros(1, np.float32),
        **outputs(shape, E4M3, "codes", np.float32(0.1)),
    }
    backward = with_fp8(call_backward(False))
    got, expected = (run(device, backward, arrays) for device in (dev, host_device()))
    for name in parameters(centred):
        # Sums over up to 80 rows in another order: relative to the largest.
        atol = 1e-5 * np.abs(expected[name]).max()
        np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=atol)


@CENTRED
def test_fp8_of_many_rows_nan_and_infinity(dev, rng, centred):
    shape = (4304, 80)  # more rows than blocks, forward too
    arrays = forward_arrays(rng, shape, BF16, centred)
    arrays["weight"][-2:] = np.nan, np.inf
    with np.errstate(invalid="ignore"):  # 0 * inf, in the reference
        for device in (dev, host_device()):
            check_fp8(device, partial(norm.forward, eps=EPS), arrays, "out", E4M3, "codes")


@CENTRED
def test_fp8_backward_in_place(dev, rng, centred):
    shape = (176, 80)  # more rows than blocks work on at a time
    arrays = backward_arrays(rng, shape, BF16, F32, centred) | {"d_x": None}
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
        norm.forward(plan, out, None, rstd, x, weight, None, EPS, fp8=fp8)

    codes = make((32, 64), E4M3)
    forward(None, codes, None)
    assert plan.bytes["norm_forward"] == 32 * 64 * (2 + 1) + 32 * 4 + 64 * 2 + 4 + 8
    with pytest.raises(TypeError, match=r"fp8\.codes or fp8\.transposed must be a tensor, both"):
        forward(None, None, None)
    with pytest.raises(
        TypeError, match=r"fp8\.transposed must be None, only fp8\.codes is written"
    ):
        forward(None, codes, make((64, 32), E4M3))
    forward(None, make((24, 64), E4M3), None, rows=24)
