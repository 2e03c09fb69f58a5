"""Attention's backward in products of warpgroups: against its reference, torch, and itself."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16, F32, I32
from llmq.ops.attention import attention, attention_backward
from llmq.ops.attention.attention_backward import ROWS, STAGES, part_heads, shared_bytes
from llmq.ops.common import CAPABILITY
from llmq.ref.attention.attention_backward import CASES
from llmq.runtime.attention_parts import AttentionMask
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, host_device, run

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}
# Bounds are those of test_attention.py, of which this computes the same with the same roundings.
NORM_ERROR, MAX_ERROR = 2**-8, 2**-6


def gradient(
    dev,
    qkv,
    d_out,
    heads,
    kv_heads,
    chunks=1,
    chosen=attention_backward.chosen,
    window=None,
    scale=None,
):
    """d_qkv of out and lse that the reference has made."""
    batch, seq_len, _, head_dim = qkv.shape
    out = np.full((batch, seq_len, heads, head_dim), np.nan, qkv.dtype)
    lse = np.full((batch, heads, seq_len), np.nan, np.float32)
    forward = run(
        host_device(),
        partial(attention.forward, num_heads=heads, num_kv_heads=kv_heads, scale=scale),
        {"out": out, "lse": lse, "qkv": qkv},
    )
    arrays = {"d_qkv": np.full(qkv.shape, np.nan, qkv.dtype), "d_out": d_out, **forward}
    mask = AttentionMask(window=window)

    def call(dev, **tensors):
        own = chosen(dev, tensors["qkv"], mask)
        if chosen is attention_backward.chosen:
            assert (own is None) == (dev.spec.capability != CAPABILITY)
        options = {"num_heads": heads, "num_kv_heads": kv_heads, "chunks": chunks, "kernel": own}
        options |= {"mask": mask, "scale": scale}
        attention.backward(dev, **tensors, **options)

    return run(dev, call, arrays)["d_qkv"]


def by_torch(qkv, d_out, heads, kv_heads):
    """F64, of the same BF16 numbers."""
    packed = torch.from_numpy(qkv.astype(np.float64)).requires_grad_()
    q, k, v = (x.transpose(1, 2) for x in packed.split([heads, kv_heads, kv_heads], 2))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    d_out = torch.from_numpy(d_out.astype(np.float64)).transpose(1, 2)
    return torch.autograd.grad(out, packed, d_out)[0].numpy()


def arrays_of(rng, case):
    batch, seq_len, heads, kv_heads, head_dim = case
    qkv = rng.normal(size=(batch, seq_len, heads + 2 * kv_heads, head_dim))
    d_out = rng.normal(size=(batch, seq_len, heads, head_dim))
    return qkv.astype(BF16.numpy), d_out.astype(BF16.numpy)


def parts(d_qkv, heads, kv_heads):
    """d_q, d_k, d_v in F64."""
    return np.split(d_qkv.astype(np.float64), [heads, heads + kv_heads], axis=2)


def compare(got, want, heads, kv_heads):
    for x, y in zip(parts(got, heads, kv_heads), parts(want, heads, kv_heads), strict=True):
        assert np.linalg.norm(x - y) <= NORM_ERROR * np.linalg.norm(y)
        assert np.abs(x - y).max() <= MAX_ERROR * np.abs(y).max()


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_equals_reference(hopper, rng, case):
    """Tiles whose second half is not there, heads of a group in one part or in several, the last
    of them smaller, blocks with many tiles."""
    qkv, d_out = arrays_of(rng, case)
    got = gradient(hopper, qkv, d_out, *case[2:4])
    compare(got, gradient(host_device(), qkv, d_out, *case[2:4]), *case[2:4])


@pytest.mark.parametrize(
    "case",
    [
        (1, 64, 1, 1, 64),
        (2, 128, 4, 4, 64),  # every head has its own keys
        (1, 192, 8, 1, 64),  # all heads have the same keys
        (3, 64, 3, 3, 128),
        (1, 256, 4, 2, 128),
        (1, 448, 2, 1, 64),  # more steps than a ring has stages, and an odd number of blocks
        (1, 320, 2, 2, 128),
    ],
    ids=str,
)
def test_equals_torch(hopper, rng, case):
    qkv, d_out = arrays_of(rng, case)
    got = gradient(hopper, qkv, d_out, *case[2:4])
    compare(got, by_torch(qkv, d_out, *case[2:4]), *case[2:4])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("factor", [2**-10, 4, 16])
def test_scores_of_any_size(hopper, rng, factor, head_dim):
    """From uniform probabilities to such that are 1 for one key and below what F32 has for all
    others, with sums of rows far from 1."""
    case = (1, 128, 2, 1, head_dim)
    qkv, d_out = arrays_of(rng, case)
    qkv[:, :, :3] *= factor
    got = gradient(hopper, qkv, d_out, 2, 1)
    compare(got, gradient(host_device(), qkv, d_out, 2, 1), 2, 1)
    # Where one key has nearly all, d_out v - delta is the rounding of `out`, which torch has not.
    for x, y in zip(parts(got, 2, 1), parts(by_torch(qkv, d_out, 2, 1), 2, 1), strict=True):
        assert np.linalg.norm(x - y) <= 4 * NORM_ERROR * np.linalg.norm(y)


def test_queries_and_keys_of_zeros_give_means(hopper, rng):
    """Query i has 1 / (i + 1) of each key up to its own; nothing moves queries or keys."""
    case = (1, 192, 2, 1, 64)
    qkv, d_out = arrays_of(rng, case)
    qkv[:, :, :3] = 0
    d_q, d_k, d_v = parts(gradient(hopper, qkv, d_out, 2, 1), 2, 1)
    assert not d_q.any() and not d_k.any()
    shares = d_out.astype(np.float64).sum(2) / np.arange(1, 193)[:, None]
    want = shares[:, ::-1].cumsum(1)[:, ::-1]
    # Shares are rounded to BF16, then the sum.
    assert np.linalg.norm(d_v[:, :, 0] - want) <= NORM_ERROR * np.linalg.norm(want)


def test_a_key_that_all_see_alone_has_all_of_the_gradient(hopper, rng):
    """The first token's key has a score far above all others': P is 1 for it, and nothing moves
    scores. Beside it the first query has no other key in any case."""
    case = (1, 128, 2, 1, 64)
    qkv, d_out = arrays_of(rng, case)
    qkv[:, :, :2] = np.abs(qkv[:, :, :2])
    qkv[:, :, 2], qkv[:, 0, 2] = -8, 8
    d_q, d_k, d_v = parts(gradient(hopper, qkv, d_out, 2, 1), 2, 1)
    assert np.abs(d_v[:, 1:]).max() < 1e-20
    want = d_out.astype(np.float64).sum((1, 2))
    np.testing.assert_allclose(d_v[:, 0, 0], want, atol=2**-8 * np.abs(want).max())
    # d_out v - delta is nothing but the rounding of either sum in F32, times keys of 8.
    assert max(np.abs(d_q).max(), np.abs(d_k).max()) < 1e-3


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_keys_add_up_to_nothing(hopper, rng, head_dim):
    """A vector that is added to all keys changes no probability; one that is added to all values is
    added to the output."""
    case = (1, 192, 2, 1, head_dim)
    qkv, d_out = arrays_of(rng, case)
    _, d_k, d_v = parts(gradient(hopper, qkv, d_out, 2, 1), 2, 1)
    # Rounding of dS and P to BF16, and of the results, adds up as a random walk does.
    rounding = 2**-8 * np.sqrt(192)
    assert np.abs(d_k.sum(1)).max() <= rounding * np.abs(d_k).max()
    of_values = d_v.sum(1)[:, 0] - d_out.astype(np.float64).sum((1, 2))
    assert np.abs(of_values).max() <= rounding * np.abs(d_v).max()


@pytest.mark.parametrize("stop", [1, 63, 64, 65, 128])
def test_nothing_comes_from_later_positions(hopper, rng, stop):
    """Bitwise: later queries that give no gradient, later keys and values, whatever they hold."""
    case = (1, 192, 2, 1, 64)
    qkv, d_out = arrays_of(rng, case)
    d_out[:, stop:] = 0
    want = gradient(hopper, qkv, d_out, 2, 1)
    assert not want[:, stop:].any()
    qkv[:, stop:] *= -3
    got = gradient(hopper, qkv, d_out, 2, 1)
    np.testing.assert_array_equal(got[:, :stop], want[:, :stop])


def test_gradients_grow_with_that_of_the_output(hopper, rng):
    """Powers of two change no other bit, and nothing gives exactly nothing."""
    case = (1, 128, 2, 1, 64)
    qkv, d_out = arrays_of(rng, case)
    want = gradient(hopper, qkv, d_out, 2, 1).astype(np.float32)
    for factor in (2.0**-40, 2.0**20, 0.0):
        scaled = (d_out.astype(np.float32) * factor).astype(BF16.numpy)
        got = gradient(hopper, qkv, scaled, 2, 1).astype(np.float32)
        np.testing.assert_array_equal(got, want * np.float32(factor))


@pytest.mark.parametrize("case", ["one_step", "heads_128"])
def test_an_own_scale(hopper, rng, case):
    """Scores times the scale; 1 / sqrt(Hd), which is the default, changes no bit."""
    case = SMALL[case]
    qkv, d_out = arrays_of(rng, case)
    got, plain, default = (
        gradient(hopper, qkv, d_out, *case[2:4], scale=s) for s in (0.3, None, case[4] ** -0.5)
    )
    compare(got, gradient(host_device(), qkv, d_out, *case[2:4], scale=0.3), *case[2:4])
    np.testing.assert_array_equal(plain, default)
    assert np.abs(got.astype(np.float64) - plain).max() > 0.1


def test_sequences_change_no_bit(hopper, rng):
    """Sequences change no bit of each other; nor do positions that are not seen, nor what a
    sequence is computed with."""
    case = SMALL["one_step"]
    qkv, d_out = arrays_of(rng, case)
    want = gradient(hopper, qkv, d_out, *case[2:4])
    np.testing.assert_array_equal(gradient(hopper, qkv, d_out, *case[2:4], chunks=2), want)
    window = case[1]  # which hides nothing
    np.testing.assert_array_equal(gradient(hopper, qkv, d_out, *case[2:4], window=window), want)
    swapped = gradient(hopper, qkv[::-1], d_out[::-1], *case[2:4])
    np.testing.assert_array_equal(swapped[::-1], want)
    qkv[1] = np.nan
    np.testing.assert_array_equal(gradient(hopper, qkv, d_out, *case[2:4])[0], want[0])


def test_heads_change_no_bit(hopper, rng):
    """Query heads have the same bits in any order, and key heads too where their query heads, over
    which they sum, have the same one."""
    heads, kv_heads = 4, 2
    qkv, d_out = arrays_of(rng, (1, 128, heads, kv_heads, 64))
    want = gradient(hopper, qkv, d_out, heads, kv_heads)
    order = [1, 0, 2, 3, 4, 5, 6, 7]  # of the first key head's query heads
    got = gradient(hopper, qkv[:, :, order], d_out[:, :, order[:heads]], heads, kv_heads)
    np.testing.assert_array_equal(got[:, :, [0, 1, 2, 3, 5, 7]], want[:, :, [1, 0, 2, 3, 5, 7]])
    compare(got[:, :, order], want, heads, kv_heads)
    groups = [2, 3, 0, 1, 5, 4, 7, 6]  # key heads change places, with their query heads
    got = gradient(hopper, qkv[:, :, groups], d_out[:, :, groups[:heads]], heads, kv_heads)
    np.testing.assert_array_equal(got, want[:, :, groups])


def test_heads_that_share_keys_add_up(hopper, rng):
    """Gradients are the sums of those that heads with keys and values of their own have."""
    heads, kv_heads, times = 6, 2, 3
    qkv, d_out = arrays_of(rng, (1, 128, heads, kv_heads, 64))
    own = [*range(heads), *np.repeat([6, 7], times), *np.repeat([8, 9], times)]
    got = gradient(hopper, qkv, d_out, heads, kv_heads)
    each = gradient(hopper, qkv[:, :, own], d_out, heads, heads).astype(np.float64)
    summed = each[:, :, heads:].reshape(1, 128, 2 * kv_heads, times, 64).sum(3)
    compare(got, np.concatenate([each[:, :, :heads], summed], 2), heads, kv_heads)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_how_many_multiprocessors_there_are_changes_no_bit(hopper, rng, monkeypatch, heads):
    """Nor in which order blocks get to tiles: with one block it is fixed, with many each has one.
    Parts, which wait for each other's sums, are of so many heads."""
    qkv, d_out = arrays_of(rng, (2, 192, 3, 1, 64))
    monkeypatch.setattr(attention_backward, "part_heads", lambda *sizes: heads)
    found = []
    for num_sms in (1, 3, 100):
        monkeypatch.setattr(hopper, "spec", replace(hopper.spec, num_sms=num_sms))
        found.append(gradient(hopper, qkv, d_out, 3, 1))
    for got in found[1:]:
        np.testing.assert_array_equal(got, found[0])


