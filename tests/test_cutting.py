"""Shards of one size that cut no matrix: where parameters lie, and how long shards get."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from llmq.options.presets import preset
from llmq.state.cutting import between_matrices, cut
from llmq.state.params import ELEMENT_ALIGN, weight_table

PRESETS = ["tiny", "tiny-gpt2", "tiny-qwen3", "Qwen2.5-0.5B", "Qwen2.5-7B", "llama-2-7b"]


def check(sizes, shards):
    """No parameters overlap, and no matrix lies in two shards; returns the cut."""
    found = cut(sizes, shards)
    spans = sorted((at, at + sum(parts)) for at, parts in zip(found.offsets, sizes, strict=True))
    assert spans[0][0] == 0
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    assert spans[-1][1] <= shards * found.shard_size
    for at, parts in zip(found.offsets, sizes, strict=True):
        for size in parts:
            assert at // found.shard_size == (at + size - 1) // found.shard_size
            at += size
    return found


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8])
def test_no_matrix_is_cut(shards):
    r = random.Random(shards)
    for _ in range(200):
        count = r.randint(1, 9)
        sizes = [
            tuple(r.randint(1, 40) for _ in range(r.choice((1, 1, 2, 3)))) for _ in range(count)
        ]
        found = check(tuple(sizes), shards)
        largest, total = max(map(sum, sizes)), sum(map(sum, sizes))
        assert found.shard_size >= max(max(map(max, sizes)), -(-total // shards))
        assert found.shard_size <= max(largest, total // shards + largest)
        assert shards > 1 or found.shard_size == total


@pytest.mark.parametrize(
    ("sizes", "shards", "expected"),
    [
        (((6, 6), (6,)), 3, 6),  # gate and up on a shard each
        (((3, 1, 1), (3,)), 2, 4),  # q before the border, k and v behind it
        (((5,), (4,), (3,), (2,), (1,)), 3, 5),
        (((4, 4), (4, 4)), 4, 4),
        (((7,),), 4, 7),  # three shards are gaps
        (((1,) * 128, (1,) * 128), 2, 128),  # of very many matrices not all ways are tried
    ],
)
def test_the_shortest_shards(sizes, shards, expected):
    assert check(sizes, shards).shard_size == expected


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("name", PRESETS)
def test_matrices_of_models_are_whole(name, shards):
    for slab in [slab for slab in weight_table(preset(name)) if slab.is_block]:
        made = between_matrices(slab, shards)
        assert made.whole_matrices and made.size == shards * made.shard_size
        assert made.shard_size % ELEMENT_ALIGN == 0
        assert {p.name: p.shape for p in made.params} == {p.name: p.shape for p in slab.params}
        free = sum(stop - start for start, stop in made.gaps())
        assert free == made.size - sum(p.size for p in slab.params)
        for p in made.params:
            assert p.offset % ELEMENT_ALIGN == 0
            for part in p.hf:
                first, last = (p.offset + row * p.columns for row in (part.start, part.stop))
                assert first // made.shard_size == (last - 1) // made.shard_size, (p.name, part)


@pytest.mark.parametrize(
    ("name", "shards", "longer"),
    [
        ("Qwen2.5-7B", 2, 1.17),
        ("Qwen2.5-7B", 4, 1.17),
        ("Qwen2.5-7B", 8, 2.34),  # seven matrices, three of which are 5.3 times as large as q and o
        ("llama-2-7b", 2, 1.07),
        ("llama-2-7b", 4, 1.23),
        ("llama-2-7b", 8, 1.79),
    ],
)
def test_shards_are_balanced_as_far_as_matrices_allow(name, shards, longer):
    slab = next(slab for slab in weight_table(preset(name)) if slab.is_block)
    assert between_matrices(slab, shards).size <= longer * slab.size
