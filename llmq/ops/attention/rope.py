"""Rotary position embedding on the packed QKV activation, in place, and its table of angles."""

import math
from contextlib import ExitStack
from functools import lru_cache
from typing import Protocol

import numpy as np

from llmq.base.dtypes import F32
from llmq.base.operand import Fp8Out
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import (
    ROWS_MULTIPLE,
    VECTOR_BYTES,
    abs_max_consts,
    declared_fp8,
    finish_column_sum,
    fp8_args,
    fp8_consts,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

MAX_HEAD_DIM = 512
_HEADS, _TABLE = "T[batch,seq_length,num_heads + 2*num_kv_heads,Hd]", "f32[P,Hd//2,2] table"
_SIZES = "i64 tokens, i32 seq_length, i32 num_heads, i32 num_kv_heads"
_STARTS, _FEATURES = (
    "i32[batch,seq_length]? starts, f32[P]? lengths",
    "(num_heads + 2*num_kv_heads)*Hd",
)
_GPU = f"Hd % 2, Hd <= {MAX_HEAD_DIM}"
ROPE_FORWARD = Kernel(
    "attention/rope.cu",
    "rope_forward",
    f"inout {_HEADS} qkv, {_TABLE}, {_SIZES}, {_STARTS}",
    where="seq_length <= P",
    gpu=_GPU,
    programmatic=True,
)
ROPE_BACKWARD = Kernel(
    "attention/rope.cu",
    "rope_backward",
    f"inout {_HEADS} d_qkv, {_TABLE}, {_SIZES}, {_STARTS}, inout f32[1]? abs_max",
    where="seq_length <= P",
    gpu=_GPU,
)
ROPE_BACKWARD_FUSED = Kernel(
    "attention/rope.cu",
    "rope_backward_fused",
    f"out {_HEADS}? out, {_HEADS} d_qkv, out f32[blocks,{_FEATURES}]? partial, {_TABLE}, {_SIZES}, "
    f"{_STARTS}, i32 block_tiles, inout f32[1]? abs_max, {declared_fp8('tokens', _FEATURES)}",
    where="seq_length <= P",
    gpu=_GPU,
)

THREADS = 128
WIDE = 16  # divisor of head size and rotated channels, without which a thread has one element
HEADS_PER_THREAD = 4  # heads of a thread, which share one load of the angles
FUSED_THREADS = 256
TILE_ROWS, TILE_COLUMNS = 64, 128  # tokens of a block and features of a tile in the fused kernel
FUSED_SHARED = 3  # bytes of shared memory per element of a tile, besides the element
BLOCK_TILES = 2  # most tiles of a block; these lie side by side and share one load of the angles


class Scaling(Protocol):
    """The fields of llmq.arch.rope_scaling.RopeScaling that make_table reads."""

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
    partial_rotary_factor: float


def _llama3(inv_freq: np.ndarray, scaling: Scaling) -> np.ndarray:
    """Stretch long wavelengths and interpolate middle wavelengths, with transformers' F32 steps."""
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
    """Keep high frequencies, lower low frequencies, and interpolate in between, with transformers'
    F32 steps. power: theta^(2i / channels)."""

    def channel(turns: float) -> float:
        """Index of the channel whose angle makes `turns` turns within the original positions."""
        ratio = math.log(scaling.original_max_positions / (turns * 2 * math.pi))
        return channels * ratio / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    high += 0.001 if low == high else 0
    index = np.arange(channels // 2, dtype=np.float32)
    kept = 1 - np.clip((index - np.float32(low)) / np.float32(high - low), 0, 1)
    stretched = 1 / (np.float32(scaling.factor) * power)
    return stretched * (1 - kept) + 1 / power * kept


def inverse_frequencies(
    channels: int, theta: float, scaling: Scaling | None, positions: int = 0
) -> np.ndarray:
    """Angle per position, F32 (channels/2,): theta^(-2i / channels), changed by `scaling`.
    positions: length of the sequences; only "dynamic" and "longrope" depend on this length."""
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
    if scaling.kind in ("linear", "proportional"):
        if scaling.kind == "proportional":
            inv_freq[int(scaling.partial_rotary_factor * channels // 2) :] = 0
        return inv_freq / np.float32(scaling.factor)
    if scaling.kind == "yarn":
        return _yarn(power, theta, channels, scaling)
    if scaling.kind == "longrope":
        long = positions > scaling.original_max_positions
        factors = scaling.long_factor if long else scaling.short_factor
        return 1 / (np.array(factors, np.float32) * power)
    raise ValueError(f"rope.make_table: scaling kind {scaling.kind!r} is unknown")


@lru_cache(maxsize=4)  # a search plans hundreds of steps; a long table takes longer than a plan
def make_table(
    num_positions: int,
    head_dim: int,
    theta: float,
    scaling: Scaling | None,
    length: float = 1.0,
    channels: int | None = None,
) -> np.ndarray:
    """cos and sin of position * inverse frequency, times length: F32 (num_positions, Hd/2, 2),
    read-only. The angle is an F32 product as in transformers; cos and sin are the nearest F32.
    channels: number of rotated channels of a head; None: all. Other pairs of channels have angle 0
    and length 1."""
    channels = head_dim if channels is None else channels
    inv_freq = inverse_frequencies(channels, theta, scaling, num_positions)
    angle = (np.arange(num_positions, dtype=np.float32)[:, None] * inv_freq).astype(np.float64)
    table = np.zeros((num_positions, head_dim // 2, 2), np.float32)
    table[:, : channels // 2] = np.stack([np.cos(angle), np.sin(angle)], axis=-1) * length
    table[:, channels // 2 :, 0] = 1
    table.setflags(write=False)
    return table


def query_lengths(num_positions: int, growth: float, first: int) -> np.ndarray:
    """1 + growth * log(1 + floor(position / first)), F32 (num_positions,), as in Ministral 3."""
    steps = (np.arange(num_positions) // first).astype(np.float32)
    return (1 + growth * np.log1p(steps)).astype(np.float32)


def grid(tokens: int, heads: int, pieces: int) -> int:
    """Number of blocks. A thread has HEADS_PER_THREAD heads of one token, and one piece of half a
    head. pieces: number of such pieces."""
    return ceil_div(tokens * ceil_div(heads, HEADS_PER_THREAD) * pieces, THREADS)


def fused_grid(tokens: int, features: int) -> tuple[tuple[int, int], int]:
    """((blocks along features, blocks along tokens), tiles of a block side by side) of the fused
    kernel."""
    tiles = ceil_div(features, TILE_COLUMNS)
    across = ceil_div(tiles, BLOCK_TILES)
    return (across, ceil_div(tokens, TILE_ROWS)), ceil_div(tiles, across)


def _consts(
    op: str, head_dim: int, starts: Tensor | None, channels: int | None, lengths: Tensor | None
) -> dict[str, int]:
    channels = head_dim if channels is None else channels
    if not 0 < channels <= head_dim or channels % 2:
        raise ValueError(f"{op}: channels must be even and up to {head_dim}, got {channels}")
    return {
        "HEAD_DIM": head_dim,
        "ROTARY": channels,
        "HEADS_PER_THREAD": HEADS_PER_THREAD,
        "DOCUMENTS": int(starts is not None),
        "LENGTHS": int(lengths is not None),
    }


def fuses(head_dim: int, channels: int | None) -> bool:
    """True if heads and rotated channels are whole vectors. Only then `backward` can compute a bias
    gradient and FP8 codes."""
    return head_dim % WIDE == (channels or 0) % WIDE == 0


def _launch(dev: Device, kernel: Kernel, heads: int, args: tuple, consts: dict[str, int]) -> None:
    """Launch a kernel. args: the kernel's arguments, qkv first. heads: number of heads that the
    kernel reads per token."""
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
    starts: Tensor | None = None,
    channels: int | None = None,
    lengths: Tensor | None = None,
) -> None:
    """Rotate each query and key head in place, pairs (d, d + R/2) as in HF (rotate-half), by the
    angles of position t - starts[b, t]. Value heads stay.

    table: the result of make_table. starts: position where each token's document starts, at most t;
    negative for a document that began before these tokens; None: 0. channels: R, the number of
    rotated channels, which are a head's first; None: all. lengths: F32, a factor of query heads for
    each position; None: 1.
    """
    B, T, head_dim = ROPE_FORWARD.dims(qkv=qkv)
    args = (qkv, table, B * T, T, num_heads, num_kv_heads, starts, lengths)
    consts = _consts("rope.forward", head_dim, starts, channels, lengths) | abs_max_consts(None)
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
    lengths: Tensor | None = None,
    abs_max: Tensor | None = None,
    d_bias: Accumulator | None = None,
    fp8: Fp8Out | None = None,
) -> None:
    """Rotate gradients back, by the opposite angles, in place; with fp8 d_qkv stays as it is.

    abs_max: raised to the largest |d_qkv|, value heads included. d_bias: gradient of the bias that
    was added to qkv, summed over B and T in F32 in a fixed order, which differs from the order in
    `reduce.bias_gradient`. fp8: the rotated gradients in FP8, value heads included; B * T must be a
    multiple of 4.

    Workspace: with d_bias, F32, one partial bias gradient for every 64 tokens.
    """
    op = "rope.backward"
    B, T, head_dim = ROPE_BACKWARD.dims(d_qkv=d_qkv)
    all_heads = num_heads + 2 * num_kv_heads
    sizes = (B * T, T, num_heads, num_kv_heads, starts, lengths)
    consts = _consts(op, head_dim, starts, channels, lengths) | abs_max_consts(abs_max)
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
    if fp8 is not None and B * T % ROWS_MULTIPLE:
        raise ValueError(f"{op}: B * T must be a multiple of {ROWS_MULTIPLE} with fp8, got {B * T}")
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
