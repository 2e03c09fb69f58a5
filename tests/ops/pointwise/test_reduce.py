"""Adding to a gradient on a device against the reference: the same bits."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.base.tensor import Accumulator
from llmq.ops.pointwise import reduce
from llmq.ref.pointwise.reduce import CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import host_device, run, step_scalars

SMALL = {name: shape for name, shape in CASES.items() if not name.startswith("qwen")}


@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("target, source", [(F32, F32), (BF16, F32), (BF16, BF16)], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_equals_reference(dev, rng, shape, target, source, accumulate):
    start = rng.normal(size=shape) if accumulate else np.full(shape, np.nan)
    arrays = {
        "d_sum": start.astype(target.numpy),
        "x": rng.normal(size=shape).astype(source.numpy),
        "scalars": step_scalars(seed=1, step=2, micro_step=3),
    }

    def call(dev, d_sum, x, scalars):
        reduce.add(dev, Accumulator(d_sum, accumulate, scalars, salt=4), x)

    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    np.testing.assert_array_equal(got["d_sum"], want["d_sum"])


def sum_parts(dev, d_sum, scalars, *, accumulate, names, first=0, **parts):
    acc = Accumulator(d_sum, accumulate, scalars, salt=4)
    tensors = [d_sum if name == "d_sum" else parts[name] for name in names]
    reduce.sum_parts(dev, acc, tensors, first)


def sum_inputs(rng, n, target, source, count):
    # Values have several sizes, so that the order of additions shows.
    values = rng.normal(size=(count + 1, n)) * 10.0 ** rng.uniform(-3, 3, (count + 1, n))
    arrays = {f"part{i}": x.astype(source.numpy) for i, x in enumerate(values[1:])}
    arrays["d_sum"] = values[0].astype(target.numpy)
    arrays["scalars"] = step_scalars(seed=1, step=2, micro_step=3)
    return arrays


@pytest.mark.parametrize("target, source", [(F32, F32), (BF16, F32), (BF16, BF16)], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_sum_of_parts(dev, rng, target, source, accumulate, count):
    arrays = sum_inputs(rng, 2565, target, source, count)
    names = [f"part{i}" for i in range(count)]
    call = partial(sum_parts, accumulate=accumulate, names=names)
    got, want = (run(device, call, arrays)["d_sum"] for device in (dev, host_device()))
    np.testing.assert_array_equal(got, want)
    total = arrays["d_sum"].astype(np.float32) if accumulate else arrays["part0"].astype(np.float32)
    for name in names[not accumulate :]:
        total += arrays[name].astype(np.float32)
    if target == F32 or (count == 1 and not accumulate):
        np.testing.assert_array_equal(want, total.astype(target.numpy))
    else:  # a step of BF16 up or down, and not always to nearest
        np.testing.assert_allclose(want.astype(np.float32), total, rtol=2.0**-7)
        assert (want != total.astype(BF16.numpy)).any()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_sum_in_place(dev, rng, dtype, accumulate):
    arrays = sum_inputs(rng, 1000, dtype, dtype, 3)
    call = partial(sum_parts, accumulate=accumulate)
    copied = {**arrays, "part1": arrays["d_sum"]}
    want = run(host_device(), partial(call, names=["part0", "part1", "part2"]), copied)["d_sum"]
    for device in (dev, host_device()):
        got = run(device, partial(call, names=["part0", "d_sum", "part2"]), arrays)["d_sum"]
        np.testing.assert_array_equal(got, want)


def test_a_part_gets_the_bits_of_the_whole(dev, rng):
    arrays = sum_inputs(rng, 4096, BF16, BF16, 3)
    call = partial(sum_parts, accumulate=True, names=["part0", "part1", "part2"])
    whole = run(dev, call, arrays)["d_sum"]
    for first, n in ((0, 128), (384, 3712)):
        part = {k: v if k == "scalars" else v[first : first + n] for k, v in arrays.items()}
        for device in (dev, host_device()):
            got = run(device, partial(call, first=first), part)["d_sum"]
            np.testing.assert_array_equal(got, whole[first : first + n])


def test_one_part_keeps_its_bits(dev):
    x = np.array([-0.0, 0.0, 1e-40, -np.inf, 3.0], np.float32)
    arrays = {"d_sum": np.full(5, np.nan, np.float32), "part0": x, "scalars": step_scalars()}
    call = partial(sum_parts, accumulate=False, names=["part0"])
    for device in (dev, host_device()):
        assert run(device, call, arrays)["d_sum"].tobytes() == x.tobytes()


def test_wrong_arguments():
    dev = PlanDevice(HOST_SPEC)

    def make(name, shape, dtype):
        return dev.alloc(name, shape, dtype, "Gradients")

    x, scalars = make("x", (4,), F32), make("scalars", (16,), I32)
    acc = Accumulator(make("d", (4,), F32), True, scalars, 0)
    for count in (0, 9):
        with pytest.raises(ValueError, match=f"parts must be 1 to 8 tensors, got {count}"):
            reduce.sum_parts(dev, acc, [x] * count)
    with pytest.raises(ValueError, match=r"reduce_sum: first must be a multiple of 128, got 8"):
        reduce.sum_parts(dev, acc, [x], first=8)
