"""Products of sorted rows on a device against the reference."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E4M3_HALF, E4M3_HALF_MAX, E5M2, F32, I32
from llmq.base.tensor import Accumulator
from llmq.ops.experts import grouped as op
from llmq.ref.experts.grouped import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, compared, run, step_scalars

SMALL = {name: case for name, case in CASES.items() if not name.startswith(("qwen", "olmoe"))}
DTYPES = [(F32, F32), (BF16, F32), (BF16, BF16)]


def starts_of(rng, R, E):
    """Some experts have many rows, some none; with several experts the last one has none."""
    edges = np.sort(rng.integers(0, R + 1, max(E - 2, 0)))
    edges[: len(edges) // 3] = 0
    return np.array([0, *edges, *[R] * (E - len(edges))], np.int32)


def eighths(rng, shape, dtype):
    """Multiples of 1/8: F32 sums of their products are exact in any order."""
    return (rng.integers(-8, 9, shape) / 8).astype(dtype.numpy)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("R, N, K, E", SMALL.values(), ids=SMALL)
def test_grouped_matmul(dev, rng, R, N, K, E, trans_b, dtype):
    arrays = {
        "out": np.full((R, N), np.nan, dtype.numpy),
        "x": eighths(rng, (R, K), dtype),
        "w": eighths(rng, (E, N, K) if trans_b else (E, K, N), dtype),
        "starts": starts_of(rng, R, E),
        "bias": eighths(rng, (E, N), dtype),
        "addend": eighths(rng, (R, N), dtype),
    }

    def call(dev, **tensors):
        op.grouped_matmul(dev, **tensors, trans_b=trans_b)

    def add(dev, out, addend, **tensors):  # in place
        op.grouped_matmul(dev, addend, addend=addend, **tensors, trans_b=trans_b)

    whole = compared(dev, call, arrays)["out"]
    np.testing.assert_array_equal(run(dev, add, arrays)["addend"], whole)
    alone = compared(dev, call, arrays | {"bias": None, "addend": None})["out"]
    assert (whole != alone).any()


@pytest.mark.parametrize("x, w", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
def test_grouped_matmul_of_codes(dev, rng, x, w):
    if 0 < dev.spec.capability < 89:
        pytest.skip("this GPU does not multiply fp8 codes")
    R, N, K, E = 300, 136, 176, 7
    arrays = {
        "out": np.full((R, N), np.nan, BF16.numpy),
        "x": eighths(rng, (R, K), x),
        "w": eighths(rng, (E, N, K), w),
        "starts": starts_of(rng, R, E),
        "scale_x": np.full(1, 0.5, np.float32),
        "scale_w": np.full(1, 4.0, np.float32),
        "bias": eighths(rng, (E, N), BF16),
    }
    got = compared(dev, partial(op.grouped_matmul, trans_b=True), arrays)["out"]
    plain = {"x": BF16, "w": BF16, "scale_x": None, "scale_w": None}
    arrays |= {n: None if d is None else arrays[n].astype(d.numpy) for n, d in plain.items()}
    arrays["x"] *= BF16.numpy.type(2)
    np.testing.assert_array_equal(
        run(dev, partial(op.grouped_matmul, trans_b=True), arrays)["out"], got
    )


def half_arrays(rng, codes):
    """One matrix is for all rows, codes are of what `codes` makes, K is no multiple of 64."""
    M, N, K = 300, 136, 336
    return {
        "out": np.full((M, N), np.nan, BF16.numpy),
        "x": codes((M, K)).astype(E4M3_HALF.numpy),
        "w": codes((1, N, K)).astype(E4M3_HALF.numpy),
        "starts": None,
        "scale_x": np.full(1, 0.5, np.float32),
        "scale_w": np.full(1, 4.0, np.float32),
        "bias": eighths(rng, (1, N), BF16),
        "addend": eighths(rng, (M, N), BF16),
    }


def test_sums_in_half_precision(dev, rng):
    """Exact where half precision is, rounded behind each instruction elsewhere, and finite where
    all codes are the largest ones."""
    if 0 < dev.spec.capability < 89:
        pytest.skip("this GPU does not multiply fp8 codes")
    half, full = (partial(op.grouped_matmul, trans_b=True, half=h) for h in (True, False))
    arrays = half_arrays(rng, lambda shape: rng.integers(-8, 9, shape) / 8)
    np.testing.assert_array_equal(
        compared(dev, half, arrays)["out"], compared(dev, full, arrays)["out"]
    )
    arrays = half_arrays(rng, lambda shape: rng.integers(-15, 16, shape))
    exact = run(dev, full, arrays)["out"].astype(np.float32)
    # A GPU may round behind 16 products, and down: four times in each of six sums,
    # which are below 4,096 here, by at most 2, times both scales; and BF16 rounds the result.
    got = run(dev, half, arrays)["out"].astype(np.float32)
    np.testing.assert_allclose(got, exact, rtol=2**-7, atol=2 * 6 * 4 * 2)
    assert (got != exact).any()
    if dev.kind != "cuda":
        compared(dev, half, arrays)
    arrays = half_arrays(rng, lambda shape: np.full(shape, E4M3_HALF_MAX))
    arrays |= {"bias": None, "addend": None}
    assert (compared(dev, half, arrays)["out"] == BF16.numpy.type(2 * 336 * 900)).all()
    with pytest.raises(TypeError, match="half needs operands in F8_E4M3_HALF, got F8_E4M3"):
        run(dev, half, arrays | {name: arrays[name].astype(E4M3.numpy) for name in "xw"})


def gradient_arrays(rng, R, N, K, E, target, dtype):
    return {
        "d": eighths(rng, (E, N, K), target),
        "d_y": eighths(rng, (R, N), dtype),
        "x": eighths(rng, (R, K), dtype),
        "starts": starts_of(rng, R, E),
        "scalars": step_scalars(seed=1, step=2, micro_step=3),
    }


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("target, dtype", DTYPES, ids=str)
@pytest.mark.parametrize("R, N, K, E", SMALL.values(), ids=SMALL)
def test_gradients(dev, rng, R, N, K, E, target, dtype, accumulate):
    arrays = gradient_arrays(rng, R, N, K, E, target, dtype)

    def weights(dev, d, scalars, **tensors):
        op.grouped_gradient(dev, Accumulator(d, accumulate, scalars, salt=5), **tensors)

    absent = np.flatnonzero(np.diff(arrays["starts"]) == 0)
    got = compared(dev, weights, arrays)["d"]
    np.testing.assert_array_equal(got[absent], arrays["d"][absent] if accumulate else 0)


def test_any_number_of_blocks_finds_all_tiles(dev, rng):
    """Many experts, of which many have no rows: more tiles than blocks, and the reverse."""
    R, N, K, E = 700, 136, 8, 200
    starts = np.sort(np.concatenate([[0, R], rng.integers(0, R // 9, E - 1) * 9])).astype(np.int32)
    starts[50:120] = starts[50]
    arrays = {
        "out": np.full((R, N), np.nan, BF16.numpy),
        "x": eighths(rng, (R, K), BF16),
        "w": eighths(rng, (E, N, K), BF16),
        "starts": starts,
    }
    compared(dev, lambda dev, **t: op.grouped_matmul(dev, **t, trans_b=True), arrays)
    arrays["starts"] = np.where(np.arange(E + 1) > 150, R, 0).astype(np.int32)  # one has them all
    compared(dev, lambda dev, **t: op.grouped_matmul(dev, **t, trans_b=True), arrays)


def test_sums_of_any_numbers_are_those_of_f32(dev, rng):
    """Sums in another order than NumPy's: within a few roundings of F32, and one of BF16."""
    R, N, K, E = CASES["ragged"]
    arrays = {
        "out": np.full((R, N), np.nan, BF16.numpy),
        "x": rng.normal(size=(R, K)).astype(BF16.numpy),
        "w": rng.normal(size=(E, K, N)).astype(BF16.numpy),
        "starts": starts_of(rng, R, E),
    }
    got = run(dev, op.grouped_matmul, arrays)["out"].astype(np.float64)
    of_row = np.repeat(np.arange(E), np.diff(arrays["starts"]))
    x, w = (arrays[name].astype(np.float64) for name in "xw")
    want = np.einsum("rk,rkn->rn", x, w[of_row])
    np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-4)


