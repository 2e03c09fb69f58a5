"""Reference of GaLore's own kernels; its other kernels are products and AdamW's."""

import numpy as np

from llmq.ref.common import step_scalars

# name: (number of matrices, rows of each matrix).
CASES = {"one": (1, 8), "odd": (3, 13), "many": (5, 40), "rank_128": (168, 136)}

LEAST = 2.0**-40  # least ratio of an eigenvalue to the largest eigenvalue


def galore_eigen(s, v, roots, side):
    """Write eigenvectors to the rows of each matrix of s; see llmq.ops.update.galore.eigen."""
    v[...] = 0
    if not np.isfinite(s).all():
        s[...] = np.nan
        return
    values, vectors = np.linalg.eigh(s.astype(np.float64))
    values, vectors = values[:, ::-1], vectors[:, :, ::-1]
    largest = np.maximum(values[:, :1], 0)
    factors = np.ones_like(values)
    if roots:
        least = np.where(largest > 0, LEAST * largest, 1)
        factors = (largest > 0) / np.sqrt(np.maximum(values, least))
    s[...] = (vectors * factors[:, None]).transpose(0, 2, 1)


def galore_renew(projection, x, scalars, n):
    """Write x to the projection, unless the step is skipped."""
    if not step_scalars(scalars)["skip_update"]:
        projection[...] = x