SHARED_KEYS = {  # by batch, length, query and key heads: heads of a part on 132 multiprocessors
    (1, 1024, 28, 4): 2,
    (4, 1024, 28, 4): 3,
    (16, 1024, 28, 4): 7,
    (1, 4096, 28, 4): 2,
    (4, 4096, 28, 4): 7,
    (1, 1024, 14, 2): 1,
    (32, 1024, 14, 2): 7,
    (1, 1024, 12, 12): 1,
}


@pytest.mark.parametrize("sizes, heads", SHARED_KEYS.items(), ids=str)
def test_parts_of_heads_that_share_keys(sizes, heads):
    """Small ones, and none where there is much else to do for as long as the longest tile takes."""
    assert part_heads(*sizes, 132) == heads
    assert part_heads(*sizes, 1) == sizes[2] // sizes[3]


@pytest.mark.parametrize("case, heads", [("parts", 1), ("parts", 2), ("group", 2)])
def test_parts_add_up(hopper, rng, case, heads, monkeypatch):
    """Parts are of one head each, and with a last one that is smaller; of several key heads and
    sequences."""
    case = SMALL[case]
    qkv, d_out = arrays_of(rng, case)
    monkeypatch.setattr(attention_backward, "part_heads", lambda *sizes: heads)
    got = gradient(hopper, qkv, d_out, *case[2:4])
    compare(got, gradient(host_device(), qkv, d_out, *case[2:4]), *case[2:4])
    np.testing.assert_array_equal(gradient(hopper, qkv, d_out, *case[2:4]), got)


