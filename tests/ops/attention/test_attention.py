"""Attention on a device against the reference."""

from contextlib import closing
from functools import partial

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.ops.attention import attention
from llmq.ops.pointwise import elementwise
from llmq.ref.attention.attention import CASES
from llmq.runtime import cuda_device, tuning
from llmq.runtime.attention_parts import divisions
from llmq.runtime.cudnn import backward_workspace_bytes, divided_workspace_bytes
from llmq.runtime.plan_device import PlanDevice
from tests.conftest import gpu_problem
from tests.harness import GPU_SPEC, host_device, run

SMALL = {name: case for name, case in CASES.items() if case[1] <= 150}
# Error of the whole tensor relative to its norm. F32: the same sums in another order, and expf
# of another library. BF16: the kernel rounds probabilities and score gradients to BF16 (relative
# error up to 2^-9 each) before it multiplies them; then both sides round the result.
NORM_ERROR = {F32: 2e-6, BF16: 2**-8}
# The largest error of an element relative to the largest element: a few roundings of the above.
MAX_ERROR = {F32: 4e-6, BF16: 2**-6}


def _arrays(rng, case, dtype):
    batch, seq_len, heads, kv_heads, head_dim = case
    qkv = rng.normal(size=(batch, seq_len, heads + 2 * kv_heads, head_dim))
    d_out = rng.normal(size=(batch, seq_len, heads, head_dim))
    return qkv.astype(dtype.numpy), d_out.astype(dtype.numpy)


def _starts(lengths, seq_len):
    """I32 (B, T) of sequences whose documents have these lengths; the last one takes the rest."""
    rows = []
    for row in lengths:
        firsts = np.cumsum([0, *row])
        rows.append(np.repeat(firsts, np.diff([*firsts, seq_len])))
    return np.array(rows, np.int32)


def _forward(dev, qkv, heads, kv_heads, starts=None, window=None, **options):
    batch, seq_len, _, head_dim = qkv.shape
    arrays = {
        "out": np.full((batch, seq_len, heads, head_dim), np.nan, qkv.dtype),
        "lse": np.full((batch, heads, seq_len), np.nan, np.float32),
        "qkv": qkv,
        "starts": starts,
    }
    call = partial(attention.forward, num_heads=heads, num_kv_heads=kv_heads, **options)
    got = run(dev, _with_sight(call, window), arrays)
    assert got["qkv"].tobytes() == qkv.tobytes()
    return got["out"], got["lse"]


def _with_sight(call, window):
    """call, with the tensor `starts` and this window as the mask."""

    def with_sight(dev, starts, **tensors):
        call(dev, mask=attention.AttentionMask(starts, window), **tensors)

    return with_sight


def _backward(
    dev,
    qkv,
    d_out,
    heads,
    kv_heads,
    starts=None,
    window=None,
    of_forward=None,
    scale=None,
    **options,
):
    """of_forward: its out and lse; None: the reference's."""
    sizes = (qkv, heads, kv_heads, starts, window)
    softcap = options.get("softcap", 0)
    out, lse = of_forward or _forward(host_device(), *sizes, scale=scale, softcap=softcap)
    arrays = {
        "d_qkv": np.full(qkv.shape, np.nan, qkv.dtype),
        **{"d_out": d_out, "out": out, "lse": lse, "qkv": qkv, "starts": starts},
    }
    options |= {"scale": scale}
    call = partial(attention.backward, num_heads=heads, num_kv_heads=kv_heads, **options)
    return run(dev, _with_sight(call, window), arrays)["d_qkv"]


