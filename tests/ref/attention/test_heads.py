"""The references of moved heads against NumPy's own."""

import numpy as np

from llmq.ref.attention import heads as ref

ROWS, HEADS, SIZE = 5, 3, 4


def test_heads_of_rows_become_rows_of_heads_and_back(rng):
    x = rng.normal(size=(ROWS, HEADS, SIZE + 2)).astype(np.float32)
    out, back = np.full((HEADS, ROWS, SIZE), np.nan, np.float32), np.zeros_like(x)
    of_out = (0, SIZE, ROWS * SIZE)
    of_x = (1, HEADS * (SIZE + 2), SIZE + 2)
    ref.heads_copy(out, x, ROWS, HEADS, SIZE, *of_out, *of_x)
    np.testing.assert_array_equal(out, x[..., 1:-1].transpose(1, 0, 2))
    ref.heads_copy(back, out, ROWS, HEADS, SIZE, *of_x, *of_out)
    np.testing.assert_array_equal(back[..., 1:-1], x[..., 1:-1])
    assert not back[..., 0].any() and not back[..., -1].any()


def test_sums_of_heads_are_the_gradient_of_one_that_all_share(rng):
    x = rng.normal(size=(ROWS, HEADS, SIZE)).astype(np.float32)
    out = np.full((ROWS, SIZE + 3), 7, np.float32)
    ref.heads_sum(out, x, ROWS, HEADS, SIZE, 3, SIZE + 3, 0, HEADS * SIZE, SIZE)
    np.testing.assert_allclose(out[:, 3:], x.sum(axis=1), rtol=1e-6)
    assert (out[:, :3] == 7).all()
