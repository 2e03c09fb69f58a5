"""References of cu/experts/grouped.cu: products of rows, sorted by expert, with the matrices of the
experts."""

from collections.abc import Iterator

import numpy as np

from llmq.base.products import product
from llmq.ref.common import add_terms, compute, decode_fp8, half_product, store_gradient

# rows, N, K, experts
CASES = {
    "one": (1, 8, 8, 1),
    "small": (40, 16, 24, 4),
    "ragged": (300, 136, 88, 7),
    "qwen30b_up": (131072, 1536, 2048, 128),
    "qwen30b_down": (131072, 2048, 768, 128),
    "olmoe_up": (131072, 2048, 2048, 64),
}


def _groups(starts: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and the slice of its rows."""
    for expert in np.flatnonzero(np.diff(starts)):
        yield expert, slice(starts[expert], starts[expert + 1])


def grouped_product(
    out, x, w, scale_x, scale_w, bias, addend, starts, R, N, K, E, *, trans_b, half
):
    """out (R, N) = x (R, K) @ w[e] (K, N), or w[e] (N, K)^T, + bias[e] + addend, e the row's
    expert. FP8 codes are multiplied unscaled, and the sums by both scales."""
    values = compute if scale_x is None else decode_fp8
    multiply = half_product if half else product
    for e, rows in _groups(np.array([0, R]) if starts is None else starts):
        matrix = values(w[e])
        total = multiply(values(x[rows]), matrix.T if trans_b else matrix)
        if scale_x is not None:
            total *= scale_x[0] * scale_w[0]
        add_terms(total, rows, None if bias is None else bias[e], addend)
        out[rows] = total


def grouped_gradient(d_w, d_y, x, scalars, starts, R, N, K, E, accumulate, salt):
    """d_w[e] (N, K) = or += d_y^T @ x over the rows of e; the product is rounded first. Without
    rows, d_w[e] becomes 0, or stays with accumulate."""
    if not accumulate:
        d_w[...] = 0
    for e, rows in _groups(starts):
        product = (compute(d_y[rows]).T @ compute(x[rows])).astype(d_w.dtype)
        store_gradient(d_w[e], product, scalars, bool(accumulate), salt, first=int(e) * N * K)
