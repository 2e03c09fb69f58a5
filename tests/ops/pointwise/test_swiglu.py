"""SwiGLU on a device against the reference."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, I32
from llmq.base.operand import Fp8Out, ProductCodes
from llmq.ops.pointwise import swiglu
from llmq.ref.pointwise.swiglu import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.abs_max import check_abs_max
from tests.again import AGAIN_WITH_FP8, FP8_CASES, check_again, compare
from tests.fp8_out import check_codes, check_fp8, outputs, with_fp8
from tests.harness import GPU_SPEC, host_device, run

# The operation as it is, and as GeGLU.
GEGLU = SimpleNamespace(
    forward=partial(swiglu.forward, gelu=True), backward=partial(swiglu.backward, gelu=True)
)
GATES = pytest.mark.parametrize("op", [swiglu, GEGLU], ids=["silu", "gelu"])
SMALL = {name: shape for name, shape in CASES.items() if not name.startswith("qwen")}


def _inputs(rng, rows, F, dtype):
    up_gate = (rng.normal(size=(rows, 2 * F)) * 4).astype(dtype.numpy)
    up_gate[0, F:] = np.resize([-200, -90, -20, 0, 20, 90, 200, 1], F)
    return up_gate, rng.normal(size=(rows, F)).astype(dtype.numpy)


@GATES
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("rows, F", SMALL.values(), ids=SMALL)
def test_forward(dev, rng, rows, F, dtype, op):
    up_gate, _ = _inputs(rng, rows, F, dtype)
    arrays = {"out": np.full((rows, F), np.nan, dtype.numpy), "up_gate": up_gate}
    got = run(dev, op.forward, arrays)
    compare(got["out"], run(host_device(), op.forward, arrays)["out"], dtype)


@GATES
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("rows, F", SMALL.values(), ids=SMALL)
def test_backward(dev, rng, rows, F, dtype, op):
    up_gate, d_out = _inputs(rng, rows, F, dtype)
    arrays = {
        "d_up_gate": np.full((rows, 2 * F), np.nan, dtype.numpy),
        "d_out": d_out,
        "up_gate": up_gate,
    }
    got = run(dev, op.backward, arrays)["d_up_gate"]
    compare(got, run(host_device(), op.backward, arrays)["d_up_gate"], dtype)

    def in_place(dev, d_out, up_gate):
        op.backward(dev, up_gate, d_out, up_gate)

    del arrays["d_up_gate"]
    np.testing.assert_array_equal(run(dev, in_place, arrays)["up_gate"], got)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ["ragged_block", "several_blocks"])
def test_abs_max(dev, rng, name, dtype):
    rows, F = CASES[name]
    up_gate, d_out = _inputs(rng, rows, F, dtype)
    arrays = {"out": np.full((rows, F), np.nan, dtype.numpy), "up_gate": up_gate}
    check_abs_max(dev, swiglu.forward, arrays, stored="out", spoiled="up_gate")
    for half in (slice(F), slice(F, None)):  # the largest is in d_gate, in d_up
        arrays = {
            "d_up_gate": np.full((rows, 2 * F), np.nan, dtype.numpy),
            "d_out": d_out,
            "up_gate": up_gate.copy(),
        }
        arrays["up_gate"][:, half] *= 64
        check_abs_max(dev, swiglu.backward, arrays, stored="d_up_gate", spoiled="d_out")
        alone = arrays | {"d_up_gate": None, "abs_max": np.zeros(1, np.float32)}
        for device in (dev, host_device()):
            largest = run(device, swiglu.backward, alone)["abs_max"]
            whole = run(device, swiglu.backward, arrays | {"abs_max": alone["abs_max"]})
            assert (
                largest == whole["abs_max"] == np.abs(whole["d_up_gate"].astype(np.float32)).max()
            )


@FP8_CASES
def test_fp8_equals_two_steps(dev, rng, name, dtype, format, layout):
    rows, F = CASES[name]
    up_gate, d_out = _inputs(rng, rows, F, dtype)
    # Each in the last row and column, of which the first tiles see nothing.
    up_gate[-1, F - 1], up_gate[-2, F - 1] = np.nan, np.inf
    forward = {"out": np.full((rows, F), np.nan, dtype.numpy), "up_gate": up_gate}
    backward = {
        "d_up_gate": np.full((rows, 2 * F), np.nan, dtype.numpy),
        "d_out": d_out,
        "up_gate": up_gate,
    }
    for device in (dev, host_device()):
        check_fp8(device, swiglu.forward, forward, "out", format, layout)
        check_fp8(device, swiglu.backward, backward, "d_up_gate", format, layout)


def test_fp8_in_place(dev, rng):
    rows, F = CASES["ragged_tiles"]
    up_gate, d_out = _inputs(rng, rows, F, BF16)

    def in_place(dev, d_out, up_gate, fp8=None):
        swiglu.backward(dev, up_gate, d_out, up_gate, fp8=fp8)

    arrays = {"d_out": d_out, "up_gate": up_gate}
    plain = run(dev, in_place, arrays)["up_gate"]
    operands = arrays | outputs(up_gate.shape, E4M3, "both", np.float32(0.25))
    got = run(dev, with_fp8(in_place), operands)
    np.testing.assert_array_equal(got["up_gate"], plain)
    assert check_codes(got, plain, E4M3, "both") > 0


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ["one_vector", "ragged_block", "several_blocks"])
def test_out_again(dev, rng, name, dtype):
    up_gate, d_out = _inputs(rng, *CASES[name], dtype)
    for device in (dev, host_device()):
        check_again(device, swiglu, up_gate, d_out, d="new", out="new", abs_max=False)
        check_again(device, swiglu, up_gate, d_out, d="x", out="new")
        check_again(device, swiglu, up_gate, d_out, d="x", out="d_out", abs_max=False)


@AGAIN_WITH_FP8
def test_out_again_and_fp8(dev, rng, name, dtype, d, fp8, out):
    rows, F = CASES[name]
    up_gate, d_out = _inputs(rng, rows, F, dtype)
    # Each in the last row and column, of which the first tiles see nothing.
    up_gate[-1, F - 1], up_gate[-2, F - 1] = np.nan, np.inf
    for device in (dev, host_device()):
        check_again(device, swiglu, up_gate, d_out, d=d, out=out, fp8=fp8)


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=str)
def test_fp8_of_geglu(dev, rng, format):
    rows, F = CASES["ragged_tiles"]
    up_gate, d_out = _inputs(rng, rows, F, BF16)
    forward = {"out": np.full((rows, F), np.nan, BF16.numpy), "up_gate": up_gate}
    check_fp8(dev, GEGLU.forward, forward, "out", format, "both")
    check_again(dev, GEGLU, up_gate, d_out, d=None, out="fp8", fp8=format)
    check_again(dev, GEGLU, up_gate, d_out, d="x", out="d_out")


BEFORE = {"abs_max": np.float32(0.5), "saturated": np.int32(5)}  # of earlier micro-steps


def _product(rng, name, shape, dtype, spread, scale):
    """Arrays of a ProductCodes in which some values were too large, and their number; values F32,
    as codes and scale stand for them."""
    limit = MAX[dtype]
    x = (rng.normal(size=shape) * spread).astype(np.float32)
    x[-1, -1] = 3 * limit * scale  # of the last tile
    codes = np.clip(x / scale, -limit, limit).astype(dtype.numpy)
    values = codes.astype(np.float32) * scale
    arrays = {"codes": codes, "scale": scale.reshape(1), "factor": np.ones(1, np.float32)}
    arrays |= {"largest": np.abs(x).max().reshape(1)}
    arrays |= {field: value.reshape(1) for field, value in BEFORE.items()}
    count = np.count_nonzero(np.abs(codes.astype(np.float32)) == limit)
    return {f"{name}.{field}": array for field, array in arrays.items()}, values, count


def _with_products(call):
    """call(dev, up_gate=..., d_out=..., fp8=..., …) as a function of the fields' tensors."""

    def wrapped(dev, **tensors):
        for name, record in (("up_gate", ProductCodes), ("d_out", ProductCodes),
                             ("fp8", Fp8Out), ("out_fp8", Fp8Out)):  # fmt: skip
            if f"{name}.scale" in tensors:
                fields = {f: tensors.pop(f"{name}.{f}", None) for f in record._fields}
                tensors[name] = record(**fields)
        call(dev, **tensors)

    return wrapped


