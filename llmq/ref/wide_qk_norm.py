"""Reference of the RMSNorm over all query and over all key channels."""

from __future__ import annotations

import numpy as np

from llmq.ref.common import compute

# name: (B, T, Hq, Hkv, Hd)
CASES = {
    "one_token": (1, 1, 1, 1, 64),
    "warp_per_row": (2, 5, 4, 2, 64),
    "two_warps_per_row": (1, 7, 12, 4, 128),
    "four_warps_per_row": (1, 3, 40, 8, 80),
    "widest": (1, 2, 64, 64, 128),
    "olmo2_1b": (16, 1024, 16, 16, 128),
    "olmo2_32b": (4, 1024, 40, 8, 128),
}


def _parts(q_channels: int, k_channels: int) -> tuple[slice, slice]:
    """The channels of queries, and those of keys."""
    return slice(0, q_channels), slice(q_channels, q_channels + k_channels)


def wide_qk_norm_forward(
    qkv: np.ndarray,
    raw: np.ndarray,
    rstd: np.ndarray,
    q_weight: np.ndarray,
    k_weight: np.ndarray,
    eps: float,
    tokens: int,
    q_channels: int,
    k_channels: int,
    query_blocks: int,
) -> None:
    """raw = the query and key channels of qkv, which become T(rstd * row * weight)."""
    packed, kept = qkv.reshape(tokens, -1), raw.reshape(tokens, -1)
    kept[...] = packed[:, : q_channels + k_channels]
    x = compute(kept)
    real = x.dtype.type
    for i, (part, weight) in enumerate(
        zip(_parts(q_channels, k_channels), (q_weight, k_weight), strict=True)
    ):
        rows = x[:, part]
        scale = real(1) / np.sqrt(np.vecdot(rows, rows) / real(rows.shape[1]) + real(eps))
        rstd.reshape(tokens, 2)[:, i] = scale
        packed[:, part] = rows * scale[:, None] * compute(weight)


def wide_qk_norm_backward(
    d_qkv: np.ndarray,
    q_partial: np.ndarray,
    k_partial: np.ndarray,
    raw: np.ndarray,
    rstd: np.ndarray,
    q_weight: np.ndarray,
    k_weight: np.ndarray,
    tokens: int,
    q_channels: int,
    k_channels: int,
    query_blocks: int,
) -> None:
    """Query and key channels of d_qkv in place.

    q_partial (any, Cq), k_partial (any, Ck): their rows add up to the weights' gradients.
    """
    packed, x = d_qkv.reshape(tokens, -1), compute(raw.reshape(tokens, -1))
    scales = rstd.reshape(tokens, 2)
    weights, partials = (compute(q_weight), compute(k_weight)), (q_partial, k_partial)
    for i, part in enumerate(_parts(q_channels, k_channels)):
        d_out, rows, scale, weight = compute(packed[:, part]), x[:, part], scales[:, i], weights[i]
        product = d_out * rows
        partials[i][...] = 0
        partials[i][0] = scale @ product
        slope = (product @ weight) * (scale * scale * scale / rows.dtype.type(weight.size))
        packed[:, part] = d_out * weight * scale[:, None] - rows * slope[:, None]
