"""Rotary position embedding on the packed QKV activation, in place, and its table of angles."""

import math
from contextlib import ExitStack
from functools import lru_cache
from typing import Protocol

import numpy as np

from llmq.base.dtypes import F32, I32
from llmq.base.operand import Fp8Out
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import (
    VECTOR_BYTES,
    abs_max_consts,
    declared_fp8,
    expect_accumulator,
    expect_fp8_multiples,
    expect_head_dim,
    expect_qkv,
    finish_column_sum,
    fp8_args,
    fp8_consts,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

ROPE_FORWARD = Kernel(
    "attention/rope.cu",
    "rope_forward",
    args="inout T* qkv, const f32* table, i64 tokens, i32 seq_length, i32 num_heads, "
    "i32 num_kv_heads, i32 first_position, const i32*? starts",
)
ROPE_BACKWARD = Kernel(
    "attention/rope.cu",
    "rope_backward",
    args="inout T* d_qkv, const f32* table, i64 tokens, i32 seq_length, i32 num_heads, "
    "i32 num_kv_heads, const i32*? starts, inout f32*? abs_max",
)
ROPE_BACKWARD_FUSED = Kernel(
    "attention/rope.cu",
    "rope_backward_fused",
    args="T*? out, const T* d_qkv, f32*? partial, const f32* table, i64 tokens, i32 seq_length, "
    "i32 num_heads, i32 num_kv_heads, const i32*? starts, i32 block_tiles, inout f32*? abs_max, "
    + declared_fp8("tokens", "features"),
)

THREADS = 128
MAX_HEAD_DIM = 256
WIDE = 16  # what head sizes and rotated channels are multiples of, or threads take single elements
HEADS_PER_THREAD = 4  # share one load of the angles
FUSED_THREADS = 256
TILE_ROWS, TILE_COLUMNS = 64, 128  # of the fused kernel: tokens of a block, features of a tile
FUSED_SHARED = 3  # bytes of shared memory per element of a tile, besides the element
BLOCK_TILES = 2  # at most, side by side; share one load of the angles


class Scaling(Protocol):
    """The fields of a RopeScaling that make_table reads, see llmq.arch.rope_scaling for the
    meanings."""

    kind: str
    factor: float | None
    original_max_positions: int
    low_freq_factor: float
    high_freq_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]


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