def _fp8(name, shape, dtype, layout, scale):
    return {f"{name}.{k}": v for k, v in outputs(shape, dtype, layout, np.float32(scale)).items()}


MAX = {E4M3: np.float32(448), E5M2: np.float32(57344)}


@pytest.mark.parametrize(
    "op, name, gradient, spread",
    [(swiglu, "ragged_tiles", E5M2, 40), (GEGLU, "one_tile", E4M3, 2)],
    ids=["silu", "gelu"],
)
def test_codes_of_products(dev, rng, op, name, gradient, spread):
    """The bits of the same kernels on the values that the codes stand for, which scales that are
    powers of two make numbers of BF16. With a spread of 40, some sigmoids are no normal numbers."""
    rows, F = CASES[name]
    scale = np.float32(2.0 ** np.floor(np.log2(0.00685 * spread)))
    d_scale = np.float32(2.0 ** np.ceil(np.log2(0.25 / MAX[gradient])))
    up, up_values, up_count = _product(rng, "up_gate", (rows, 2 * F), E4M3, spread, scale)
    d, d_values, d_count = _product(rng, "d_out", (rows, F), gradient, 0.1, d_scale)
    up_values, d_values = up_values.astype(BF16.numpy), d_values.astype(BF16.numpy)
    plain = {"out": np.full((rows, F), np.nan, BF16.numpy), "up_gate": up_values}
    out = run(dev, op.forward, plain)["out"]
    plain = {"d_up_gate": np.full((rows, 2 * F), np.nan, BF16.numpy)}
    plain |= {"d_out": d_values, "up_gate": up_values}
    d_up_gate = run(dev, op.backward, plain)["d_up_gate"]
    assert not np.isnan(d_up_gate.astype(np.float32)).any()

    peak, d_peak = (np.abs(x.astype(np.float32)).max() for x in (out, d_up_gate))
    forward = up | _fp8("fp8", (rows, F), E4M3, "both", peak / 448 / 4)
    forward |= {"abs_max": np.zeros(1, np.float32), "out": None}
    backward = up | d | _fp8("fp8", (rows, 2 * F), gradient, "both", d_peak / MAX[gradient] / 4)
    backward |= {"up_gate.abs_max": None, "up_gate.saturated": None}  # forward has seen them
    backward |= _fp8("out_fp8", (rows, F), E4M3, "transposed", peak / 448 / 4)
    backward |= {"abs_max": np.zeros(1, np.float32), "d_up_gate": None}
    for arrays, call, product, count, result, values, dtype in (
        (forward, op.forward, "up_gate", up_count, "out", out, E4M3),
        (backward, op.backward, "d_out", d_count, "d_up_gate", d_up_gate, gradient),
    ):
        got = run(dev, _with_products(call), arrays)
        fields = {field: got[f"fp8.{field}"] for field in Fp8Out._fields}
        assert check_codes(fields, values, dtype, "both") > 0
        assert got["abs_max"] == np.abs(values.astype(np.float32)).max()
        assert got[f"{product}.abs_max"] == arrays[f"{product}.largest"]
        assert got[f"{product}.saturated"] == BEFORE["saturated"] + count > BEFORE["saturated"]
        # It is written as a tensor too, and nothing is counted where all was small enough.
        small = np.float32([0.25])
        arrays = arrays | {f"{product}.largest": small, result: np.full_like(values, np.nan)}
        got = run(dev, _with_products(call), arrays)
        assert got[result].tobytes() == values.tobytes()
        kept = [got[f"{product}.{field}"] for field in BEFORE]
        assert kept == [*BEFORE.values()]
        if call is op.backward:
            again = {field: got[f"out_fp8.{field}"] for field in Fp8Out._fields}
            check_codes(again, out, E4M3, "transposed")
            continue
        # Only as a tensor, which is what a step without scales needs.
        arrays = {k: v for k, v in arrays.items() if "fp8" not in k}
        got = run(dev, _with_products(call), arrays)
        assert got[result].tobytes() == values.tobytes()


