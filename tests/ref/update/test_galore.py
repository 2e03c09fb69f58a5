"""Reference of GaLore's kernels against NumPy's and torch's linear algebra."""

import numpy as np
import pytest
import torch

from llmq.base.dtypes import BF16
from llmq.ref.update import galore as ref
from tests.harness import step_scalars


def test_eigenvectors_are_torchs_up_to_signs(rng):
    x = rng.normal(size=(2, 12, 30)).astype(np.float32)
    s, v = x @ x.transpose(0, 2, 1), np.empty((2, 12, 12), np.float32)
    values, vectors = torch.linalg.eigh(torch.tensor(s).double())
    ref.galore_eigen(s, v, 0, 12)
    for made, columns in zip(s, vectors.flip(-1).numpy(), strict=True):
        # F32 rounds each of the 12 products.
        np.testing.assert_allclose(np.abs(made @ columns), np.eye(12), atol=1e-5)
    assert values.min() > 0


@pytest.mark.parametrize("of_zeros", [False, True])
def test_roots_make_rows_orthonormal(rng, of_zeros):
    x = rng.normal(size=(1, 12, 30)).astype(np.float32) * np.float32(1e-3) * (not of_zeros)
    s, v = x @ x.transpose(0, 2, 1), np.empty((1, 12, 12), np.float32)
    ref.galore_eigen(s, v, 1, 12)
    made = s[0] @ x[0]
    # Rounding of s, whose largest eigenvalue is 20 times the smallest.
    np.testing.assert_allclose(made @ made.T, np.eye(12) * (not of_zeros), atol=1e-4)


def test_a_projection_is_renewed_unless_the_step_is_skipped(rng):
    x, projection = rng.normal(size=128).astype(np.float32), np.zeros(128, BF16.numpy)
    ref.galore_renew(projection, x, step_scalars(skip_update=1), 128)
    assert not projection.astype(np.float32).any()
    ref.galore_renew(projection, x, step_scalars(), 128)
    np.testing.assert_array_equal(projection, x.astype(BF16.numpy))
