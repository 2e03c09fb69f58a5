"""FP8 quantization on a device: the same bits as the reference and as ml_dtypes."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, FP8, FP8_MAX, I32
from llmq.base.operand import Fp8Out, turned
from llmq.ops.quantize import quantize
from llmq.ref.common import FP8_NAN as NAN
from llmq.ref.quantize.quantize import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.covering import pairwise
from tests.fp8_out import LAYOUTS, check_codes, outputs, with_fp8
from tests.harness import host_device, run

SMALL = {name: shape for name, shape in CASES.items() if not name.startswith("qwen")}
LARGEST = {dtype: np.float32(largest) for dtype, largest in FP8_MAX.items()}
OUTPUTS = {"q": (True, False), "q_t": (False, True), "both": (True, True)}
UNTOUCHED = 0xA5  # no NaN, in which an element that is not written would go unnoticed

ALL_BF16 = np.arange(1 << 16, dtype=np.uint16).view(BF16.numpy).reshape(256, 256)
# Ordinary ones; powers of 2; the floor and below; the largest and the smallest numbers; none.
ABS_MAX = [3.0, 448.0, 1.0, 1e-10, 1e-30, 1e-45, 0.0, 3.38953139e38, 3.4028235e38, np.inf, np.nan]


def arrays_of(x, abs_max, dtype, outputs):
    def output(shape, wanted):
        return np.full(shape, UNTOUCHED, np.uint8).view(dtype.numpy) if wanted else None

    q, q_t = OUTPUTS[outputs]
    return {
        "q": output(x.shape, q),
        "q_t": output(turned(x.shape), True) if q_t else None,
        "scale": np.full(1, np.nan, np.float32),
        "x": x,
        "abs_max": np.array([abs_max], np.float32),
    }


def check_bits(got, codes, scale):
    """codes: uint8 (rows, cols)."""
    if got["q"] is not None:
        np.testing.assert_array_equal(got["q"].view(np.uint8), codes)
    if got["q_t"] is not None:
        np.testing.assert_array_equal(got["q_t"].view(np.uint8), transpose(codes, got["scale"][0]))
    np.testing.assert_array_equal(got["scale"], scale)


def transpose(codes, scale=1.0):
    """Codes (rows, cols) in the other layout, with those of zeros behind the rows."""
    out = np.full(turned(codes.shape), NAN if np.isnan(scale) else 0, np.uint8)
    out[:, : len(codes)] = codes.T
    return out


def expected(x, abs_max, dtype):
    """Codes and scale by ml_dtypes."""
    m = np.maximum(np.float32(abs_max), np.float32(1e-10))
    scale = m / LARGEST[dtype] if np.isfinite(abs_max) else np.float32(np.nan)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = x.astype(np.float32) * (np.float32(1) / scale)
        # Formats without infinity, or with: neither is wanted.
        codes = scaled.clip(-LARGEST[dtype], LARGEST[dtype]).astype(dtype.numpy).view(np.uint8)
    return np.where(np.isnan(scaled), np.uint8(NAN), codes), scale


@pytest.mark.parametrize("outputs", ["q", "both"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("abs_max", ABS_MAX)
def test_all_bf16_numbers(dev, abs_max, dtype, outputs):
    codes, scale = expected(ALL_BF16, abs_max, dtype)
    assert len(np.unique(codes)) > 200 or not 1 <= abs_max < 1e38
    arrays = arrays_of(ALL_BF16, abs_max, dtype, outputs)
    for device in (dev, host_device()):
        check_bits(run(device, quantize.quantize, arrays), codes, scale)


@pytest.mark.parametrize(
    "case, source, dtype, outputs",
    pairwise(case=SMALL, source=(F32, BF16), dtype=(E4M3, E5M2), outputs=OUTPUTS),
    ids=str,
)
def test_equals_reference(dev, rng, case, source, dtype, outputs):
    rows, cols = SMALL[case]
    # Values have all sizes, so that neighbours differ and a wrong place shows.
    x = rng.normal(size=(rows, cols)) * 10.0 ** rng.uniform(-3, 3, (rows, cols))
    x = x.astype(source.numpy)
    abs_max = np.abs(x.astype(np.float32)).max()
    codes, scale = expected(x, abs_max, dtype)
    arrays = arrays_of(x, abs_max, dtype, outputs)
    for device in (dev, host_device()):
        check_bits(run(device, quantize.quantize, arrays), codes, scale)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_ties_in_f32_go_to_even(dev, dtype):
    # All codes' values, the midpoints between them, and those moved up and down by a little.
    values = np.arange(256, dtype=np.uint8).view(dtype.numpy).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    middles = (values[1:] + values[:-1]) / 2
    x = np.concatenate(
        [values, middles, np.nextafter(middles, 0), np.nextafter(middles, values[1:])]
    )
    x = np.resize(x, (64, 32)).astype(np.float32)
    arrays = arrays_of(x, LARGEST[dtype], dtype, "both")
    codes, scale = expected(x, LARGEST[dtype], dtype)
    assert scale == 1
    check_bits(run(dev, quantize.quantize, arrays), codes, 1)


@pytest.mark.parametrize("source", [F32, BF16], ids=str)
@pytest.mark.parametrize("first, size", [(0, 128), (128, 8320), (8448, 2 * 8192)])
def test_part_of_a_matrix(dev, rng, first, size, source):
    x = rng.normal(size=(96, 304)).astype(source.numpy)
    abs_max = np.abs(x.astype(np.float32)).max()
    codes, scale = expected(x, abs_max, E4M3)
    part = x.reshape(-1)[first : first + size]
    for device in (dev, host_device()):
        got = run(device, quantize.quantize, arrays_of(part, abs_max, E4M3, "q"))
        check_bits(got, codes.reshape(-1)[first : first + size], scale)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", [*SMALL.values(), (272, 384), (3, 16, 32), (3, 20, 32)], ids=str)
def test_transpose(dev, rng, shape, dtype):
    q = rng.integers(0, 256, shape, np.uint8)
    want = np.array([transpose(each) for each in q]) if q.ndim > 2 else transpose(q)
    arrays = {"q_t": np.full_like(want, UNTOUCHED).view(dtype.numpy)}
    arrays |= {"q": q.view(dtype.numpy)}
    for device in (dev, host_device()):
        got = run(device, quantize.transpose, arrays)["q_t"]
        np.testing.assert_array_equal(got.view(np.uint8), want)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("target", [F32, BF16], ids=str)
@pytest.mark.parametrize("n", [16, 4096 + 272])
def test_dequantize(dev, n, target, dtype):
    """Dequantized values of all codes but NaN and infinities."""
    values = np.arange(n).astype(np.uint8).view(dtype.numpy)
    values = np.where(np.isfinite(values.astype(np.float32)), values, np.zeros(1, dtype.numpy))
    scale = np.array([0.3], np.float32)
    arrays = {"out": np.full(n, np.nan, target.numpy), "q": values, "scale": scale}
    got, want = (
        run(dev, quantize.dequantize, arrays),
        run(host_device(), quantize.dequantize, arrays),
    )
    np.testing.assert_array_equal(got["out"], want["out"])
    exact = (values.astype(np.float32) * scale).astype(target.numpy)
    np.testing.assert_array_equal(want["out"], exact)


@pytest.mark.parametrize("rows, cols", [*SMALL.values(), (32768, 8960)])
def test_grids_cover_everything(rows, cols):
    assert (
        (quantize.grid(rows * cols) - 1) * 8192 < rows * cols <= quantize.grid(rows * cols) * 8192
    )


@pytest.mark.parametrize(
    "case, source, dtype, layout",
    pairwise(case=SMALL, source=(F32, BF16), dtype=(E4M3, E5M2), layout=LAYOUTS),
    ids=str,
)
def test_scaled(dev, rng, case, source, dtype, layout):
    rows, cols = SMALL[case]
    x = rng.normal(size=(rows, cols)) * 10.0 ** rng.uniform(-3, 3, (rows, cols))
    x = x.astype(source.numpy)
    largest = np.abs(x.astype(np.float32)).max()
    call = with_fp8(quantize.scaled)
    for factor in (2.0, 0.1):  # without and with saturation
        scale = np.float32(factor) * largest / LARGEST[dtype]
        arrays = {"x": x, "abs_max": np.full(1, 1e-6, np.float32)}
        arrays |= outputs(x.shape, dtype, layout, scale)
        for device in (dev, host_device()):
            got = run(device, call, arrays)
            assert (check_codes(got, x, dtype, layout) > 0) == (factor < 1)
            assert got["abs_max"] == largest


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-12, 3e-3])
def test_scaled_without_abs_max_of_all_bf16_numbers(dev, dtype, scale):
    arrays = {"x": ALL_BF16} | outputs(ALL_BF16.shape, dtype, "both", np.float32(scale))
    for device in (dev, host_device()):
        check_codes(run(device, with_fp8(quantize.scaled), arrays), ALL_BF16, dtype, "both")


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("abs_max", ABS_MAX)
def test_scaled_as_quantize_does_it(dev, dtype, abs_max):
    """Codes recomputed with the first pass's scale are equal to the first codes."""
    want = run(dev, quantize.quantize, arrays_of(ALL_BF16, abs_max, dtype, "both"))
    arrays = {"x": ALL_BF16} | outputs(ALL_BF16.shape, dtype, "both", want["scale"][0])
    got = run(dev, with_fp8(quantize.scaled), arrays)
    for name, same in (("codes", "q"), ("transposed", "q_t")):
        np.testing.assert_array_equal(got[name].view(np.uint8), want[same].view(np.uint8))


