"""Rotary position embedding on the packed QKV activation, in place, and its table of angles."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from llmq.dtypes import BF16, F32
from llmq.ops.common import VECTOR_BYTES, abs_max_consts, expect_head_dim
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect
from llmq.runtime.tensor import Tensor

ROPE_FORWARD = Kernel(
    "rope.cu",
    "rope_forward",
    args="inout T* qkv, const f32* table, i64 tokens, i32 seq_length, i32 num_heads, "
    "i32 num_kv_heads, i32 first_position",
)
ROPE_BACKWARD = Kernel(
    "rope.cu",
    "rope_backward",
    args="inout T* d_qkv, const f32* table, i64 tokens, i32 seq_length, i32 num_heads, "
    "i32 num_kv_heads, inout f32*? abs_max",
)

THREADS = 128
HEAD_DIM_MULTIPLE, MAX_HEAD_DIM = 16, 256  # a half head is a number of vectors
HEADS_PER_THREAD = 4  # share one load of the angles


class Scaling(Protocol):
    """What make_table reads of a llmq.hf_config.RopeScaling; see there for the meanings."""

    kind: str
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


def _llama3(inv_freq: np.ndarray, scaling: Scaling) -> np.ndarray:
    """Stretch the long wavelengths, interpolate the middle ones; F32 steps as in transformers."""
    positions = np.float32(scaling.original_max_positions)
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    factor = np.float32(scaling.factor)
    wavelength = 1 / inv_freq * np.float32(2 * np.pi)
    too_long = wavelength > positions / low
    stretched = np.where(too_long, inv_freq / factor, inv_freq)
    smooth = (1 / wavelength * positions - low) / (high - low)
    mixed = (1 - smooth) * stretched / factor + smooth * stretched
    return np.where(~(wavelength < positions / high) & ~too_long, mixed, stretched)


def inverse_frequencies(head_dim: int, theta: float, scaling: Scaling | None) -> np.ndarray:
    """F32 (Hd/2,): theta^(-2i / Hd), stretched as the model asks; angle per position."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # torch raises to the power in F32, and mostly gets the F64 result rounded to F32.
    power = np.power(float(theta), exponent.astype(np.float64)).astype(np.float32)
    inv_freq = 1 / power
    if scaling is None:
        return inv_freq
    if scaling.kind == "llama3":
        return _llama3(inv_freq, scaling)
    if scaling.kind == "linear":
        return inv_freq / np.float32(scaling.factor)
    raise ValueError(f"rope.make_table: scaling kind {scaling.kind!r} is unknown")


def make_table(
    num_positions: int, head_dim: int, theta: float, scaling: Scaling | None
) -> np.ndarray:
    """F32 (num_positions, Hd/2, 2): cos and sin of position * inverse frequency.

    The angle is an F32 product as in transformers; cos and sin of that angle are the nearest F32.
    """
    inv_freq = inverse_frequencies(head_dim, theta, scaling)
    angle = (np.arange(num_positions, dtype=np.float32)[:, None] * inv_freq).astype(np.float64)
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)


def grid(tokens: int, heads: int, half_vectors: int) -> int:
    """Blocks for one thread per token, 16 bytes of half a head, and HEADS_PER_THREAD heads."""
    return ceil_div(tokens * ceil_div(heads, HEADS_PER_THREAD) * half_vectors, THREADS)


def _check(
    op: str,
    dev: Device,
    name: str,
    qkv: Tensor,
    table: Tensor,
    num_heads: int,
    num_kv_heads: int,
    first_position: int,
) -> None:
    if qkv.dtype not in (F32, BF16):
        raise TypeError(f"{op}: {name} must be F32 or BF16, got {qkv.dtype.label}")
    if len(qkv.shape) != 4:
        raise ValueError(f"{op}: {name} must have shape (B, T, Hq + 2 Hkv, Hd), got {qkv.shape}")
    B, T, _, head_dim = qkv.shape
    expect(op, name, qkv, None, (B, T, num_heads + 2 * num_kv_heads, head_dim))
    expect_head_dim(op, dev, head_dim, HEAD_DIM_MULTIPLE, MAX_HEAD_DIM)
    positions = T + first_position
    if not table.shape or table.shape[0] < positions:
        raise ValueError(f"{op}: table must have at least {positions} rows, got {table.shape}")
    expect(op, "table", table, F32, (table.shape[0], head_dim // 2, 2))


def _launch(
    dev: Device, kernel: Kernel, heads: int, args: tuple, abs_max_consts: dict[str, int]
) -> None:
    """args: the kernel's, qkv first. heads: of each token, with which threads do something."""
    qkv = args[0]
    B, T, _, head_dim = qkv.shape
    half_vectors = head_dim * qkv.dtype.itemsize // (2 * VECTOR_BYTES)
    consts = {"HEAD_DIM": head_dim, "HEADS_PER_THREAD": HEADS_PER_THREAD} | abs_max_consts
    dev.launch(kernel, grid(B * T, heads, half_vectors), THREADS, args, consts=consts)


def forward(
    dev: Device,
    qkv: Tensor,
    table: Tensor,
    num_heads: int,
    num_kv_heads: int,
    first_position: int = 0,
) -> None:
    """Rotate each query and key head in place, pairs (d, d + Hd/2) as in HF (rotate-half).

    The angles are those of position first_position + t.

    Args:
        qkv    inout  T   (B,T,Hq+2Hkv,Hd)  F32 or BF16; Hd a multiple of 16; value heads stay
        table  in     F32 (P,Hd/2,2)        make_table; P >= first_position + T

    Cost:    one read and one write of the query and key heads; one launch.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    op = "rope.forward"
    _check(op, dev, "qkv", qkv, table, num_heads, num_kv_heads, first_position)
    B, T, _, _ = qkv.shape
    args = (qkv, table, B * T, T, num_heads, num_kv_heads, first_position)
    _launch(dev, ROPE_FORWARD, num_heads + num_kv_heads, args, abs_max_consts(op, None))


def backward(
    dev: Device,
    d_qkv: Tensor,
    table: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    abs_max: Tensor | None = None,
) -> None:
    """Rotate the gradients back, by the opposite angles, in place; positions begin at 0.

    Args as forward, and
        abs_max  inout  F32 (1,)  or None; raised to the largest |d_qkv|, value heads included

    Cost:    as forward; with abs_max one read of the value heads too.
    Raises:  TypeError for a wrong dtype, ValueError for a wrong shape.
    """
    op = "rope.backward"
    _check(op, dev, "d_qkv", d_qkv, table, num_heads, num_kv_heads, 0)
    B, T, all_heads, _ = d_qkv.shape
    heads = num_heads + num_kv_heads if abs_max is None else all_heads
    args = (d_qkv, table, B * T, T, num_heads, num_kv_heads, abs_max)
    _launch(dev, ROPE_BACKWARD, heads, args, abs_max_consts(op, abs_max))
