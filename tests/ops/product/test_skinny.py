"""Products of few rows on a device against the reference."""

from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, F32, I8
from llmq.base.operand import Bytes, BytesRun, Mxfp4, Nf4, Nf4Run
from llmq.ops.product import skinny
from llmq.ops.product.product import product
from llmq.ref.product.skinny import BYTES_CASES, CASES, MXFP4_CASES, NF4_CASES
from llmq.ref.quantize.four_bits import scale_levels
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, close, run

SMALL_BYTES = {name: case for name, case in BYTES_CASES.items() if "qwen" not in name}
SMALL_MXFP4 = {name: case for name, case in MXFP4_CASES.items() if "gpt" not in name}
SMALL_NF4 = {name: case for name, case in NF4_CASES.items() if not name.startswith("qwen")}
SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


@pytest.fixture(params=[1, 2])
def spread(request, monkeypatch):
    """Blocks of so many times 16 rows of codes, whatever the product's size."""
    of = skinny.Block.of
    monkeypatch.setattr(skinny.Block, "of", lambda *a: of(*a)._replace(spread=request.param))


def arrays_of(rng, case, dtype, added):
    M, N, K = case
    arrays = {"out": np.full((M, N), np.nan, dtype.numpy)}
    arrays |= {name: rng.normal(size=s) for name, s in (("a", (M, K)), ("b", (N, K)))}
    arrays |= {name: x.astype(BF16.numpy) for name, x in arrays.items() if name != "out"}
    shapes = {"bias": N, "addend": (M, N)}
    return arrays | {
        name: rng.normal(size=shape).astype(dtype.numpy) if added else None
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_equals_reference(dev, rng, case, dtype, added):
    """Products are exact in F32; sums have another order, and may round to the next BF16."""
    call = partial(skinny.skinny, alpha=0.7 if added else 1.0)
    close(dev, call, arrays_of(rng, case, dtype, added), ["out"], bf16=2**-7, f32=2e-4)


def codes_of(rng, rows, K, modules):
    """Random codes of so many rows, as of `Nf4Run`."""
    blocks = rows * K // 64
    arrays = {"codes": rng.integers(0, 256, 32 * blocks, np.uint8)}
    arrays["scale_codes"] = rng.integers(0, 256, blocks, np.uint8)
    arrays["groups"] = rng.random(modules * -(-blocks // modules // 256)).astype(np.float32)
    arrays["mean"] = rng.random(modules).astype(np.float32) + 1
    return arrays | {"levels": scale_levels()}


def multiply_codes(shape, first, dev, out, a, levels, starts=None, bias=None, addend=None, **codes):
    run = Nf4Run(first, codes["codes"].size * 2 // shape[-1], **codes)
    b = Nf4(shape=shape, runs=(run,), levels=levels)
    skinny.skinny_nf4(dev, out, a, b, starts, bias=bias, addend=addend, alpha=0.7)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("case", SMALL_NF4.values(), ids=SMALL_NF4)
@pytest.mark.usefixtures("spread")
def test_codes_of_nf4_equal_the_reference(dev, rng, case, dtype):
    M, N, K, first, end, modules = case
    arrays = arrays_of(rng, (M, N, K), dtype, M > 1)
    arrays["out"][:] = 7  # other columns stay
    del arrays["b"]
    arrays |= codes_of(rng, end - first, K, modules)
    call = partial(multiply_codes, (N, K), first)
    got = close(dev, call, arrays, ["out"], bf16=2**-7, f32=2e-4)["out"]
    assert (got[:, :first] == 7).all() and (got[:, end:] == 7).all()


@pytest.mark.usefixtures("spread")
def test_codes_of_experts_equal_the_reference(dev, rng):
    """Each has its rows, one of them more than a block takes at a time, and two have none."""
    E, N, K, starts = 6, 40, 128, [0, 0, 3, 4, 24, 29, 29]
    arrays = arrays_of(rng, (29, N, K), BF16, False) | codes_of(rng, E * N, K, 2 * E)
    arrays |= {"starts": np.array(starts, np.int32), "bias": rng.normal(size=(E, N))}
    arrays["bias"] = arrays["bias"].astype(BF16.numpy)
    del arrays["b"]
    close(dev, partial(multiply_codes, (E, N, K), 0), arrays, ["out"], bf16=2**-7, f32=2e-4)
    others = {name: arrays[name] for name in ("out", "a", "starts", "bias")}
    for codes, of_scale in ((E4M3, E * N), (I8, 1)):
        own = others | bytes_of(rng, codes, E * N, K, E * N // of_scale)
        call = partial(multiply_bytes, (E, N, K), (0, E * N, of_scale))
        close(dev, call, own, ["out"], bf16=2**-7, f32=2e-4)


def multiply_mxfp4(shape, dev, out, a, codes, exponents, starts=None, bias=None, addend=None):
    b = Mxfp4(shape=shape, codes=codes, exponents=exponents)
    skinny.skinny_mxfp4(dev, out, a, b, starts, bias=bias, addend=addend, alpha=0.7)


@pytest.mark.parametrize("experts", [1, 5])
@pytest.mark.parametrize("case", SMALL_MXFP4.values(), ids=SMALL_MXFP4)
@pytest.mark.usefixtures("spread")
def test_codes_of_mxfp4_equal_the_reference(dev, rng, case, experts):
    M, N, K = case
    arrays, n = arrays_of(rng, case, BF16, experts == 1), experts * N * K
    del arrays["b"]
    arrays["codes"] = rng.integers(0, 256, n // 2, np.uint8)
    arrays["exponents"] = rng.integers(120, 130, n // 32).astype(np.uint8)
    shape = (N, K)
    if experts > 1:
        shape, cuts = (experts, N, K), np.sort(rng.integers(0, M + 1, experts - 1))
        arrays["starts"] = np.array([0, *cuts, M], np.int32)
        arrays["bias"] = rng.normal(size=(experts, N)).astype(BF16.numpy)
    close(dev, partial(multiply_mxfp4, shape), arrays, ["out"], bf16=2**-7, f32=1e-3)


def multiply_bytes(shape, form, dev, out, a, codes, scales, starts=None, bias=None, addend=None):
    run = BytesRun(form[0], codes.size // shape[-1], codes, scales, *form[1:])
    b = Bytes(shape=shape, runs=(run,))
    skinny.coded(dev, out, a, b, starts, bias=bias, addend=addend, alpha=0.7)


def bytes_of(rng, dtype, rows, K, count):
    """Codes of all values but NaN, and their scales."""
    codes = rng.integers(0, 256, rows * K, np.uint8)
    if dtype is E4M3:
        codes[(codes & 127) == 127] = 0
    return {"codes": codes.view(dtype.numpy), "scales": rng.random(count, np.float32) + 0.5}


@pytest.mark.parametrize("codes", [E4M3, I8], ids=str)
@pytest.mark.parametrize("case", SMALL_BYTES.values(), ids=SMALL_BYTES)
@pytest.mark.usefixtures("spread")
def test_codes_of_a_byte_equal_the_reference(dev, rng, case, codes):
    M, N, K, first, end, of_module, of_scale = case
    columns = -(-K // 128) if of_scale == 128 else 1
    arrays = arrays_of(rng, (M, N, K), BF16, M > 1)
    arrays["out"][:] = 7  # other columns stay
    del arrays["b"]
    scales = (end - first) // of_module * -(-of_module // of_scale) * columns
    arrays |= bytes_of(rng, codes, end - first, K, scales)
    call = partial(multiply_bytes, (N, K), (first, of_module, of_scale, columns))
    got = close(dev, call, arrays, ["out"], bf16=2**-7, f32=2e-4)["out"]
    assert (got[:, :first] == 7).all() and (got[:, end:] == 7).all()


def test_a_row_depends_on_no_other(dev, rng):
    arrays = arrays_of(rng, (16, 24, 1000), F32, False)
    whole = run(dev, skinny.skinny, arrays)["out"]
    for rows in (slice(0, 1), slice(3, 8), slice(7, 16)):
        part = arrays | {"out": arrays["out"][rows], "a": arrays["a"][rows]}
        np.testing.assert_array_equal(run(dev, skinny.skinny, part)["out"], whole[rows])


def test_blocks_read_a_for_more_rows_of_codes_where_there_are_enough():
    dev = PlanDevice(GPU_SPEC)
    enough = 2 * skinny.CODED_FEATURES * dev.spec.num_sms
    assert skinny.Block.of(dev, 1, enough, 1) == (1, 2)
    assert skinny.Block.of(dev, 1, enough - 32, 1) == (1, 1)
    assert skinny.Block.of(dev, 64, enough * 3 // 4, 1) == (8, 2)
    assert skinny.Block.of(dev, 128, 512, 128) == (1, 2)  # two rows of each expert


def test_products_of_few_rows_are_taken():
    """On GPUs, of BF16 and an input of whole vectors."""
    dev = PlanDevice(GPU_SPEC)

    def multiply(M, K, dtype=BF16):
        out, a, b = (dev.alloc("x", s, dtype, "Weights") for s in ((M, 32), (M, K), (32, K)))
        dev.launches.clear()
        product(dev, out, a, b, trans_b=True, alpha=2.0)
        return list(dev.launches)

    assert multiply(16, 24) == ["skinny"]
    assert multiply(17, 24) == multiply(16, 20) == multiply(16, 24, F32) == ["matmul"]
