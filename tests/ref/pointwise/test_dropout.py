"""Reference of dropout: how often elements stay, and on what their choice depends."""

import numpy as np

from llmq.ref.pointwise.elementwise import dropout
from tests.harness import step_scalars

N = 4000


def chosen(sequences=1, p=0.25, salt=7, **scalars):
    out, x = np.zeros(sequences * N, np.float32), np.ones(sequences * N, np.float32)
    words = step_scalars(**{"seed": 3, "step": 5, "sequence_stride": 1} | scalars)
    rest = (round(p * 2**32), 1 / (1 - p), salt, N, x.size)
    dropout(out, x, words, *rest, add=0)
    return out


def test_choice():
    out = chosen()
    assert set(np.unique(out)) == {0, np.float32(1 / 0.75)}
    assert abs(np.mean(out == 0) - 0.25) < 0.03  # four standard deviations
    for other in ({"seed": 4}, {"step": 6}, {"salt": 8}, {"first_sequence": 1}):
        assert abs(np.mean((out == 0) == (chosen(**other) == 0)) - 0.625) < 0.04  # independent
    assert (chosen(p=0.0) == 1).all()


def test_sequences_are_numbered_over_ranks():
    """Sequences 1 and 3 of four, as rank 1 of two has them in two micro-batches or in one."""
    every = chosen(4).reshape(4, N)
    np.testing.assert_array_equal(
        chosen(2, first_sequence=1, sequence_stride=2).reshape(2, N), every[1::2]
    )
    np.testing.assert_array_equal(chosen(first_sequence=3, sequence_stride=2), every[3])