def _yarn(power: np.ndarray, theta: float, channels: int, scaling: Scaling) -> np.ndarray:
    """Leave alone what turns often within the first length, stretch what turns rarely, and mix in
    between; F32 steps as in transformers."""

    def turns(number: float) -> float:
        """The place, counted in channels, of the frequency that has so many turns."""
        ratio = math.log(scaling.original_max_positions / (number * 2 * math.pi))
        return channels * ratio / (2 * math.log(theta))

    low, high = turns(scaling.beta_fast), turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    high += 0.001 if low == high else 0
    place = np.arange(channels // 2, dtype=np.float32)
    alone = 1 - np.clip((place - np.float32(low)) / np.float32(high - low), 0, 1)
    stretched = 1 / (np.float32(scaling.factor) * power)
    return stretched * (1 - alone) + 1 / power * alone


def inverse_frequencies(
    channels: int, theta: float, scaling: Scaling | None, positions: int = 0
) -> np.ndarray:
    """F32 (channels/2,): theta^(-2i / channels), stretched as the model asks; angle per position.
    positions: of the sequences, for what depends on their length."""
    if scaling is not None and scaling.kind == "dynamic":
        first = scaling.original_max_positions
        ratio = np.float32(scaling.factor * max(positions, first)) / np.float32(first)
        growth = float(ratio - np.float32(scaling.factor - 1)) ** (channels / (channels - 2))
        theta = float(np.float32(theta) * np.float32(growth))
    exponent = np.arange(0, channels, 2, dtype=np.float32) / np.float32(channels)
    # torch raises to the power in F32, and mostly gets the F64 result rounded to F32.
    power = np.power(float(theta), exponent.astype(np.float64)).astype(np.float32)
    inv_freq = 1 / power
    if scaling is None or scaling.kind == "dynamic":
        return inv_freq
    if scaling.kind == "llama3":
        return _llama3(inv_freq, scaling)
    if scaling.kind == "linear":
        return inv_freq / np.float32(scaling.factor)
    if scaling.kind == "yarn":
        return _yarn(power, theta, channels, scaling)
    if scaling.kind == "longrope":
        long = positions > scaling.original_max_positions
        factors = scaling.long_factor if long else scaling.short_factor
        return 1 / (np.array(factors, np.float32) * power)
    raise ValueError(f"rope.make_table: scaling kind {scaling.kind!r} is unknown")


@lru_cache(maxsize=4)  # a search plans hundreds of steps, and long tables take longer than these
def make_table(
    num_positions: int,
    head_dim: int,
    theta: float,
    scaling: Scaling | None,
    length: float = 1.0,
    channels: int | None = None,
) -> np.ndarray:
    """F32 (num_positions, Hd/2, 2): cos and sin of position * inverse frequency, times length. The
    angle is an F32 product as in transformers; cos and sin of that angle are the nearest F32.
    length: of what a query or key of length 1 becomes. channels: of a head that are rotated, None:
    all; the other pairs have the angle 0 and the length 1. Read-only."""
    channels = head_dim if channels is None else channels
    inv_freq = inverse_frequencies(channels, theta, scaling, num_positions)
    angle = (np.arange(num_positions, dtype=np.float32)[:, None] * inv_freq).astype(np.float64)
    table = np.zeros((num_positions, head_dim // 2, 2), np.float32)
    table[:, : channels // 2] = np.stack([np.cos(angle), np.sin(angle)], axis=-1) * length
    table[:, channels // 2 :, 0] = 1
    table.setflags(write=False)
    return table


def grid(tokens: int, heads: int, pieces: int) -> int:
    """Blocks for one thread per token, piece of half a head, and HEADS_PER_THREAD heads."""
    return ceil_div(tokens * ceil_div(heads, HEADS_PER_THREAD) * pieces, THREADS)


def fused_grid(tokens: int, features: int) -> tuple[tuple[int, int], int]:
    """Blocks (across, down) of the fused kernel, and how many tiles each has side by side."""
    tiles = ceil_div(features, TILE_COLUMNS)
    across = ceil_div(tiles, BLOCK_TILES)
    return (across, ceil_div(tokens, TILE_ROWS)), ceil_div(tiles, across)


def _check(
    op: str,
    dev: Device,
    name: str,
    qkv: Tensor,
    table: Tensor,
    num_heads: int,
    num_kv_heads: int,
    first_position: int,
    starts: Tensor | None,
    channels: int | None,
) -> None:
    B, T, head_dim = expect_qkv(op, name, qkv, num_heads, num_kv_heads)
    expect_head_dim(op, dev, head_dim, 2, MAX_HEAD_DIM)
    channels = head_dim if channels is None else channels
    if not 0 < channels <= head_dim or channels % 2:
        raise ValueError(f"{op}: channels must be even and up to {head_dim}, got {channels}")
    positions = T + first_position
    if not table.shape or table.shape[0] < positions:
        raise ValueError(f"{op}: table must have at least {positions} rows, got {table.shape}")
    expect(op, "table", table, F32, (table.shape[0], head_dim // 2, 2))
    if starts is not None:
        expect(op, "starts", starts, I32, (B, T))


def _consts(head_dim: int, starts: Tensor | None, channels: int | None) -> dict[str, int]:
    return {
        "HEAD_DIM": head_dim,
        "ROTARY": head_dim if channels is None else channels,
        "HEADS_PER_THREAD": HEADS_PER_THREAD,
        "DOCUMENTS": int(starts is not None),
    }


def fuses(head_dim: int, channels: int | None) -> bool:
    """True if heads and rotated channels are whole vectors: `backward` then takes a bias and writes
    FP8 codes."""
    return head_dim % WIDE == (channels or 0) % WIDE == 0


def _launch(dev: Device, kernel: Kernel, heads: int, args: tuple, consts: dict[str, int]) -> None:
    """args: the kernel's, qkv first. heads: of each token, with which threads do something."""
    qkv = args[0]
    B, T, _, head_dim = qkv.shape
    pieces = head_dim // 2
    if fuses(head_dim, consts["ROTARY"]):
        pieces = pieces * qkv.dtype.itemsize // VECTOR_BYTES
    else:
        consts = consts | {"WIDE": 0}
    dev.launch(kernel, grid(B * T, heads, pieces), THREADS, args, consts=consts)


def forward(
    dev: Device,
    qkv: Tensor,
    table: Tensor,
    num_heads: int,
    num_kv_heads: int,
    first_position: int = 0,
    starts: Tensor | None = None,
    channels: int | None = None,
) -> None:
    """Rotate each query and key head in place, pairs (d, d + R/2) as in HF (rotate-half).

    The angles are those of position first_position + t - starts[b, t].

    Args:
        qkv     inout  T   (B,T,Hq+2Hkv,Hd)  F32 or BF16; Hd even, up to 256; value heads stay
        table   in     F32 (P,Hd/2,2)        make_table; P >= first_position + T
        starts  in     I32 (B,T) or None     where each one's document starts, 0 <= starts <= t;
                                             None: 0
        channels  R: the first channels of a head, which alone are rotated; even; None: all. The
                  others come in pairs too, of which the table has the angles 0, last.
    """
    op = "rope.forward"
    _check(op, dev, "qkv", qkv, table, num_heads, num_kv_heads, first_position, starts, channels)
    B, T, _, head_dim = qkv.shape
    args = (qkv, table, B * T, T, num_heads, num_kv_heads, first_position, starts)
    consts = _consts(head_dim, starts, channels) | abs_max_consts(None)
    _launch(dev, ROPE_FORWARD, num_heads + num_kv_heads, args, consts)


def backward(
    dev: Device,
    d_qkv: Tensor,
    table: Tensor,
    num_heads: int,
    num_kv_heads: int,
    starts: Tensor | None = None,
    *,
    channels: int | None = None,
    abs_max: Tensor | None = None,
    d_bias: Accumulator | None = None,
    fp8: Fp8Out | None = None,
) -> None:
    """Rotate the gradients back, by the opposite angles, in place; positions begin at 0.

    With d_bias or fp8, what follows is done in the same pass over d_qkv: the gradient of a bias
    that was added to qkv, and the rotated gradients in FP8. With fp8 d_qkv itself does not change.

    Args as forward (T and G are BF16 or F32), and
        abs_max  inout  F32 (1,)  or None; raised to the largest |d_qkv|, value heads included
        d_bias   inout  Accumulator G (Q,), Q = (Hq+2Hkv)*Hd, or None; sums over B and T, in F32 in
                        a fixed order, which is not that of bias.backward
        fp8      out    (B*T, Q)  or None; the rotated gradients, value heads included; B*T a
                        multiple of 16

    Workspace: with d_bias Q F32 for each 64 tokens.
    """
    op = "rope.backward"
    _check(op, dev, "d_qkv", d_qkv, table, num_heads, num_kv_heads, 0, starts, channels)
    B, T, all_heads, head_dim = d_qkv.shape
    sizes = (B * T, T, num_heads, num_kv_heads, starts)
    consts = _consts(head_dim, starts, channels) | abs_max_consts(abs_max)
    if d_bias is None and fp8 is None:
        heads = num_heads + num_kv_heads if abs_max is None else all_heads
        args = (d_qkv, table, *sizes, abs_max)
        _launch(dev, ROPE_BACKWARD, heads, args, consts)
        return
    if not fuses(head_dim, channels):
        raise ValueError(f"{op}: d_bias and fp8 need Hd and channels in multiples of {WIDE}")
    features = all_heads * head_dim
    consts |= {"BIAS": int(d_bias is not None)}
    consts |= fp8_consts(op, fp8, B * T, features)
    blocks, block_tiles = fused_grid(B * T, features)
    if fp8 is not None:
        expect_fp8_multiples(op, B * T, features)
    expect_accumulator(op, "d_bias", d_bias, (features,))
    with ExitStack() as temps:
        partial = None
        if d_bias is not None:
            shape = (blocks[1], features)
            partial = temps.enter_context(dev.scratch("rope bias partial sums", shape, F32))
        out = d_qkv if fp8 is None else None
        smem = TILE_ROWS * TILE_COLUMNS * (d_qkv.dtype.itemsize + FUSED_SHARED)
        args = (out, d_qkv, partial, table, *sizes, block_tiles, abs_max, *fp8_args(fp8))
        dev.launch(ROPE_BACKWARD_FUSED, blocks, FUSED_THREADS, args, consts=consts, smem=smem)
        finish_column_sum(dev, d_bias, partial)