def test_statistics(hopper, rng):
    """lse to base 2 and -delta, by blocks of 64 queries; counters of tiles begin with 0."""
    B, T, Hq, Hd, counts = 2, 128, 3, 128, 17
    out, d_out = (rng.normal(size=(B, T, Hq, Hd)).astype(BF16.numpy) for _ in range(2))
    arrays = {
        "statistics": np.full((B, Hq, T // ROWS, 2, ROWS), np.nan, np.float32),
        "taken": np.full(counts + 3, 7, np.int32),
        **{"d_out": d_out, "out": out, "lse": rng.normal(size=(B, Hq, T)).astype(np.float32) * 50},
    }

    def call(dev, statistics, taken, d_out, out, lse):
        blocks = T * Hq * attention_backward.STATISTICS_LANES // 256
        args = (statistics, taken.rows(0, counts), d_out, out, lse, counts, T, Hq)
        consts = {"HEAD_DIM": Hd, "STAGES": STAGES[Hd]}
        dev.launch(attention_backward.STATISTICS, (blocks, B), 256, args, consts=consts)

    got = run(hopper, call, arrays)
    assert not got["taken"][:counts].any() and (got["taken"][counts:] == 7).all()
    lse, minus_delta = np.moveaxis(got["statistics"], 3, 0)
    np.testing.assert_array_equal(lse.reshape(B, Hq, T), arrays["lse"] * np.float32(np.log2(np.e)))
    delta = np.einsum("bthd,bthd->bht", d_out.astype(np.float64), out.astype(np.float64))
    # F32 sums of 128 products, each up to some 10.
    np.testing.assert_allclose(minus_delta.reshape(B, Hq, T), -delta, rtol=1e-5, atol=1e-4)


def test_which_gradients_it_computes():
    dev = PlanDevice(GPU_SPEC)

    def takes(dtype, seq_len, head_dim, window=None, starts=None):
        qkv = dev.alloc("qkv", (1, seq_len, 4, head_dim), dtype, "Activations")
        return attention_backward.chosen(dev, qkv, AttentionMask(starts, window)) is not None

    assert takes(BF16, 1024, 64) and takes(BF16, 64, 128) and takes(BF16, 64, 128, window=64)
    assert not takes(F32, 1024, 64) and not takes(BF16, 1000, 64) and not takes(BF16, 1024, 96)
    assert not takes(BF16, 1024, 64, window=100)
    documents = dev.alloc("starts", (1, 1024), I32, "Activations")
    assert not takes(BF16, 1024, 64, starts=documents)


@pytest.mark.parametrize("B, T, Hq, Hkv, Hd", [(2, 128, 4, 2, 64), (1, 1024, 28, 4, 128)])
def test_workspace_and_work_are_what_is_documented(B, T, Hq, Hkv, Hd):
    dev = PlanDevice(GPU_SPEC)
    sizes = {"d_qkv": Hq + 2 * Hkv, "d_out": Hq, "out": Hq, "qkv": Hq + 2 * Hkv}
    tensors = {n: dev.alloc(n, (B, T, h, Hd), BF16, "Activations") for n, h in sizes.items()}
    tensors["lse"] = dev.alloc("lse", (B, Hq, T), F32, "Activations")
    kernel = attention_backward.chosen(dev, tensors["qkv"], AttentionMask())
    attention.backward(dev, **tensors, num_heads=Hq, num_kv_heads=Hkv, kernel=kernel)
    group, heads = Hq // Hkv, part_heads(B, T, Hq, Hkv, GPU_SPEC.num_sms)
    others = -(-group // heads) - 1  # parts but the last
    counters = 4 * (1 + B * Hkv * T // ROWS)
    nbytes = 8 * B * Hq * T + 8 * B * Hkv * T * Hd * others + counters
    assert 0 <= dev.stack.high_water_mark - nbytes < 3 * 256  # each begins at a multiple of 256
    assert dev.flops["attention_gradient"] == 7 * B * Hq * T * T * Hd
    assert dev.launches == {"attention_statistics": 1, "attention_gradient": 1}


@pytest.mark.parametrize("head_dim", STAGES)
def test_a_block_fits(head_dim):
    """Hopper gives a block 227 KiB of shared memory. Tiles are two turns' own, and the steps'."""
    tile = ROWS * head_dim * 2
    assert 0 < shared_bytes(head_dim) - (2 * 4 + 2 * STAGES[head_dim]) * tile < 6 * 1024
    assert shared_bytes(head_dim) <= 227 * 1024


@pytest.mark.parametrize("dev", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize(
    "case", [(3, 1024, 14, 2, 64), (1, 1984, 12, 2, 128), (1, 1024, 28, 4, 128)], ids=str
)
def test_equals_other_kernels_again_and_again(hopper, rng, case):
    qkv, d_out = arrays_of(rng, case)
    got = gradient(hopper, qkv, d_out, *case[2:4])
    for _ in range(3):
        np.testing.assert_array_equal(gradient(hopper, qkv, d_out, *case[2:4]), got)
    others = gradient(hopper, qkv, d_out, *case[2:4], chosen=lambda *args: None)
    compare(got, others, *case[2:4])