def test_a_row_that_is_nan_reaches_no_other(dev, rng):
    R, N, K, E = CASES["small"]
    arrays = {
        "out": np.zeros((R, N), BF16.numpy),
        "x": rng.normal(size=(R, K)).astype(BF16.numpy),
        "w": rng.normal(size=(E, K, N)).astype(BF16.numpy),
        "starts": starts_of(rng, R, E),
    }
    arrays["x"][7, 3] = np.nan
    out = run(dev, op.grouped_matmul, arrays)["out"].astype(np.float32)
    assert np.isnan(out[7]).all() and np.isfinite(np.delete(out, 7, axis=0)).all()


def test_wrong_arguments():
    dev = PlanDevice(GPU_SPEC)

    def make(shape, dtype):
        return dev.alloc("t", shape, dtype, "Activations")

    out, x, w, starts = (
        make((6, 16), BF16),
        make((6, 8), BF16),
        make((3, 8, 16), BF16),
        make((4,), I32),
    )
    op.grouped_matmul(dev, out, x, w, starts)
    with pytest.raises(
        TypeError, match="grouped_matmul: out, x and w must have one dtype, got BF16, F32, BF16"
    ):
        op.grouped_matmul(dev, out, make((6, 8), F32), w, starts)
    with pytest.raises(
        ValueError, match="grouped_product: K must be a multiple of 8 on a GPU, got 12"
    ):
        op.grouped_matmul(dev, out, make((6, 12), BF16), make((3, 12, 16), BF16), starts)
