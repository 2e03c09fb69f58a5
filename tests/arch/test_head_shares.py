"""Shares of heads for the ranks that divide sequences."""

from __future__ import annotations

import pytest

from llmq.arch.head_shares import head_shares


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize(
    ("query", "kv"), [(8, 8), (8, 1), (14, 2), (12, 4), (9, 3), (28, 4), (11, 1)]
)
def test_every_query_head_is_at_one_place_beside_its_key_head(query, kv, ranks):
    shares, places = head_shares(query, kv, ranks), []
    for queries, keys in zip(shares.queries, shares.keys, strict=True):
        assert len(queries) == len(shares.queries[0]) and len(keys) == len(shares.keys[0])
        each = len(queries) // len(keys)
        for place, head in enumerate(queries):
            if head is not None:
                assert keys[place // each] == head // (query // kv)
                places.append(head)
    assert places == list(range(query))


@pytest.mark.parametrize(
    ("query", "kv", "ranks", "of_rank"),
    [
        (14, 2, 4, (4, 1)), (6, 3, 2, (3, 3)), (5, 1, 3, (2, 1)), (7, 7, 2, (4, 4)),
        (12, 2, 3, (4, 2)), (32, 8, 3, (12, 3)), (48, 1, 2, (24, 1)),
    ],
)  # fmt: skip
def test_few_heads_are_added(query, kv, ranks, of_rank):
    shares = head_shares(query, kv, ranks)
    assert (len(shares.queries[0]), len(shares.keys[0])) == of_rank


def test_heads_that_divide_are_not_added():
    assert head_shares(8, 2, 2).queries == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert head_shares(8, 2, 2).keys == ((0,), (1,))
    assert head_shares(8, 2, 4).keys == ((0,), (0,), (1,), (1,))
    assert head_shares(5, 1, 2).queries == ((0, 1, 2), (3, 4, None))