def test_codes_of_products_on_the_host(rng):
    """The reference's bits are those of the steps one by one: decode, compute, round."""
    test_codes_of_products(host_device(), rng, swiglu, "ragged_tiles", E5M2, 40)


@pytest.mark.parametrize("bits", [0x7F800000, 0x7FC00000, 0xFFC00000], ids=hex)
def test_a_largest_value_that_is_not_finite_reaches_abs_max(dev, bits):
    """Codes of an infinity are finite; what a product then says is infinite, or NaN of any sign."""
    largest = np.array([bits], np.uint32).view(np.float32)
    arrays = {
        "out": np.zeros((16, 16), BF16.numpy),
        "up_gate.codes": np.full((16, 32), 448, E4M3.numpy),
        "up_gate.scale": np.ones(1, np.float32),
        "up_gate.largest": largest,
        **{f"up_gate.{name}": value.reshape(1) for name, value in BEFORE.items()},
    }
    got = run(dev, _with_products(swiglu.forward), arrays)
    np.testing.assert_array_equal(got["up_gate.abs_max"], largest)


def test_leading_dimensions_are_rows(dev, rng):
    up_gate, _ = _inputs(rng, 6, 16, F32)
    flat = run(dev, swiglu.forward, {"out": np.empty((6, 16), np.float32), "up_gate": up_gate})
    arrays = {"out": np.empty((2, 3, 16), np.float32), "up_gate": up_gate.reshape(2, 3, 32)}
    np.testing.assert_array_equal(
        run(dev, swiglu.forward, arrays)["out"].reshape(6, 16), flat["out"]
    )


def test_grid():
    assert swiglu.grid(8, 2) == 1
    assert swiglu.grid(512 * 8, 2) == 1
    assert swiglu.grid(512 * 8 + 8, 2) == 2
    assert swiglu.grid(512 * 8, 4) == 2


