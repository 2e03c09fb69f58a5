"""Gradients of adapters' h and B on a device against the reference."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.base.tensor import Accumulator
from llmq.ops.common import padded_columns
from llmq.ops.product import adapter as op
from llmq.ref.product.adapter import BACKWARD_CASES as CASES
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, host_device, run, step_scalars

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


def pairs(edges):
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def operands(rng, rows, N, rank, *edges, target=BF16):
    """Multiples of 1/8 up to 1, whose sums of products are exact in F32 in any order."""

    def eighths(*shape, dtype=BF16):
        return (rng.integers(-8, 9, shape) / 8).astype(dtype.numpy)

    columns, n = padded_columns(len(edges) // 2, rank), sum(edges[1::2]) - sum(edges[::2])
    return {
        "d_h": np.full((rows, columns), np.nan, BF16.numpy),
        "d_b": eighths(n, rank, dtype=target),
        "d_out": eighths(rows, N),
        "h": eighths(rows, columns),
        "b": eighths(n, rank),
        "scalars": step_scalars(seed=1, step=2, micro_step=3),
    }


def check(dev, arrays, edges, accumulate=True):
    def call(dev, d_h, d_b, d_out, h, b, scalars):
        target = Accumulator(d_b, accumulate, scalars, salt=5)
        op.backward(dev, d_h, target, d_out, h, b, pairs(edges), 0.3)

    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    for name in ("d_h", "d_b"):
        assert np.isfinite(want[name].astype(np.float32)).all()
        np.testing.assert_array_equal(got[name], want[name])


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_equals_reference(dev, rng, case):
    check(dev, operands(rng, *case), case[3:])


@pytest.mark.parametrize("target, accumulate", [(F32, True), (F32, False), (BF16, False)], ids=str)
def test_targets(dev, rng, target, accumulate):
    case = SMALL["one"]
    check(dev, operands(rng, *case, target=target), case[3:], accumulate)


@pytest.mark.parametrize("rank", [16, 40])
@pytest.mark.parametrize("large", [True, False], ids=["large", "small"])
def test_all_tiles(dev, rng, rank, large, monkeypatch):
    """Several groups of rows and chunks; the large ones as on cards with little shared memory."""
    tiles = op._tiles(rank)[0 if large else 1]
    monkeypatch.setattr(op, "_tiles", lambda rank: (tiles,))
    if large:
        monkeypatch.setattr(op, "stages", lambda spec, tiles: 2)
    op.layout.cache_clear()
    rows, N = tiles.block_rows + 24, 5 * tiles.chunk + 8
    check(dev, operands(rng, rows, N, rank, 0, N), (0, N))
    op.layout.cache_clear()


def test_what_is_beyond_the_matrices_is_not_read(dev, rng):
    """NaN around spans and in h's padding would spread."""
    case = SMALL["two_of_three"]
    arrays = operands(rng, *case)
    arrays["d_out"][:, 64:96] = np.nan
    check(dev, arrays, case[3:])
    case = SMALL["padded"]
    arrays = operands(rng, *case)
    arrays["h"][:, 3:] = np.nan
    check(dev, arrays, case[3:])


