"""References of sorted rows against torch."""

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16
from llmq.ref.experts import expert_rows as ref
from tests.harness import step_scalars


def sort(chosen, E, chunk=7):
    n = chosen.size
    blocks = -(-n // chunk)
    counts, starts = np.full((blocks, E), -1, np.int32), np.full(E + 1, -1, np.int32)
    order, place = np.full(n, -1, np.int32), np.full(chosen.shape, -1, np.int32)
    ref.rows_count(counts, chosen, n, E, chunk)
    ref.rows_scan(starts, counts, blocks, E)
    ref.rows_place(order, place, chosen, counts, n, E, chunk)
    return order, place, starts, counts


def test_sorting_is_stable_and_every_expert_has_its_place():
    rng = np.random.default_rng(1)
    chosen = rng.integers(0, 5, (20, 3), np.int32)
    chosen[chosen == 2] = 4  # expert 2 has no rows
    order, place, starts, counts = sort(chosen, 6)
    want = torch.sort(torch.tensor(chosen.reshape(-1)), stable=True)
    np.testing.assert_array_equal(order, want.indices.numpy())
    np.testing.assert_array_equal(place.reshape(-1)[order], np.arange(60))
    np.testing.assert_array_equal(np.repeat(np.arange(6), np.diff(starts)), want.values.numpy())
    assert starts[0] == 0 and starts[2] == starts[3] and starts[-1] == 60
    # A block's first choice of an expert is placed where the block's rows of it start.
    for b, row in enumerate(counts):
        for i in range(7 * b, min(7 * b + 7, 60)):
            e = chosen.reshape(-1)[i]
            assert place.reshape(-1)[i] == row[e]
            row[e] += 1


@pytest.mark.parametrize("with_addend", [False, True])
def test_gather_and_combine_equal_torch(with_addend):
    rng = np.random.default_rng(2)
    S, C, E, top_k = 20, 24, 6, 3
    chosen = np.argsort(rng.uniform(size=(S, E)), axis=1)[:, :top_k].astype(np.int32)
    order, place, *_ = sort(chosen, E)
    x, w, d = (torch.tensor(rng.normal(size=s)) for s in ((S, C), (S, top_k), (S, C)))
    more = torch.tensor(rng.normal(size=(S, C)))
    x.requires_grad_(), w.requires_grad_()
    rows = x[torch.tensor(order // top_k)]
    rows.retain_grad()
    back = (w[..., None] * rows[torch.tensor(place)]).sum(dim=1) + with_addend * more
    back.backward(d)

    got = np.full((S * top_k, C), np.nan)
    ref.rows_gather(got, x.detach().numpy(), place, S, C, top_k)
    np.testing.assert_array_equal(got, rows.detach().numpy())
    out = np.full((S, C), np.nan)
    addend = more.numpy() if with_addend else None
    ref.rows_combine(out, got, place, w.detach().numpy(), addend, S, C, top_k)
    np.testing.assert_allclose(out, back.detach().numpy(), rtol=1e-13, atol=1e-14)
    d_rows, d_w = np.full_like(got, np.nan), np.full((S, top_k), np.nan)
    ref.rows_gather(d_rows, d.numpy(), place, S, C, top_k)
    weighted, arrays = np.full_like(got, np.nan), (got, place, w.detach().numpy())
    ref.rows_combine_backward(d_rows, d_w, weighted, *arrays, S, C, top_k)
    np.testing.assert_array_equal(weighted[place], w.detach().numpy()[..., None] * got[place])
    np.testing.assert_allclose(d_rows, rows.grad.numpy(), rtol=1e-13)
    np.testing.assert_allclose(d_w, w.grad.numpy(), rtol=1e-11, atol=1e-13)
    d_x = np.full((S, C), np.nan)
    ref.rows_combine(d_x, d_rows, place, None, None, S, C, top_k)
    np.testing.assert_allclose(d_x, x.grad.numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_of_experts_rows_equal_torch(accumulate):
    rng = np.random.default_rng(5)
    starts = np.array([0, 3, 3, 40, 41, 41], np.int32)  # two experts without rows
    x, before = rng.normal(size=(41, 16)), rng.normal(size=(5, 16))
    of_row = torch.tensor(np.repeat(np.arange(5), np.diff(starts)))
    weights, order = rng.normal(size=(41, 1)), rng.permutation(41)
    weighed = torch.tensor(x * weights[order])
    want = torch.tensor(accumulate * before).index_add(0, of_row, weighed)
    got = before.copy()
    ref.rows_sum(got, x, weights, order, step_scalars(seed=1), starts, 16, 5, accumulate, 3)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(got[[1, 4]], accumulate * before[[1, 4]])


def test_sums_are_rounded_stochastically_by_the_number_of_the_element():
    """Each element of each expert by its own: half of the sums that lie between two go up."""
    ones = np.ones((5, 16), BF16.numpy)
    x = np.full((5, 16), 2.0**-8, BF16.numpy)  # half of a unit in the last place
    scalars, starts = step_scalars(seed=7, step=1), np.arange(6, dtype=np.int32)
    ref.rows_sum(ones, x, None, None, scalars, starts, 16, 5, 1, 0)
    up = ones.astype(np.float32) > 1
    assert 0.3 < up.mean() < 0.7
    assert len({tuple(row) for row in up}) == 5
