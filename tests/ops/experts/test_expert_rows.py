"""Sorted rows on a device against the reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, I32
from llmq.base.operand import Fp8Out
from llmq.base.tensor import Accumulator
from llmq.ops.experts import expert_rows as op
from llmq.ops.pointwise import swiglu
from llmq.ref.experts.expert_rows import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, compared, host_device, run, step_scalars

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


def sorted_arrays(chosen, E):
    return {
        "order": np.full(chosen.size, -1, np.int32),
        "place": np.full(chosen.shape, -1, np.int32),
        "starts": np.full(E + 1, -1, np.int32),
        "chosen": chosen,
    }


def choices(rng, S, E, top_k, kind):
    if kind == "one_expert":
        return np.full((S, top_k), E - 1, np.int32)
    return np.argsort(rng.uniform(size=(S, E)), axis=1)[:, :top_k].astype(np.int32)


def eighths(rng, shape, dtype):
    """Multiples of 1/8: F32 sums of their products are exact in any order."""
    return (rng.integers(-8, 9, shape) / 8).astype(dtype.numpy)


@pytest.mark.parametrize("kind", ["different", "one_expert"])
@pytest.mark.parametrize("S, C, E, top_k", SMALL.values(), ids=SMALL)
def test_sort_rows(dev, rng, S, C, E, top_k, kind):
    chosen = choices(rng, S, E, top_k, kind)
    got = compared(dev, op.sort_rows, sorted_arrays(chosen, E))
    np.testing.assert_array_equal(np.sort(got["order"]), np.arange(S * top_k))
    assert got["starts"][0] == 0 and got["starts"][-1] == S * top_k


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_gather_of_codes(dev, rng, dtype):
    place = rng.permutation(33 * 4).reshape(33, 4).astype(np.int32)
    x = rng.integers(0, 256, (33, 784), np.uint8)
    arrays = {"out": np.zeros((132, 784), np.uint8).view(dtype.numpy), "x": x.view(dtype.numpy)}
    for device in (dev, host_device()):
        got = run(device, op.gather_rows, arrays | {"place": place})["out"].view(np.uint8)
        np.testing.assert_array_equal(got[place], np.repeat(x[:, None], 4, axis=1))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("S, C, E, top_k", SMALL.values(), ids=SMALL)
def test_gather_and_combine(dev, rng, S, C, E, top_k, dtype):
    chosen = choices(rng, S, E, top_k, "different")
    made = run(host_device(), op.sort_rows, sorted_arrays(chosen, E))
    gathered = {
        "out": np.full((S * top_k, C), np.nan, dtype.numpy),
        "x": rng.normal(size=(S, C)).astype(dtype.numpy),
        "place": made["place"],
    }
    y = compared(dev, op.gather_rows, gathered)["out"]
    np.testing.assert_array_equal(y, gathered["x"][made["order"] // top_k])
    combined = {
        "out": np.full((S, C), np.nan, dtype.numpy),
        "y": y,
        "place": made["place"],
        "weights": rng.normal(size=(S, top_k)).astype(np.float32),
        "addend": rng.normal(size=(S, C)).astype(dtype.numpy),
    }
    compared(dev, op.combine, combined)
    plain = compared(dev, op.combine, combined | {"weights": None, "addend": None})
    if top_k == 4:  # four times itself is exact
        np.testing.assert_array_equal(plain["out"], 4 * gathered["x"])

    def add(dev, out, addend, **tensors):  # in place
        op.combine(dev, addend, addend=addend, **tensors)

    in_place = run(dev, add, combined)["addend"]
    np.testing.assert_array_equal(in_place, run(host_device(), op.combine, combined)["out"])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("S, C, E, top_k", SMALL.values(), ids=SMALL)
def test_combine_backward(dev, rng, S, C, E, top_k, dtype):
    made = run(host_device(), op.sort_rows, sorted_arrays(choices(rng, S, E, top_k, ""), E))
    arrays = {
        "d_y": eighths(rng, (S * top_k, C), dtype),
        "d_weights": np.full((S, top_k), np.nan, np.float32),
        "weighted": np.full((S * top_k, C), np.nan, dtype.numpy),
        "y": eighths(rng, (S * top_k, C), dtype),
        "place": made["place"],
        "weights": rng.normal(size=(S, top_k)).astype(np.float32),
    }
    want = compared(dev, op.combine_backward, arrays)
    alone = {name: array for name, array in arrays.items() if name != "weighted"}
    np.testing.assert_array_equal(run(dev, op.combine_backward, alone)["d_y"], want["d_y"])

    def in_place(dev, y, **tensors):
        op.combine_backward(dev, y=y, weighted=y, **tensors)

    got = run(dev, in_place, alone)
    np.testing.assert_array_equal(got["y"], want["weighted"])
    np.testing.assert_array_equal(got["d_weights"], want["d_weights"])


@pytest.mark.parametrize("dtype, coded", [(F32, False), (BF16, False), (BF16, True)])
@pytest.mark.parametrize("S, F, top_k, gelu", [(20, 48, 4, False), (8, 272, 10, True)])
def test_swiglu_with_weights_is_three_operations(dev, rng, S, F, top_k, gelu, dtype, coded):
    made = run(host_device(), op.sort_rows, sorted_arrays(choices(rng, S, 16, top_k, ""), 16))
    R, empty = S * top_k, np.zeros
    arrays = {
        "d_up_gate": empty((R, 2 * F), dtype.numpy),
        "d_weights": empty((S, top_k), np.float32),
        "weighted": empty((R, F), dtype.numpy),
        "out": empty((R, F), dtype.numpy),
        "d_out": rng.normal(size=(R, F)).astype(dtype.numpy),
        "up_gate": rng.normal(size=(R, 2 * F)).astype(dtype.numpy),
        "order": made["order"],
        "place": made["place"],
        "weights": rng.uniform(size=(S, top_k)).astype(np.float32),
        "abs_max": empty(1, np.float32) if coded else None,
        "codes": empty((R, 2 * F), E4M3.numpy),
        "scale": np.full(1, 0.005, np.float32),  # of which some are saturated
        "saturated": empty(1, np.int32),
    }

    def once(dev, out, place, codes, scale, saturated, **tensors):
        fp8 = Fp8Out(codes, None, scale, saturated) if coded else None
        swiglu.weighted_backward(dev, fp8=fp8, gelu=gelu, **tensors)

    def apart(
        dev, d_up_gate, d_out, out, up_gate, abs_max, codes, scale, saturated, order, **tensors
    ):
        fp8 = Fp8Out(codes, None, scale, saturated) if coded else None
        swiglu.forward(dev, out, up_gate, gelu=gelu)
        op.combine_backward(dev, d_out, y=out, **tensors)
        swiglu.backward(dev, d_up_gate, d_out, up_gate, gelu=gelu, abs_max=abs_max, fp8=fp8)

    for device in (dev, host_device()):
        got, want = run(device, once, arrays), run(device, apart, arrays)
        for name in ("d_up_gate", "d_weights", "weighted", "abs_max", "codes", "saturated"):
            if arrays[name] is not None:
                np.testing.assert_array_equal(
                    got[name].view(np.uint8), want[name].view(np.uint8), err_msg=name
                )
        assert got["d_weights"].all() and (got["saturated"][0] > 0) == coded

    def in_place(dev, d_up_gate, up_gate, **tensors):
        once(dev, d_up_gate=up_gate, up_gate=up_gate, **tensors)

    want = run(dev, once, arrays)["d_up_gate"]
    np.testing.assert_array_equal(run(dev, in_place, arrays)["up_gate"], want)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("target, dtype", [(F32, F32), (BF16, F32), (BF16, BF16)], ids=str)
@pytest.mark.parametrize("S, C, E, top_k", SMALL.values(), ids=SMALL)
def test_sum_rows(dev, rng, S, C, E, top_k, target, dtype, accumulate):
    chosen = choices(rng, S, max(E // 2, top_k), top_k, "different")
    made = run(host_device(), op.sort_rows, sorted_arrays(chosen, E))
    arrays = {
        "d": eighths(rng, (E, C), target),
        "x": eighths(rng, (S * top_k, C), dtype),
        "starts": made["starts"],
        "weights": eighths(rng, (S, top_k), F32) if accumulate else None,
        "order": made["order"] if accumulate else None,
        "scalars": step_scalars(seed=1, step=2, micro_step=3),
    }

    def call(dev, d, scalars, **tensors):
        op.sum_rows(dev, Accumulator(d, accumulate, scalars, salt=5), **tensors)

    got, absent = compared(dev, call, arrays)["d"], np.diff(arrays["starts"]) == 0
    np.testing.assert_array_equal(got[absent], arrays["d"][absent] if accumulate else 0)


def test_a_row_that_is_nan_reaches_no_other(dev, rng):
    S, C, E, top_k = CASES["small"]
    made = run(host_device(), op.sort_rows, sorted_arrays(choices(rng, S, E, top_k, ""), E))
    y = rng.normal(size=(S * top_k, C)).astype(BF16.numpy)
    y[made["place"][7]] = np.nan
    arrays = {"out": np.zeros((S, C), BF16.numpy), "y": y, "place": made["place"]}
    out = run(dev, op.combine, arrays)["out"].astype(np.float32)
    assert np.isnan(out[7]).all() and np.isfinite(np.delete(out, 7, axis=0)).all()


def test_wrong_arguments():
    dev = PlanDevice(GPU_SPEC)

    def make(shape, dtype):
        return dev.alloc("t", shape, dtype, "Activations")

    x, y, place, order = (
        make((4, 16), BF16),
        make((8, 16), BF16),
        make((4, 2), I32),
        make((8,), I32),
    )
    op.sort_rows(dev, order, place, make((9,), I32), place)
    op.gather_rows(dev, y, x, place)
    op.combine(dev, x, y, place)
    with pytest.raises(ValueError, match="rows_count: E must be at most 512, got 513"):
        op.sort_rows(dev, order, place, make((514,), I32), place)
    with pytest.raises(ValueError, match="top_k must be at most 32, got 33"):
        op.combine(dev, x, y, make((4, 33), I32))
    up, two, three = make((8, 32), BF16), make((4, 2), F32), make((4, 3), F32)
    with pytest.raises(
        ValueError, match=r"weighted_swiglu_backward: S\*top_k must be equal to 8, got 12"
    ):
        swiglu.weighted_backward(dev, up, three, y, up, order, three)
    with pytest.raises(TypeError, match="d_up_gate or fp8 must be given"):
        swiglu.weighted_backward(dev, None, two, y, up, order, two)