@pytest.mark.parametrize("dev", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("case", ["qwen7b_qkv", "qwen7b_up", "qwen7b_head", "qwen7b_up_rank64"])
def test_same_bits_again(dev, rng, case):
    """With all multiprocessors at work, and numbers whose sums depend on their order."""
    _, N, rank, *edges = CASES[case]
    arrays = operands(rng, min(1000, (1 << 25) // N), N, rank, *edges)  # at most 64 MiB of d_out
    for name in ("d_out", "h", "b"):
        arrays[name] = rng.standard_normal(arrays[name].shape, np.float32).astype(BF16.numpy)

    def call(dev, d_h, d_b, scalars, **inputs):
        target = Accumulator(d_b, False, scalars, salt=5)
        op.backward(dev, d_h, target, **inputs, spans=pairs(edges), scale=0.25)

    first, again = run(dev, call, arrays), run(dev, call, arrays)
    for name in ("d_h", "d_b"):
        np.testing.assert_array_equal(again[name].view(np.uint16), first[name].view(np.uint16))
    # The bounds hold for the last span. Sums of 1000 and of thousands of products of size 1 in
    # another order, and one rounding to BF16.
    x, h, b = (arrays[name].astype(np.float32) for name in ("d_out", "h", "b"))
    start, stop = edges[-2:]
    columns = slice((len(edges) // 2 - 1) * rank, len(edges) // 2 * rank)
    for got, want in (
        (first["d_b"][start - stop :], x[:, start:stop].T @ h[:, columns]),
        (first["d_h"][:, columns], x[:, start:stop] @ b[start - stop :]),
    ):
        np.testing.assert_allclose(got.astype(np.float32), 0.25 * want, rtol=2**-8, atol=1e-2)


SPECS = [(132, 90), (108, 80), (128, 89), (34, 120), (4, 0)]
SHAPES = [CASES["qwen7b_up"], CASES["qwen7b_qkv"], CASES["qwen7b_down"], CASES["one"]]


@pytest.mark.parametrize("rank", [1, 8, 16, 32, 40, 64])
def test_layouts(rank):
    """A block has all columns, and the shared memory for these."""
    for (num_sms, capability), (rows, _, _, *edges), more in product(SPECS, SHAPES, (1, 8, 100)):
        cut = op.layout(more * rows, pairs(edges), rank, num_sms)
        assert cut.groups == -(-more * rows // cut.tiles.block_rows)
        assert cut.split_columns % cut.tiles.chunk == 0
        begin = 0
        for (start, stop), end in zip(pairs(edges), cut.ends, strict=True):
            assert 0 <= (end - begin) * cut.split_columns - (stop - start) < cut.split_columns
            begin = end
        blocks = cut.groups * cut.ends[-1]
        assert blocks <= num_sms or cut.ends[-1] == len(cut.ends)
        assert cut.ranks % 8 == 0
        assert 0 <= cut.ranks - rank < 8 * cut.tiles.rank_warps
        count = op.stages(replace(HOST_SPEC, capability=capability), cut.tiles)
        limit = 163 if capability in op.LARGE_SHARED else 99
        assert op.shared_bytes(cut.tiles, rank, count) <= limit << 10


def test_partial_sums_are_small_beside_what_is_read():
    rows, N, rank, *edges = CASES["qwen7b_up"]
    cut = op.layout(rows, pairs(edges), rank, 132)
    # Written and read.
    assert 2 * 4 * cut.partial_elements(rows, N) <= 0.15 * 2 * rows * N
    assert cut.groups * cut.ends[-1] >= 0.9 * 132


def test_wrong_arguments():
    dev = PlanDevice(GPU_SPEC)

    def make(*shape, dtype=BF16):
        return dev.alloc("x", shape, dtype, "Weights")

    def call(spans=((0, 16),), scale=1.0, **changed):
        tensors = {"d_h": make(4, 8), "d_out": make(4, 16), "h": make(4, 8), "b": make(16, 8)}
        tensors |= {"d_b": Accumulator(make(16, 8), True, make(16, dtype=I32), 0)} | changed
        op.backward(dev, **tensors, spans=spans, scale=scale)

    call()
    for spans in (((0, 24),), ((8, 16), (0, 8)), ((0, 16), (16, 16))):
        with pytest.raises(ValueError, match="spans must ascend within 16 rows, none empty"):
            call(spans)
    with pytest.raises(ValueError, match="columns must be multiples of 8 and ranks up to 64"):
        call(((0, 12),), b=make(12, 8))
    with pytest.raises(ValueError, match="columns must be multiples of 8 and ranks up to 64"):
        call(b=make(16, 72), h=make(4, 72), d_h=make(4, 72))
