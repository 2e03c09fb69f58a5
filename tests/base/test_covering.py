"""Covering rows hold what the whole product holds, pair by pair."""

from itertools import combinations, product

from tests.covering import covering, pairs, pairwise


def test_all_pairs_of_values_occur():
    columns = {"a": range(5), "b": (False, True), "c": "xyz", "d": (None, 1, 2.5), "e": ("only",)}
    rows = pairwise(**columns)
    for (i, one), (j, other) in combinations(enumerate(columns.values()), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(one, other))
    assert 15 <= len(rows) <= 20  # of 90; a and the two of three values need 15
    assert len(set(rows)) == len(rows)


def test_every_value_of_one_column_occurs():
    assert pairwise(a="xyz") == [("x",), ("y",), ("z",)]


def test_rows_that_are_not_allowed_are_not_made():
    numbers = [{"a": a, "b": b, "c": c} for a, b, c in product(range(4), repeat=3) if a + b < 4]
    rows = covering(numbers)
    assert all(row in numbers for row in rows) and len(rows) < len(numbers)
    assert set().union(*map(pairs, rows)) == set().union(*map(pairs, numbers))


def test_rows_may_have_different_columns():
    rows = [{"a": 1, "b": 1}, {"a": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}, {"d": 1}]
    assert covering(rows) == rows[2:]