def test_wrong_arguments():
    dev = PlanDevice(GPU_SPEC)

    def make(shape, dtype):
        return dev.alloc("x", shape, dtype, "Activations")

    with pytest.raises(ValueError, match=r"swiglu.forward: F must be a multiple of 8 on a GPU"):
        swiglu.forward(dev, make((2, 12), BF16), make((2, 24), BF16))


def test_wrong_fp8_arguments_and_traffic():
    dev = PlanDevice(HOST_SPEC)

    def make(shape, dtype):
        return dev.alloc("x", shape, dtype, "Activations")

    def fp8(codes, transposed):
        return Fp8Out(codes, transposed, make((1,), F32), make((1,), I32))

    up_gate, codes = make((32, 96), BF16), make((32, 48), E4M3)
    both = fp8(codes, make((48, 32), E4M3))
    swiglu.forward(dev, None, up_gate, fp8=both)
    assert dev.bytes == {"swiglu_forward_fp8": 32 * 48 * 6 + 4 + 8}
    with pytest.raises(TypeError, match=r"swiglu.forward: out or fp8 must be given"):
        swiglu.forward(dev, None, up_gate)
    with pytest.raises(TypeError, match="d_up_gate, fp8 or abs_max must be given"):
        swiglu.backward(dev, None, make((32, 48), BF16), up_gate)
    with pytest.raises(ValueError, match="swiglu_backward_fp8: F must be a multiple of 16, got 24"):
        up_gate, d_up_gate = make((32, 48), BF16), make((32, 48), E4M3)
        swiglu.backward(dev, None, make((32, 24), BF16), up_gate, fp8=fp8(d_up_gate, None))
    with pytest.raises(
        ValueError, match="swiglu_forward_fp8: rows must be a multiple of 4, got 22"
    ):
        swiglu.forward(dev, None, make((22, 96), BF16), fp8=fp8(make((22, 48), E4M3), None))


def test_wrong_products_and_traffic():
    dev = PlanDevice(HOST_SPEC)

    def make(shape, dtype):
        return dev.alloc("x", shape, dtype, "Activations")

    def product(shape, dtype, **fields):
        f32 = make((1,), F32)
        return ProductCodes(make(shape, dtype), f32, f32, f32)._replace(**fields)

    both = Fp8Out(make((32, 48), E4M3), make((48, 32), E4M3), make((1,), F32), make((1,), I32))
    wide = Fp8Out(make((32, 96), E5M2), make((96, 32), E5M2), make((1,), F32), make((1,), I32))
    up, d = product((32, 96), E4M3), product((32, 48), E5M2)
    swiglu.forward(dev, None, up, fp8=both)
    assert dev.bytes == {"swiglu_forward_fp8": 32 * 48 * 4 + 4 + 8 + 4}
    swiglu.backward(dev, None, d, up, fp8=wide)
    assert dev.bytes["swiglu_backward_fp8"] == 32 * 48 * 7 + 4 + 8 + 8
    with pytest.raises(TypeError, match=r"backward: d_out and up_gate must both be codes"):
        swiglu.backward(dev, None, make((32, 48), BF16), up, fp8=wide)


def test_wrong_arguments_of_out_again_and_traffic():
    dev = PlanDevice(HOST_SPEC)

    def make(shape, dtype):
        return dev.alloc("x", shape, dtype, "Activations")

    def fp8(codes, transposed):
        return Fp8Out(codes, transposed, make((1,), F32), make((1,), I32))

    d_out, up_gate = make((32, 48), BF16), make((32, 96), BF16)
    again = fp8(None, make((48, 32), E4M3))
    swiglu.backward(dev, up_gate, d_out, up_gate, out=make((32, 48), BF16))
    assert dev.bytes == {"swiglu_backward": 32 * 48 * 2 * 6}
    swiglu.backward(dev, up_gate, d_out, up_gate, out_fp8=again)
    assert dev.bytes["swiglu_backward_fp8"] == 32 * 48 * (2 * 5 + 1) + 4 + 8

    def refused(error, match, *, rows=32, d=up_gate, **again):
        with pytest.raises(error, match=r"swiglu.backward(_fp8)?: " + match):
            swiglu.backward(dev, d, make((rows, 48), BF16), make((rows, 96), BF16), **again)

    refused(TypeError, "out and out_fp8 are both given", out=d_out, out_fp8=again)
    refused(TypeError, "d_up_gate, fp8 or abs_max must be given", d=None, out_fp8=again)
    both = fp8(make((32, 48), E4M3), again.transposed)
    refused(TypeError, ".*codes must be None", out_fp8=both)
    refused(TypeError, "out_fp8 must have transposed alone", out_fp8=fp8(None, None))
    d, again = make((22, 96), BF16), fp8(None, make((48, 32), E4M3))
    refused(ValueError, "rows must be a multiple of 4, got 22", rows=22, d=d, out_fp8=again)
