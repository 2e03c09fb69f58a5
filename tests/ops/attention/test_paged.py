"""Attention through a paged cache on a device against the reference."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, F32, I32
from llmq.ops.attention import paged
from llmq.ref.attention.paged import LATENT_CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, host_device, run
from tests.ref.attention.test_paged import SMALL, inputs, lengths_of

# F32: other sums, of up to 600 terms, and 2^x of the special function unit. BF16: probabilities are
# rounded before they are multiplied, and results after that.
TOLERANCE = {F32: {"rtol": 2e-5, "atol": 2e-5}, BF16: {"rtol": 2**-6, "atol": 2**-7}}


def attend(dev, arrays, heads, dtype, window=None, sinks=None, **more):
    """The caches and out of a pass."""
    S, n, _, Hd = arrays["qkv"].shape
    out = np.full((S, n, heads[0] * Hd), np.nan, dtype.numpy)

    def call(dev, out, sinks, arrived, scales=None, **tensors):
        how = {"arrived": arrived, "scales": scales}
        paged.attend(dev, out, *tensors.values(), *heads, window, sinks, **how, **more)

    arrived = np.zeros(paged.arrivals(S, heads[0]), np.int32)
    got = run(dev, call, {"out": out, "sinks": sinks, "arrived": arrived} | arrays)
    assert not got["arrived"].any()
    return got


@pytest.mark.parametrize("how", [(None, False), (40, True), (300, False)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_equals_reference(dev, rng, case, dtype, how):
    window, sinking = how
    heads = case[2:4]
    arrays, _ = inputs(rng, case, *lengths_of(rng, case), dtype.numpy)
    sinks = (rng.normal(size=heads[0]) * 3).astype(dtype.numpy) if sinking else None
    got = attend(dev, arrays, heads, dtype, window, sinks)
    want = attend(host_device(), arrays, heads, dtype, window, sinks)
    for name in ("k_cache", "v_cache"):
        assert got[name].tobytes() == want[name].tobytes()
    found, expected = (x["out"].astype(np.float32) for x in (got, want))
    np.testing.assert_allclose(found, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ["two_tokens", "piece"])
def test_a_soft_cap(dev, rng, name, dtype):
    case = SMALL[name]
    arrays, _ = inputs(rng, case, *lengths_of(rng, case), dtype.numpy)

    def out(device, **more):
        return attend(device, arrays, case[2:4], dtype, scale=1.0, **more)["out"].astype(np.float32)

    got, want, plain = out(dev, softcap=2), out(host_device(), softcap=2), out(dev)
    np.testing.assert_allclose(got, want, **TOLERANCE[dtype])
    assert np.abs(got - plain).max() > 0.1


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ["odd_heads", "piece", "widest_heads"])
def test_codes_equal_the_reference(dev, rng, name, dtype):
    """Codes are stored with the same bits, of numbers of very different sizes."""
    case = SMALL[name]
    heads, size = case[2:4], case[5]
    lengths, new = lengths_of(rng, case)
    arrays, _ = inputs(rng, case, lengths, new, dtype.numpy)
    arrays["qkv"] *= np.exp2(rng.integers(-2, 3, arrays["qkv"].shape[:3]))[..., None]
    arrays["qkv"] = arrays["qkv"].astype(dtype.numpy)
    arrays["qkv"][0, 0, -1] = 0
    codes = rng.integers(0, 127, (2, *arrays["k_cache"].shape), np.uint8).view(E4M3.numpy)
    arrays |= {"k_cache": codes[0], "v_cache": codes[1]}
    arrays["scales"] = np.full((*codes.shape[1:4], 2), 2**-8, BF16.numpy)
    got = attend(dev, arrays, heads, dtype)
    want = attend(host_device(), arrays, heads, dtype)
    for name in ("k_cache", "v_cache", "scales"):
        assert got[name].tobytes() == want[name].tobytes()
    last, blocks = (lengths + new - 1)[0], arrays["table"][0]
    stored = got["k_cache"][blocks[last // size], last % size].astype(np.float32)
    stored *= got["scales"][blocks[last // size], last % size, :, :1].astype(np.float32)
    keys = arrays["qkv"][0, new[0] - 1, heads[0] : sum(heads)].astype(np.float32)
    np.testing.assert_allclose(stored, keys, rtol=2**-4, atol=np.abs(keys).max() / 2**14)
    found, expected = (x["out"].astype(np.float32) for x in (got, want))
    np.testing.assert_allclose(found, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    ("name", "coded"),
    [("token", False), ("tokens", False), ("tokens", True), ("piece", False), ("piece", True)],
)
def test_values_in_keys_equal_the_reference(dev, rng, name, dtype, coded):
    S, n, Hq, Hd, Vd, size, blocks = LATENT_CASES[name]
    case = (S, n, Hq, 1, Hd, size, blocks)
    arrays, _ = inputs(rng, case, *lengths_of(rng, case), dtype.numpy)
    arrays = {"out": np.full((S, n, Hq, Vd), np.nan, dtype.numpy)} | arrays | {"v_cache": None}
    if coded:
        codes = rng.integers(0, 127, arrays["k_cache"].shape, np.uint8)
        arrays["k_cache"] = codes.view(E4M3.numpy)
        arrays["scales"] = np.full((*codes.shape[:3], 2), 2**-8, BF16.numpy)
    arrays["arrived"] = np.zeros(paged.arrivals(S, Hq), np.int32)

    def call(dev, out, arrived, scales=None, **tensors):
        paged.attend(dev, out, *tensors.values(), Hq, 1, arrived=arrived, scales=scales)

    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    assert got["k_cache"].tobytes() == want["k_cache"].tobytes()
    found, expected = (x["out"].astype(np.float32) for x in (got, want))
    np.testing.assert_allclose(found, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_bits_depend_on_the_sequence_alone(dev, rng, dtype):
    """Not on its neighbours, the room of tables, or how many tokens a pass has."""
    case, heads = (2, 12, 6, 2, 64, 16, 20), (6, 2)
    lengths = [290, 255]
    arrays, _ = inputs(rng, case, lengths, [12, 12], dtype.numpy)
    whole = attend(dev, arrays, heads, dtype, window=270)
    qkv = arrays["qkv"]
    for s in range(2):
        blocks = -(-(lengths[s] + 12) // 16)
        alone = {"k_cache": whole["k_cache"], "v_cache": whole["v_cache"]}
        alone["table"] = arrays["table"][s : s + 1, :blocks]
        at = 0
        for n in (1, 4, 2, 5):
            given = {"qkv": qkv[s : s + 1, at : at + n]} | alone
            given |= {"lengths": np.int32([lengths[s] + at]), "new": np.int32([n])}
            got = attend(dev, given, heads, dtype, window=270)["out"][0]
            np.testing.assert_array_equal(got, whole["out"][s, at : at + n])
            at += n


def test_planned_memory_and_wrong_arguments():
    dev = PlanDevice(GPU_SPEC)

    def make(*shape, dtype=BF16):
        return dev.alloc("x", shape, dtype, "Activations")

    tensors = {"out": make(3, 1, 4, 64), "qkv": make(3, 1, 8, 64)}
    tensors |= {name: make(10, 16, 2, 64) for name in ("k_cache", "v_cache")}
    tensors |= {"table": make(3, 20, dtype=I32)}
    tensors |= {name: make(3, dtype=I32) for name in ("lengths", "new")}
    arrived = make(paged.arrivals(3, 4), dtype=I32)
    paged.attend(dev, **tensors, num_heads=4, num_kv_heads=2, arrived=arrived)
    # Two splits, of which the statistics are padded.
    assert dev.stack.high_water_mark == 4 * 3 * 4 * 2 * 64 + 256
    assert dev.launches == {"paged_decode": 1}
    paged.attend(dev, **tensors, num_heads=4, num_kv_heads=2)
    assert dev.launches == {"paged_decode": 1, "paged_store": 1, "paged_attend": 1}

    def refuse(error, match, **changes):
        with pytest.raises(error, match=match):
            call = partial(paged.attend, num_heads=4, num_kv_heads=2)
            call(dev, **{**tensors, **changes})

    refuse(ValueError, "window must be at least 1, got 0", window=0)
    refuse(ValueError, "scale must be positive", scale=-1.0)
    odd = {"out": make(3, 1, 4, 20), "qkv": make(3, 1, 8, 20)}
    odd |= {name: make(10, 16, 2, 20) for name in ("k_cache", "v_cache")}
    refuse(ValueError, "Hd must be a multiple of 8 on a GPU, got 20", **odd)