def test_traffic_and_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)

    def make(shape, dtype):
        return dev.alloc("x", shape, dtype, "Activations")

    x, q, q_t = make((32, 48), BF16), make((32, 48), E4M3), make((48, 32), E4M3)
    one = make((1,), F32)
    quantize.quantize(dev, q, q_t, one, x, one)
    assert dev.bytes == {"quantize_transpose": 32 * 48 * 4 + 8}
    quantize.quantize(dev, q, None, one, x, one)
    assert dev.bytes["quantize"] == 32 * 48 * 3 + 8
    with pytest.raises(ValueError, match="quantize: cols must be a multiple of 16, got 40"):
        quantize.quantize(dev, make((32, 40), E4M3), None, one, make((32, 40), BF16), one)
    count = make((1,), I32)
    quantize.scaled(dev, x, Fp8Out(q, q_t, one, count))
    assert dev.bytes["quantize_scaled"] == 32 * 48 * 4 + 4 + 2 * 4
    with pytest.raises(ValueError, match="quantize_scaled: cols must be a multiple of 16, got 40"):
        quantize.scaled(dev, make((32, 40), BF16), Fp8Out(q, None, one, count))


def test_traffic_and_wrong_arguments_of_transpose():
    dev = PlanDevice(HOST_SPEC)

    def make(shape, dtype=E4M3):
        return dev.alloc("x", shape, dtype, "Activations")

    quantize.transpose(dev, make((48, 32)), make((32, 48)))
    assert dev.bytes == {"transpose_codes": 32 * 48 * 2}
    with pytest.raises(
        ValueError,
        match="transpose_codes: cols must be a multiple of 16, got 40",
    ):
        quantize.transpose(dev, make((40, 32)), make((32, 40)))
