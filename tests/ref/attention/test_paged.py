"""The reference of attention through a paged cache against torch and itself."""

import numpy as np
import pytest
import torch

from llmq.ref.attention import paged as ref

SMALL = {name: case for name, case in ref.CASES.items() if not name.startswith("qwen")}


def inputs(rng, case, lengths, new, dtype=np.float32):
    """Arrays by the names of store's and attend's arguments: caches that hold `lengths` tokens in
    blocks in any order, NaN elsewhere, and new ones in qkv. And the whole keys and values of each
    sequence, (T, Hkv, Hd)."""
    S, n, Hq, Hkv, Hd, size, blocks = case
    qkv = rng.normal(size=(S, n, Hq + 2 * Hkv, Hd)).astype(dtype)
    caches = [np.full((S * blocks + 1, size, Hkv, Hd), np.nan, dtype) for _ in "kv"]
    table = rng.permutation(S * blocks).reshape(S, blocks).astype(np.int32)
    whole = []
    for s, length in enumerate(lengths):
        position = np.arange(length)
        parts = rng.normal(size=(2, length, Hkv, Hd)).astype(dtype)
        for cache, part in zip(caches, parts, strict=True):
            cache[table[s, position // size], position % size] = part
        added = qkv[s, : new[s], Hq:].reshape(new[s], 2, Hkv, Hd).swapaxes(0, 1)
        whole.append(np.concatenate([parts, added], axis=1))
        table[s, -(-(length + new[s]) // size) :] = -1
    arrays = {"qkv": qkv, "k_cache": caches[0], "v_cache": caches[1], "table": table}
    arrays["lengths"], arrays["new"] = np.int32(lengths), np.int32(new)
    return arrays, whole


def lengths_of(rng, case):
    """Some lengths, of which one sequence is empty and one idle, and numbers of new tokens."""
    S, n, *_, size, blocks = case
    lengths, new = rng.integers(0, size * blocks - n + 1, S), np.full(S, n)
    lengths[0], lengths[-1] = size * blocks - n, 0
    new[1:] = rng.integers(0, n + 1, S - 1)
    new[-1] = n
    return lengths, new


def sizes_of(case):
    _, n, Hq, Hkv, _, size, blocks = case
    return n, blocks, size, Hq, Hkv


def _torch(q, k, v, length, window, scale, sinks):
    """(m, Hq, Hd) in F64: what m queries behind `length` keys see."""
    q, k, v = (torch.from_numpy(x.astype(np.float64)).transpose(0, 1) for x in (q, k, v))
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    query, key = length + torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    seen = (key <= query) & (key > query - window)
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = torch.from_numpy(sinks.astype(np.float64)).reshape(-1, 1, 1)
        scores = torch.cat([scores, sink.expand(-1, scores.shape[1], 1)], 2)
    return (scores.softmax(2)[..., : k.shape[1]] @ v).transpose(0, 1).numpy()


@pytest.mark.parametrize("how", [(None, False), (40, True), (300, False)], ids=str)
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_equals_torch(rng, case, how):
    window, sinking = how
    S, n, Hq, _, Hd, *_ = case
    lengths, new = lengths_of(rng, case)
    arrays, whole = inputs(rng, case, lengths, new)
    sinks = rng.normal(size=Hq).astype(np.float32) * 3 if sinking else None
    window, scale, sizes = window or 2**31 - 1, Hd**-0.5, sizes_of(case)
    qkv, k_cache, v_cache, *rows = arrays.values()
    ref.paged_store(k_cache, v_cache, qkv, *rows, *sizes)
    out = np.full((S, n, Hq, Hd), np.nan, np.float32)
    ref.paged_attend(out, *arrays.values(), *sizes, window, scale, sinks)
    for s in range(S):
        m = new[s]
        want = _torch(qkv[s, :m, :Hq], *whole[s], lengths[s], window, scale, sinks)
        # F32 sums in another order than torch's F64.
        np.testing.assert_allclose(out[s, :m], want, rtol=1e-5, atol=1e-5)
        assert not out[s, m:].any()


@pytest.mark.parametrize("n", [1, 8])
def test_a_sequence_depends_on_none_beside_it(rng, n):
    """Bitwise; pieces of a text change rounding alone."""
    case = (3, n, 6, 2, 32, 16, 8)
    lengths, new = np.array([0, 70, 100]), np.minimum([8, 5, 8], n)
    arrays, _ = inputs(rng, case, lengths, new)
    sizes, how = sizes_of(case), (2**31 - 1, 0.2)

    def attend(arrays, S):
        given = {name: x.copy() for name, x in arrays.items()}
        qkv, k_cache, v_cache, *rows = given.values()
        ref.paged_store(k_cache, v_cache, qkv, *rows, *sizes)
        out = np.full((S, n, 6, 32), np.nan, np.float32)
        ref.paged_attend(out, *given.values(), *sizes, *how)
        return out

    together = attend(arrays, 3)
    for s in range(3):
        alone = {x: arrays[x][s : s + 1] for x in ("qkv", "table", "lengths", "new")}
        got = attend(arrays | alone, 1)
        np.testing.assert_array_equal(got[0], together[s])


@pytest.mark.parametrize("name", ["token", "tokens", "piece"])
def test_values_that_are_the_first_channels_of_keys(rng, name):
    """Without a cache of values, as with one that has the keys."""
    S, n, Hq, Hd, Vd, size, blocks = ref.LATENT_CASES[name]
    case = (S, n, Hq, 1, Hd, size, blocks)
    arrays, _ = inputs(rng, case, *lengths_of(rng, case))
    qkv, keys, _, *rows = arrays.values()
    ref.paged_store(keys, None, qkv, *rows, *sizes_of(case))
    rest = (*rows, *sizes_of(case))
    out, want = (np.full((S, n, Hq, width), np.nan, np.float32) for width in (Vd, Hd))
    ref.paged_attend(out, qkv, keys, None, *rest, 2**31 - 1, Hd**-0.5)
    ref.paged_attend(want, qkv, keys, keys, *rest, 2**31 - 1, Hd**-0.5)
    np.testing.assert_allclose(out, want[..., :Vd], rtol=1e-5, atol=1e-6)
