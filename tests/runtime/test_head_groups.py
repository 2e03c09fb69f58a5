"""How heads are divided."""

import pytest

from llmq.runtime.attention_parts import divisions, head_groups, split


@pytest.mark.parametrize("heads, kv_heads", [(12, 2), (14, 2), (28, 4), (6, 6), (8, 1), (12, 3)])
def test_groups_are_all_heads_in_order(heads, kv_heads):
    group = heads // kv_heads
    for parts in range(1, heads + 1):
        groups = head_groups(heads, kv_heads, parts)
        assert len(groups) >= parts
        assert [h for g in groups for h in range(g.first, g.first + g.count)] == [*range(heads)]
        counts = {g.count for g in groups}
        assert max(counts) - min(counts) <= (1 if parts > kv_heads else group)
        for g in groups:
            own = {h // group for h in range(g.first, g.first + g.count)}
            assert own == {*range(g.first_kv, g.first_kv + g.kv_count)}
            assert g.kv_count == 1 or g.count == group * g.kv_count


def test_numbers_of_parts_that_are_worth_it():
    assert divisions(1, 12, 2) == [1, 2, 4, 6, 12]
    assert divisions(1, 28, 4) == [1, 2, 4, 8, 12, 16, 28]
    assert divisions(6, 14, 2) == [1, 2, 3, 6, 12, 24, 36, 48, 84]
    assert divisions(2, 3, 3) == [1, 2, 4, 6]


def test_sequences_come_first():
    assert [split(4, chunks) for chunks in (1, 2, 4, 8, 48)] == [
        (4, 1), (2, 1), (1, 1), (1, 2), (1, 12),
    ]  # fmt: skip
