"""Attention's backward in products of warpgroups against its reference."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.ops.attention import attention, attention_backward
from llmq.ops.common import CAPABILITY
from llmq.ref.attention.attention_backward import CASES
from llmq.runtime.attention_parts import AttentionMask
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, host_device, run

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}
# Bounds are those of test_attention.py, of which this computes the same with the same roundings.
NORM_ERROR, MAX_ERROR = 2**-8, 2**-6


def gradient(dev, qkv, d_out, heads, kv_heads, chunks=1, chosen=attention_backward.chosen):
    batch, seq_len, _, head_dim = qkv.shape
    out = np.full((batch, seq_len, heads, head_dim), np.nan, qkv.dtype)
    lse = np.full((batch, heads, seq_len), np.nan, np.float32)
    forward = run(
        host_device(),
        lambda dev, **t: attention.forward(dev, **t, num_heads=heads, num_kv_heads=kv_heads),
        {"out": out, "lse": lse, "qkv": qkv},
    )
    arrays = {"d_qkv": np.full(qkv.shape, np.nan, qkv.dtype), "d_out": d_out, **forward}

    def call(dev, **tensors):
        own = chosen(dev, tensors["qkv"], AttentionMask())
        if chosen is attention_backward.chosen:
            assert (own is None) == (dev.spec.capability != CAPABILITY)
        options = {"num_heads": heads, "num_kv_heads": kv_heads, "chunks": chunks, "kernel": own}
        attention.backward(dev, **tensors, **options)

    return run(dev, call, arrays)["d_qkv"]


def arrays_of(rng, case):
    batch, seq_len, heads, kv_heads, head_dim = case
    qkv = rng.normal(size=(batch, seq_len, heads + 2 * kv_heads, head_dim))
    d_out = rng.normal(size=(batch, seq_len, heads, head_dim))
    return qkv.astype(BF16.numpy), d_out.astype(BF16.numpy)


def compare(got, want, heads, kv_heads):
    for part in (slice(heads), slice(heads, heads + kv_heads), slice(heads + kv_heads, None)):
        x, y = (array[:, :, part].astype(np.float64) for array in (got, want))
        assert np.linalg.norm(x - y) <= NORM_ERROR * np.linalg.norm(y)
        assert np.abs(x - y).max() <= MAX_ERROR * np.abs(y).max()


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_equals_reference(hopper, rng, case):
    """Tiles whose second half is not there, heads of a group in one part or in several, the last
    of them smaller, blocks with many tiles."""
    qkv, d_out = arrays_of(rng, case)
    got = gradient(hopper, qkv, d_out, *case[2:4])
    compare(got, gradient(host_device(), qkv, d_out, *case[2:4]), *case[2:4])


def test_sequences_change_no_bit(hopper, rng):
    """Sequences change no bit of each other; nor do positions that are not seen, nor what a
    sequence is computed with."""
    case = SMALL["one_step"]
    qkv, d_out = arrays_of(rng, case)
    want = gradient(hopper, qkv, d_out, *case[2:4])
    np.testing.assert_array_equal(gradient(hopper, qkv, d_out, *case[2:4], chunks=2), want)
    qkv[1] = np.nan
    np.testing.assert_array_equal(gradient(hopper, qkv, d_out, *case[2:4])[0], want[0])


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
    assert attention_backward.part_heads(*sizes, 132) == heads
    assert attention_backward.part_heads(*sizes, 1) == sizes[2] // sizes[3]


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