def _compare(got, want, dtype, floor=0.0):
    """floor: an error that is allowed in any case, in the tensor's units."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    assert np.linalg.norm(got - want) <= NORM_ERROR[dtype] * np.linalg.norm(want) + floor
    assert np.abs(got - want).max() <= MAX_ERROR[dtype] * np.abs(want).max() + floor


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_forward(dev, rng, case, dtype):
    qkv, _ = _arrays(rng, case, dtype)
    out, lse = _forward(dev, qkv, *case[2:4])
    want_out, want_lse = _forward(host_device(), qkv, *case[2:4])
    _compare(out, want_out, dtype)
    # Sums of products of BF16 numbers are F32 on both sides.
    np.testing.assert_allclose(lse, want_lse, rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_backward(dev, rng, case, dtype):
    qkv, d_out = _arrays(rng, case, dtype)
    got = _backward(dev, qkv, d_out, *case[2:4])
    want = _backward(host_device(), qkv, d_out, *case[2:4])
    # d_out v^T - delta cancels, for a single position to nothing but the rounding of either.
    floor = 1e-6 * np.linalg.norm(want.astype(np.float64))
    first_k, first_v = case[2], case[2] + case[3]
    for heads in (slice(first_k), slice(first_k, first_v), slice(first_v, None)):
        _compare(got[:, :, heads], want[:, :, heads], dtype, floor)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_soft_cap(dev, rng, dtype, window):
    """Scores, most of which the cap bends, and their gradients."""
    sizes, how = (4, 2, None, window), {"scale": 0.5, "softcap": 2}
    qkv, d_out = _arrays(rng, (2, 70, *sizes[:2], 64), dtype)
    out, lse = _forward(dev, qkv, *sizes, **how)
    want_out, want_lse = _forward(host_device(), qkv, *sizes, **how)
    _compare(out, want_out, dtype)
    np.testing.assert_allclose(lse, want_lse, rtol=4e-6, atol=4e-6)
    assert np.abs(out - _forward(dev, qkv, *sizes, scale=0.5)[0].astype(np.float64)).max() > 0.1
    got = _backward(dev, qkv, d_out, *sizes, **how)
    want = _backward(host_device(), qkv, d_out, *sizes, **how)
    for heads in (slice(4), slice(4, 6), slice(6, None)):
        _compare(got[:, :, heads], want[:, :, heads], dtype)
    with pytest.raises(ValueError, match="the cudnn backend has no softcap, got 2"):
        _forward(dev, qkv, *sizes, **how, backend="cudnn")


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_an_own_scale(dev, rng, dtype):
    """Scores times the scale; 1 / sqrt(Hd), which is the default, changes no bit."""
    case, rest = (2, 70, 4, 2, 64), (4, 2)
    qkv, d_out = _arrays(rng, case, dtype)
    out, lse = _forward(dev, qkv, *rest, scale=0.3)
    want_out, want_lse = _forward(host_device(), qkv, *rest, scale=0.3)
    _compare(out, want_out, dtype)
    np.testing.assert_allclose(lse, want_lse, rtol=4e-6, atol=4e-6)
    plain, default = (_forward(dev, qkv, *rest, scale=scale)[0] for scale in (None, 0.125))
    np.testing.assert_array_equal(plain, default)
    assert np.abs(out.astype(np.float64) - plain).max() > 0.1
    got = _backward(dev, qkv, d_out, *rest, scale=0.3)
    want = _backward(host_device(), qkv, d_out, *rest, scale=0.3)
    for heads in (slice(4), slice(4, 6), slice(6, None)):
        _compare(got[:, :, heads], want[:, :, heads], dtype)


# Lengths of documents (the last one takes the rest) and a window. Some of both kinds begin and end
# inside of tiles, some at their edges or one behind; some are shorter, some longer than a tile.
MASKS = {
    "documents": ([(1, 6, 60, 94), (64, 32, 4, 93)], None),
    "long_documents": ([(160,), (3, 200)], None),
    "at_borders": ([(32, 32, 64, 64), (128, 16, 16, 32)], None),
    "beside_borders": ([(31, 2, 31, 63, 2), (127, 1, 1, 62, 1)], None),
    "one_token_each": ([(1,) * 229, (64, *(1,) * 64)], None),
    "short_window": (None, 7),
    "window": (None, 96),
    "both": ([(100,), (17, 150)], 40),
    "own_key": (None, 1),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_documents_and_windows(dev, rng, dtype, mask):
    case = (2, 230, 2, 1, 32)
    _check_sight(dev, rng, case, dtype, *mask)


@pytest.mark.parametrize(
    "head_dim, dtype",
    [(96, BF16), (128, BF16), (256, BF16), (512, BF16), (128, F32), (256, F32), (512, F32)],
    ids=str,
)
def test_documents_and_windows_of_all_tiles(dev, rng, dtype, head_dim):
    _check_sight(dev, rng, (1, 150, 2, 2, head_dim), dtype, [(9, 50, 38)], 40)


@pytest.mark.parametrize(("head_dim", "window"), [(128, None), (128, 40), (512, 40)])
def test_tiles_of_100_kib(generic, rng, head_dim, window):
    """Two blocks of heads of 128 fit on a multiprocessor; one of 512 has no room to exchange."""
    assert attention.backward_tiles(BF16, head_dim, window is not None, True).stages == 1
    _check_sight(
        generic, rng, (1, 150 if head_dim == 128 else 70, 2, 2, head_dim), BF16, None, window
    )


def _check_sight(dev, rng, case, dtype, lengths, window):
    qkv, d_out = _arrays(rng, case, dtype)
    starts = None if lengths is None else _starts(lengths, case[1])
    out, lse = _forward(dev, qkv, *case[2:4], starts, window)
    want_out, want_lse = _forward(host_device(), qkv, *case[2:4], starts, window)
    _compare(out, want_out, dtype)
    # Bounds are those of test_forward.
    np.testing.assert_allclose(lse, want_lse, rtol=4e-6, atol=4e-6)
    got = _backward(dev, qkv, d_out, *case[2:4], starts, window)
    want = _backward(host_device(), qkv, d_out, *case[2:4], starts, window)
    floor = 1e-6 * np.linalg.norm(want.astype(np.float64))  # as in test_backward
    if window == 1:  # dS is nothing but the rounding of what cancels: of dO v, some 10
        floor = 1e-4
    first_k, first_v = case[2], case[2] + case[3]
    for heads in (slice(first_k), slice(first_k, first_v), slice(first_v, None)):
        _compare(got[:, :, heads], want[:, :, heads], dtype, floor)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_documents_change_nothing_of_their_neighbours(dev, rng, dtype):
    """Bitwise, whatever a neighbour holds: NaN, infinities, or other numbers."""
    case = (1, 150, 4, 2, 32)
    qkv, d_out = _arrays(rng, case, dtype)
    starts = _starts([(10, 30, 50)], case[1])
    want = _forward(dev, qkv, *case[2:4], starts)
    poisoned, poisoned_d_out = qkv.copy(), d_out.copy()
    document = slice(40, 90)
    poisoned[:, document], poisoned_d_out[:, document] = np.nan, np.nan
    poisoned[:, 45:50] = np.inf
    others = np.r_[:40, 90:150]
    got = _forward(dev, poisoned, *case[2:4], starts)
    np.testing.assert_array_equal(got[0][:, others], want[0][:, others])
    np.testing.assert_array_equal(got[1][..., others], want[1][..., others])
    assert np.isnan(got[0][:, document].astype(np.float32)).all()
    want = _backward(dev, qkv, d_out, *case[2:4], starts)
    got = _backward(dev, poisoned, poisoned_d_out, *case[2:4], starts)
    np.testing.assert_array_equal(got[:, others], want[:, others])
    assert np.isnan(got[:, document].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("place", ["value", "d_out"])
def test_what_is_not_finite_shows_where_it_is_seen(dev, rng, dtype, place):
    """A tile that holds several documents hides nothing of one from itself."""
    case = (1, 64, 2, 1, 32)
    qkv, d_out = _arrays(rng, case, dtype)
    starts = _starts([(20, 20)], case[1])
    if place == "value":
        qkv[0, 30, 3, 5] = np.inf
        out, _ = _forward(dev, qkv, *case[2:4], starts)
        bad = ~np.isfinite(out.astype(np.float32)).all(axis=(2, 3))[0]
        np.testing.assert_array_equal(np.flatnonzero(bad), np.arange(30, 40))
    else:
        d_out[0, 30, :, 5] = np.nan
        d_qkv = _backward(dev, qkv, d_out, *case[2:4], starts)
        bad = ~np.isfinite(d_qkv.astype(np.float32)).all(axis=(2, 3))[0]
        np.testing.assert_array_equal(np.flatnonzero(bad), np.arange(20, 31))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_sight_that_hides_nothing_changes_no_bit(dev, rng, dtype):
    case = (2, 100, 2, 1, 64)
    qkv, d_out = _arrays(rng, case, dtype)
    starts = np.zeros(case[:2], np.int32)
    for mask in ((starts, None), (None, 100)):
        for got, want in zip(
            _forward(dev, qkv, *case[2:4], *mask), _forward(dev, qkv, *case[2:4]), strict=True
        ):
            np.testing.assert_array_equal(got, want)
        got = _backward(dev, qkv, d_out, *case[2:4], *mask)
        np.testing.assert_array_equal(got, _backward(dev, qkv, d_out, *case[2:4]))


def _score_error(qkv, heads, kv_heads):
    """The largest difference of two devices' scores.

    A score is a sum of head_dim products. An addition rounds the sum so far by at most 2^-24 of it,
    with a variance of a third of that squared. Partial sums grow like a random walk to the largest
    score S, so that all roundings together have a deviation of sqrt(head_dim / 6) * 2^-24 S. Each
    device adds in an order of its own, NumPy's BLAS in another one on each processor: twice that.
    """
    q, k = (np.moveaxis(x.astype(np.float64), 1, 2) for x in np.split(qkv, [heads], axis=2))
    k = np.repeat(k[:, :kv_heads], heads // kv_heads, axis=1)
    head_dim = qkv.shape[3]
    largest = np.abs(q @ np.swapaxes(k, 2, 3)).max() / np.sqrt(head_dim)
    return 2 * np.sqrt(head_dim / 6) * 2.0**-24 * largest


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_large_scores(dev, rng, dtype):
    """Scores beyond the range of exp, and rows whose maximum moves from step to step."""
    case = CASES["two_tiles"]
    qkv, d_out = _arrays(rng, case, dtype)
    qkv[:, :, : 2 * case[2]] *= 8
    # exp turns a score's absolute error e into a relative one of its probability. The output, a
    # mean of values with weights p (1 + e - sum p e), moves by at most 2 e of the largest value.
    values = np.abs(qkv[:, :, -case[3] :].astype(np.float64)).max()
    floor = 2 * _score_error(qkv, *case[2:4]) * values
    out, _ = _forward(dev, qkv, *case[2:4])
    _compare(out, _forward(host_device(), qkv, *case[2:4])[0], dtype, floor)
    got = _backward(dev, qkv, d_out, *case[2:4]).astype(np.float64)
    want = _backward(host_device(), qkv, d_out, *case[2:4]).astype(np.float64)
    assert np.linalg.norm(got - want) <= (2**-8 + 2e-4) * np.linalg.norm(want)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_chunks_change_nothing(dev, rng, dtype):
    case = (3, 36, *CASES["ragged"][2:])
    qkv, d_out = _arrays(rng, case, dtype)
    whole = _backward(dev, qkv, d_out, *case[2:4])
    for chunks in (2, 3):
        pieces = _backward(dev, qkv, d_out, *case[2:4], chunks=chunks)
        np.testing.assert_array_equal(pieces, whole)
    starts = _starts([(8,), (20, 4), ()], case[1])
    whole = _backward(dev, qkv, d_out, *case[2:4], starts)
    pieces = _backward(dev, qkv, d_out, *case[2:4], starts, chunks=3)
    np.testing.assert_array_equal(pieces, whole)


def test_sequences_and_later_positions_do_not_matter(dev, rng):
    """Bitwise: each sequence by itself, and each position without those after it."""
    case = CASES["ragged"]
    qkv, d_out = _arrays(rng, case, BF16)
    out, _ = _forward(dev, qkv, *case[2:4])
    np.testing.assert_array_equal(_forward(dev, qkv[1:], *case[2:4])[0], out[1:])
    np.testing.assert_array_equal(_forward(dev, qkv[:, :20], *case[2:4])[0], out[:, :20])
    d_out[:, 20:] = 0
    d_qkv = _backward(dev, qkv, d_out, *case[2:4])
    assert not d_qkv[:, 20:].any()
    short = _backward(dev, qkv[:, :20], d_out[:, :20], *case[2:4])
    _compare(short, d_qkv[:, :20], BF16)


@pytest.mark.parametrize("dev", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    "case", [c for n, c in SMALL.items() if n != "one_position" and c[-1] % 8 == 0 and c[-1] <= 128]
)
def test_cudnn(dev, rng, case, deterministic):
    qkv, d_out = _arrays(rng, case, BF16)
    out, lse = _forward(dev, qkv, *case[2:4], backend="cudnn")
    want_out, want_lse = _forward(host_device(), qkv, *case[2:4])
    _compare(out, want_out, BF16)
    # Bounds are those of our own kernel, with exp2 in place of exp.
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)
    got = _backward(dev, qkv, d_out, *case[2:4], backend="cudnn", deterministic=deterministic)
    want = _backward(host_device(), qkv, d_out, *case[2:4])
    _compare(got, want, BF16)


@pytest.mark.parametrize("dev", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("window", [1, 33, 128, 200])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_cudnn_windows(dev, rng, head_dim, window):
    case = (2, 300, 4, 2, head_dim)
    qkv, d_out = _arrays(rng, case, BF16)
    out, lse = _forward(dev, qkv, *case[2:4], window=window, backend="cudnn")
    want_out, want_lse = _forward(host_device(), qkv, *case[2:4], window=window)
    _compare(out, want_out, BF16)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)  # as above
    want = _backward(host_device(), qkv, d_out, *case[2:4], window=window)
    # Bounds are those of test_documents_and_windows: with one key dS is the rounding of what
    # cancels.
    floor = 1e-4 if window == 1 else 0.0
    got = _backward(dev, qkv, d_out, *case[2:4], window=window, backend="cudnn")
    _compare(got, want, BF16, floor)
    # Ours takes the library's statistics: --attention auto leaves them to it.
    got = _backward(dev, qkv, d_out, *case[2:4], window=window, of_forward=(out, lse))
    _compare(got, want, BF16, floor)


@pytest.mark.parametrize("dev", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(
    "case",
    [(2, 1024, 12, 2, 128), (3, 1000, 14, 2, 64), (2, 100, 4, 4, 96), (1, 1024, 28, 4, 128)],
    ids=str,
)
def test_parts_of_heads_change_no_bit(dev, rng, case, window):
    batch, seq_len, heads, kv_heads, head_dim = case
    qkv = rng.normal(size=(batch, seq_len, heads + 2 * kv_heads, head_dim)).astype(BF16.numpy)
    d_out = rng.normal(size=(batch, seq_len, heads, head_dim)).astype(BF16.numpy)
    mask = attention.AttentionMask(window=window)

    def step(dev, d_qkv, out, lse, qkv, d_out, chunks=1):
        attention.forward(dev, out, lse, qkv, heads, kv_heads, mask, backend="cudnn")
        tensors = (d_qkv, d_out, out, lse, qkv)
        attention.backward(dev, *tensors, heads, kv_heads, chunks, mask, backend="cudnn")

    nan = np.array(np.nan, BF16.numpy)
    arrays = {
        "d_qkv": np.full_like(qkv, nan),
        "out": np.full_like(d_out, nan),
        "lse": np.full((batch, heads, seq_len), np.nan, np.float32),
        **{"qkv": qkv, "d_out": d_out},
    }
    whole = run(dev, step, arrays)["d_qkv"]
    assert np.isfinite(whole.astype(np.float32)).all()
    for chunks in divisions(batch, heads, kv_heads)[1:]:
        got = run(dev, partial(step, chunks=chunks), arrays)["d_qkv"]
        assert got.tobytes() == whole.tobytes(), chunks


HEADS = {"one_position": (1, 2, 1, 16), "groups": (37, 6, 2, 48), "own_keys": (9, 3, 3, 128)}


@pytest.mark.parametrize("case", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_sums_over_heads(dev, rng, case, dtype):
    seq_len, heads, kv_heads, head_dim = case
    d_qkv = rng.normal(size=(1, seq_len, heads + 2 * kv_heads, head_dim)).astype(dtype.numpy)
    d_kv = rng.normal(size=(2, heads, seq_len, head_dim)).astype(dtype.numpy)
    arrays = {"d_qkv": d_qkv, "d_kv": d_kv}
    got, want = (run(d, attention.sum_heads, arrays)["d_qkv"] for d in (dev, host_device()))
    assert got.tobytes() == want.tobytes()
    assert got[:, :, :heads].tobytes() == d_qkv[:, :, :heads].tobytes()


@pytest.mark.parametrize("head_dim", (2, 129, *range(16, 257, 16), 512))
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_tiles_fit(dtype, head_dim):
    """Consumer GPUs give a block 99 KiB of shared memory."""
    for chosen in (
        attention.forward_tiles(dtype, head_dim, small_shared=True),
        attention.forward_tiles(dtype, head_dim, masked=True, small_shared=True),
        attention.backward_tiles(dtype, head_dim),
        attention.backward_tiles(dtype, head_dim, masked=True),
        attention.backward_tiles(dtype, head_dim, small_shared=True),
    ):
        assert chosen.shared <= 99 * 1024
        # Two warps of a thread block share rows of more than 256 channels.
        rows_at_once = 16 if dtype == F32 else chosen.threads // (4 if head_dim > 256 else 2)
        assert chosen.own % rows_at_once == 0 and chosen.step % 16 == 0


def _plan(B=2, T=8, Hq=4, Hkv=2, Hd=64, dtype=BF16):
    dev = PlanDevice(GPU_SPEC)

    def make(shape, dtype):
        return dev.alloc("x", shape, dtype, "Activations")

    packed, heads = (B, T, Hq + 2 * Hkv, Hd), (B, T, Hq, Hd)
    tensors = {
        **{"d_qkv": make(packed, dtype), "d_out": make(heads, dtype), "out": make(heads, dtype)},
        **{"lse": make((B, Hq, T), F32), "qkv": make(packed, dtype)},
    }
    return dev, tensors


def test_planned_workspace():
    dev, tensors = _plan()
    attention.backward(dev, **tensors, num_heads=4, num_kv_heads=2, chunks=2)
    assert dev.stack.high_water_mark == 256  # 4 * 1 * 4 * 8 bytes of row sums, padded
    attention.backward(dev, **tensors, num_heads=4, num_kv_heads=2, chunks=2, backend="cudnn")
    assert dev.stack.high_water_mark == backward_workspace_bytes(1, 8, 4, 2, 64)
    assert dev.launches["attention_backward"] == dev.launches["attention_backward_tiles"] == 2
    assert dev.flops["attention_backward"] == 2 * 5 * 4 * 8 * 8 * 64


@pytest.mark.parametrize("chunks, parts", [(2, 1), (4, 2), (6, 4), (8, 4)])
def test_planned_parts_of_heads(chunks, parts):
    dev, tensors = _plan(T=1024)
    options = {"num_heads": 4, "num_kv_heads": 2, "chunks": chunks}
    attention.backward(dev, **tensors, **options, backend="cudnn")
    apart = parts == 4  # query heads, which leave their parts of d_k and d_v
    d_kv = 2 * 4 * 1024 * 64 * 2 * apart
    workspace = divided_workspace_bytes(1, 1024, 4, 2, 64, parts)
    assert dev.stack.high_water_mark == workspace + d_kv
    assert dev.launches["attention_backward"] == 2
    assert dev.launches["attention_sum_heads"] == 2 * apart
    assert dev.flops["attention_backward"] == 2 * 5 * 4 * 1024 * 1024 * 64
    # Ours takes next to nothing, and is divided by sequences alone.
    dev, tensors = _plan(T=1024)
    attention.backward(dev, **tensors, **options)
    assert dev.launches["attention_backward_tiles"] == 2


def test_windows_take_less_work():
    """They take as much as they leave of the half square, in which a query's own key counts
    half."""
    for window, pairs in ((1, 1 * 15), (4, 4 * 12), (8, 64), (9, 64), (None, 64)):
        dev, tensors = _plan()
        mask = attention.AttentionMask(window=window)
        attention.backward(dev, **tensors, num_heads=4, num_kv_heads=2, mask=mask)
        assert dev.flops["attention_backward_tiles"] == 2 * 7 * 4 * pairs * 64


def test_wrong_arguments():
    dev, tensors = _plan()
    forward = {name: tensors[name] for name in ("out", "lse", "qkv")}

    def make(shape, dtype):
        return dev.alloc("x", shape, dtype, "Activations")

    def refuse(error, match, call=attention.forward, arguments=forward, **changes):
        with pytest.raises(error, match=match):
            call(dev, **{**arguments, "num_heads": 4, "num_kv_heads": 2, **changes})

    refuse(ValueError, r"qkv must have shape \(2, 8, 10, 64\)", num_heads=6)
    refuse(ValueError, "num_heads must be a multiple of 3", num_heads=2, num_kv_heads=3)
    wide = {"qkv": make((2, 8, 8, 513), BF16), "out": make((2, 8, 4, 513), BF16)}
    refuse(ValueError, "Hd must be at most 512 on a GPU, got 513", **wide)
    merged = make((2, 8, 256), BF16)
    attention.forward(dev, **forward | {"out": merged}, num_heads=4, num_kv_heads=2)
    refuse(ValueError, r"out must have shape \(2, 8, 4, 64\)", out=merged.view(2, 8, 64, 4))
    refuse(ValueError, "backend must be one of", backend="flash")
    starts = attention.AttentionMask(make((2, 8), I32))
    refuse(ValueError, "cudnn backend knows no documents", mask=starts, backend="cudnn")
    refuse(ValueError, "window must be at least 1, got 0", mask=attention.AttentionMask(window=0))
    backward = partial(refuse, call=attention.backward, arguments=tensors)
    backward(ValueError, "chunks must be from 1 to 8, the heads of all seq.*, got 9", chunks=9)
    single = _plan(dtype=F32)[1]
    backward(TypeError, "the cudnn backend needs BF16", arguments=single, backend="cudnn")


@pytest.mark.gpu
@pytest.mark.skipif(gpu_problem() is not None, reason=str(gpu_problem()))
@pytest.mark.parametrize("case, window", [("qwen05b", 128), ("qwen15b", 128), ("qwen15b", None)])
def test_the_choice_is_what_was_measured(monkeypatch, tmp_path, case, window):
    """On Hopper, where a run times nothing: cuDNN, but for backward with a window."""
    monkeypatch.setattr(cuda_device, "TUNED", str(tmp_path / "m.json"))
    _, T, Hq, Hkv, Hd = CASES[case]
    both, mask = ("cudnn", "native"), attention.AttentionMask(window=window)

    def step(dev):
        def alloc(name, *shape, dtype=BF16):
            tensor = dev.alloc(name, shape, dtype, "Activations")
            if dtype == BF16 and dev.kind == "cuda":
                elementwise.normal(dev, tensor, 1.0, 0)
            return tensor

        qkv, d_qkv = (alloc(name, 8, T, Hq + 2 * Hkv, Hd) for name in ("qkv", "d_qkv"))
        out, d_out = (alloc(name, 8, T, Hq, Hd) for name in ("out", "d_out"))
        lse = alloc("lse", 8, Hq, T, dtype=F32)
        attention.forward(dev, out, lse, qkv, Hq, Hkv, mask, backend=both)
        attention.backward(dev, d_qkv, d_out, out, lse, qkv, Hq, Hkv, mask=mask, backend=both)
        return d_qkv

    bits = []
    for _ in range(2):
        tuning._files.clear()  # a new process
        plan = PlanDevice(GPU_SPEC)
        step(plan)
        with closing(cuda_device.CudaDevice(0, plan.sizes())) as dev:
            if dev.spec.capability != 90:
                pytest.skip("measured on Hopper")
            bits.append(dev.download(step(dev)).tobytes())
            chosen = {work.split()[0]: way for work, way in dev.choices().items()}
        backward = "cudnn" if window is None else "native"
        assert chosen == {"attention.forward": "cudnn", "attention.backward": backward}
    assert bits[0] == bits[1]
