"""Functions that several references share: computing precision, random bits, stochastic
rounding."""

import functools
import itertools
import math
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from llmq.base import dtypes
from llmq.base.dtypes import HALF_TERMS, STEP_SCALARS

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8_MAX = {dtype.numpy: np.float32(largest) for dtype, largest in dtypes.FP8_MAX.items()}
SCALE_BLOCK = 128  # elements that share the scale of an 8-bit moment, as in llmq/ops/common.py
LEAST_EXPONENT = 27  # a moment scale's least F32 exponent (bias 127), so that 1 / scale is finite
# Powers of the best of many random numbers. The lattices of its first three powers have shortest
# vectors of at least 0.88 times the greatest possible length, modulo 2^16 and 2^32.
NEIGHBOUR_FACTORS = np.array([pow(0xA7F7D5BD, n, 2**32) for n in range(8)], np.uint32)
NF4_BLOCK, NF4_GROUP = 64, 256  # elements that share a scale; scales that share a group's scale
CHUNK = 64  # tokens per chunk of linear attention over states
LEAST_DECAY = -128.0  # its exp is 0 in F32; larger magnitudes would cost digits of other sums
FP8_NAN = 0x7F  # code to which NVIDIA GPUs convert NaN of either sign, in both formats
# The levels of NF4 in the QLoRA paper's appendix: quantiles of a normal distribution, scaled to
# [-1, 1], one of them 0.
NF4_LEVELS = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
MXFP4_BLOCK = 32  # elements that share a power of two
MXFP4_BIAS = 127  # bias of a block's exponent
MXFP4_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""Values of a code's lower three bits; the fourth bit is the sign."""
_SIGNED = np.concatenate([MXFP4_LEVELS, -MXFP4_LEVELS])
_PAIRS = np.stack([_SIGNED[np.arange(256) & 15], _SIGNED[np.arange(256) >> 4]], axis=1)
_PAIRS = _PAIRS.view(np.uint64)[:, 0]
"""Values of the two codes of each byte, looked up together, which is faster."""


def compute(x: np.ndarray) -> np.ndarray:
    """x in the precision that references compute in: F64 for F64 (finite differences), else F32."""
    return x if x.dtype == np.float64 else x.astype(np.float32, copy=False)


def step_scalars(words: np.ndarray) -> np.ndarray:
    """The STEP_SCALARS record behind an I32 (16,) tensor, in place."""
    return words.view(STEP_SCALARS)[0]


def random_bits(seed: int, index: np.ndarray) -> np.ndarray:
    """uint32 hash of (seed, index): the random number of element `index`. The hash has two
    multiply-xorshift rounds ("lowbias32" with the constants of C. Wellons' hash-prospector). The
    high word of an index above 32 bits is folded into the seed."""
    index = index.astype(np.uint64)
    high = (index >> np.uint64(32)).astype(np.uint32)
    h = index.astype(np.uint32) * np.uint32(0x9E3779B9) + np.uint32(seed & 0xFFFFFFFF)
    h ^= high * np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x21F0AAAD)
    h ^= h >> np.uint32(15)
    h *= np.uint32(0x735A2D97)
    h ^= h >> np.uint32(15)
    return h


def mix_seed(*words: int) -> int:
    """One 32-bit seed from several words; the CUDA side is `mix_seed` in common.cuh."""
    h = 0
    for word in words:
        h = ((h ^ (word & 0xFFFFFFFF)) * 0x01000193 + 0x9E3779B9) & 0xFFFFFFFF
        h ^= h >> 15
        h = h * 0x2C1B3C6D & 0xFFFFFFFF
        h ^= h >> 12
    return h


def round_stochastic(x: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Round F32 to BF16, up with a probability equal to the dropped part. bits: unsigned, the low
    16 are used. Infinities and NaN are rounded to nearest."""
    x = np.ascontiguousarray(x, np.float32)
    raw = x.view(np.uint32) + (bits & np.uint32(0xFFFF))
    rounded = (raw >> np.uint32(16)).astype(np.uint16).view(BF16)
    return np.where(np.isfinite(x), rounded, x.astype(BF16))


def gradient_seed(scalars: np.ndarray, salt: int) -> int:
    """The seed of the random bits that round a gradient in this micro-step."""
    s = step_scalars(scalars)
    return mix_seed(int(s["seed"]), int(s["step"]), int(s["micro_step"]), salt)


def neighbour_bits(seed: int, first: int, count: int) -> np.ndarray:
    """Random bits of elements first + [0, count), uint32 (count,). first: a multiple of 8. Eight
    neighbours share a hash; each gets the hash times its own power of one factor."""
    return _products(seed, first, count, NEIGHBOUR_FACTORS)[:count]


def gradient_bits(seed: int, first: int | np.ndarray, count: int) -> np.ndarray:
    """Random bits that round elements first + [0, count) of a gradient, uint16 (..., count). Two
    neighbours get the halves of one product. first: a multiple of 8, or an array of multiples."""
    pairs = _products(seed, first, count, NEIGHBOUR_FACTORS[:4])
    return pairs.astype("<u4", copy=False).view("<u2")[..., :count]


def _products(seed: int, first: int | np.ndarray, count: int, factors: np.ndarray) -> np.ndarray:
    eights = np.arange(-(-count // 8), dtype=np.uint64)
    eights = eights + (np.asarray(first, np.uint64)[..., None] >> np.uint64(3))
    products = random_bits(seed, eights)[..., None] * factors
    return products.reshape(*eights.shape[:-1], -1)


def store_gradient(
    d_weight: np.ndarray,
    value: np.ndarray,
    scalars: np.ndarray,
    accumulate: bool,
    salt: int,
    first: int = 0,
) -> None:
    """Write or add a parameter gradient, as llmq.base.tensor.Accumulator describes. first: where
    value is a part of the gradient, the index of its first element, a multiple of 8."""
    if not accumulate:
        d_weight[...] = value.astype(d_weight.dtype, copy=False)
    elif d_weight.dtype == BF16:
        seed = gradient_seed(scalars, salt)
        bits = gradient_bits(seed, first, d_weight.size).reshape(d_weight.shape)
        total = d_weight.astype(np.float32) + value.astype(np.float32)
        d_weight[...] = round_stochastic(total, bits)
    else:
        d_weight += value.astype(d_weight.dtype, copy=False)


def row_blocks(rows: int, columns: int, elements: int = 1 << 16) -> list[slice]:
    """Slices of rows with about `elements` elements. The data of 64k elements stay in the cache
    over a chain of ufuncs."""
    step = max(1, elements // columns)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


@functools.cache
def _fp8_values(dtype: np.dtype) -> np.ndarray:
    """The numbers of an FP8 format's 256 codes, F32."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)


def decode_fp8(codes: np.ndarray) -> np.ndarray:
    """FP8 (rows, columns) as F32. The table is 8 times as fast as ml_dtypes' conversion."""
    table, decoded = _fp8_values(codes.dtype), np.empty(codes.shape, np.float32)
    codes = codes.view(np.uint8)
    for rows in row_blocks(*codes.shape):
        # "wrap" writes to `out` without a buffer; bytes are always in range.
        table.take(codes[rows], out=decoded[rows], mode="wrap")
    return decoded


class Stored:
    """Elements of a stored state: F32 or F64, stored without rounding, or BF16."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.rounds = array.dtype == BF16

    def load(self, real: type) -> np.ndarray:
        """The array as `real` numbers: the array itself if its dtype is `real`."""
        return self.array.astype(real, copy=False)

    def round(self, value: np.ndarray, bits: np.ndarray, high: bool) -> None:
        """Store values, rounded by the high half of the bits if `high`, else by the low half."""
        self.array[...] = round_stochastic(value, bits >> np.uint32(16) if high else bits)


class Scaled(Stored):
    """E4M3 codes of numbers, or of their roots, with a scale for each SCALE_BLOCK neighbours."""

    def __init__(self, array: np.ndarray, scale: np.ndarray, root: bool):
        self.array, self.scale, self.root = array, scale, root
        self.rounds = True

    def load(self, real: type) -> np.ndarray:
        x = decode_fp8(self.array.reshape(-1, SCALE_BLOCK))
        x *= self.scale[:, None]
        if self.root:
            x *= x
        return x.reshape(-1).astype(real, copy=False)

    def round(self, value: np.ndarray, bits: np.ndarray, high: bool) -> None:
        """Store codes, rounded by the high 20 bits, and scales. The bits of an E4M3 number, shifted
        left by 20, are the bits of 2^-120 times the number in F32, for subnormal numbers too."""
        x = value.astype(np.float32, copy=False).reshape(-1, SCALE_BLOCK)
        size = np.sqrt(x) if self.root else np.abs(x)
        # 448 = 1.75 * 2^8: the exponent rises by one if the fraction is larger than 0.75.
        raised = size.max(axis=1).view(np.uint32) + np.uint32(0x1FFFFF)
        exponent = np.maximum((raised >> np.uint32(23)).astype(np.int32) - 8, LEAST_EXPONENT)
        self.scale[...] = (exponent << 23).view(np.float32)
        size *= ((254 - exponent) << 23).view(np.float32)[:, None]
        size *= np.float32(2.0**-120)
        raw = size.view(np.uint32) + (bits >> np.uint32(12)).reshape(x.shape)
        raw >>= np.uint32(20)
        if self.root:
            np.maximum(raw, 1, out=raw)  # a root's code never becomes zero
        else:
            raw |= x.view(np.uint32) >> np.uint32(24) & np.uint32(0x80)
        self.array.view(np.uint8)[...] = raw.reshape(-1)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)); 0 where exp overflows. Callers suppress that warning (np.errstate)."""
    s = np.negative(x)
    np.exp(s, out=s)
    s += 1
    return np.reciprocal(s, out=s)


GELU_C1 = 2 * math.sqrt(2 / math.pi)
GELU_C3 = GELU_C1 * 0.044715


def gelu_share(x: np.ndarray) -> np.ndarray:
    """gelu(x) / x with the tanh approximation: 0.5 * (1 + tanh(u)) = sigmoid(2u), with 2u = x * (C1
    + C3 * x^2). exp may overflow, as in `sigmoid`."""
    value = x * x
    value *= GELU_C3
    value += GELU_C1
    value *= x
    return sigmoid(value)


def gelu_slope(x: np.ndarray, share: np.ndarray) -> np.ndarray:
    """d gelu / dx = s + s * (1 - s) * x * (C1 + 3 * C3 * x^2), given s = gelu_share(x)."""
    slope = x * x
    slope *= 3 * GELU_C3
    slope += GELU_C1
    slope *= x
    slope *= share
    slope *= 1 - share
    slope += share
    return slope


def silu_slope(x: np.ndarray, share: np.ndarray) -> np.ndarray:
    """d silu / dx = s * (1 + x * (1 - s)), given s = sigmoid(x)."""
    slope = 1 - share
    slope *= x
    slope += 1
    slope *= share
    return slope


def update_abs_max(abs_max: np.ndarray | None, x: np.ndarray) -> None:
    """abs_max[0] = max(abs_max[0], largest |x|); NaN counts as the largest. None is ignored."""
    if abs_max is not None:
        x = compute(x)
        abs_max[0] = np.maximum(abs_max[0], np.maximum(abs(x.max()), abs(x.min())))


@functools.cache
def _fp8_codes(dtype: np.dtype) -> np.ndarray:
    """uint8 (65536,): the codes of F32 numbers whose lower 16 bits are zero, by the upper 16."""
    numbers = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # conversion of NaN
        codes = numbers.clip(-FP8_MAX[dtype], FP8_MAX[dtype]).astype(dtype).view(np.uint8)
    codes[np.isnan(numbers)] = FP8_NAN
    return codes


def encode_fp8(codes: np.ndarray, x: np.ndarray, factor: np.float32, dtype: np.dtype) -> None:
    """codes (uint8) = x * factor in dtype, rounded to nearest even, clamped to the largest values.
    For the rounding it only matters whether the lower 16 bits of a number are all zero. So one bit,
    too low to make a tie, stands for these 16 bits, and a table has the code of the other 16. This
    is several times as fast as ml_dtypes' conversion."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits = (x.astype(np.float32, copy=False) * factor).view(np.uint32)
    lower = bits & np.uint32(0xFFFF)
    bits >>= 16
    bits |= np.minimum(lower, 1, out=lower)
    # "wrap" writes to `out` without a buffer; indices are always in range.
    _fp8_codes(dtype).take(bits, out=codes, mode="wrap")


def decoded(x: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """x (rows, columns) unchanged without a scale; else x is FP8 codes: F32, code * scale."""
    if scale is None:
        return x
    values = decode_fp8(x)
    values *= scale[0]
    return values


def look_at_codes(
    codes: np.ndarray,
    scale: np.ndarray | None,
    largest: np.ndarray | None,
    abs_max: np.ndarray | None,
    saturated: np.ndarray | None,
) -> None:
    """Measure a product's codes as the kernel that reads them does (ProductCodes in
    llmq/base/operand.py)."""
    if abs_max is None:
        return
    limit = FP8_MAX[codes.dtype] * scale[0]
    if largest[0] > limit:
        top = np.array(FP8_MAX[codes.dtype], codes.dtype).view(np.uint8)
        saturated[0] += np.count_nonzero(codes.view(np.uint8) & 0x7F == top)
    abs_max[0] = np.maximum(abs_max[0], largest[0])


def emit_fp8(
    codes: np.ndarray | None,
    transposed: np.ndarray | None,
    scale: np.ndarray | None,
    saturated: np.ndarray | None,
    x: np.ndarray,
) -> None:
    """Write the FP8 results of x (rows, features), see llmq.base.operand.Fp8Out; do nothing if
    codes and transposed are None."""
    if codes is None and transposed is None:
        return
    rows, features = x.shape
    dtype = (transposed if codes is None else codes).dtype
    with np.errstate(divide="ignore", over="ignore"):
        factor, limit = np.float32(1) / scale[0], FP8_MAX[dtype] * scale[0]
    blocks = row_blocks(rows, features)
    scratch = np.empty((blocks[0].stop, features), np.uint8) if codes is None else None
    for block in blocks:
        values = x[block].astype(np.float32, copy=False)
        saturated[0] += np.count_nonzero(np.abs(values) > limit)
        out = scratch[: len(values)] if codes is None else codes.view(np.uint8)[block]
        encode_fp8(out, values, factor, dtype)
        if transposed is not None:
            transposed.view(np.uint8)[:, block] = out.T
    if transposed is not None:
        pad_turned(transposed, rows, factor)


def pad_turned(transposed: np.ndarray, rows: int, factor: np.float32) -> None:
    """Write codes of 0 into columns from `rows` on of transposed fp8 codes (features, columns)."""
    zero = np.empty(1, np.uint8)
    encode_fp8(zero, np.zeros(1, np.float32), factor, transposed.dtype)
    transposed.view(np.uint8)[:, rows:] = zero


def norm_factor(weight: np.ndarray, offset: int) -> np.ndarray:
    """The factor of a norm's channels, in the computing precision: 1 + weight with an offset."""
    factor = compute(weight)
    return factor.dtype.type(1) + factor if offset else factor


def half_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a (M, K) @ b (K, N), F32. Each HALF_TERMS products are summed by two instructions, each
    rounding to half precision; these partial sums are added in F32."""
    total, step = np.zeros((len(a), b.shape[1]), np.float32), HALF_TERMS // 2
    for first in range(0, a.shape[1], HALF_TERMS):
        part = np.float16(0)
        for k in (first, first + step):
            part = (part + a[:, k : k + step] @ b[k : k + step]).astype(np.float16)
        total += part
    return total


def add_terms(
    total: np.ndarray, rows: slice, bias: np.ndarray | None, addend: np.ndarray | None
) -> None:
    """total (R, N) += bias (N,) and += `rows` of the addend, whose dtype may have fewer bits."""
    if bias is not None:
        total += compute(bias)
    if addend is not None:
        total += compute(addend[rows])


def nf4_blocks(
    codes: np.ndarray,
    scale_codes: np.ndarray,
    groups: np.ndarray,
    mean: np.ndarray,
    levels: np.ndarray,
    n: int,
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield (slice of blocks, F32 values (blocks, 64)) for all modules of n elements. A value is
    the code's level times the scale; a scale its code's level times its group's, plus the mean."""
    of_module, num_groups = n // NF4_BLOCK, len(groups) // len(mean)
    for module, part in itertools.product(range(len(mean)), row_blocks(of_module, NF4_BLOCK)):
        blocks = slice(module * of_module + part.start, module * of_module + part.stop)
        of_group = groups[module * num_groups + np.arange(part.start, part.stop) // NF4_GROUP]
        scales = levels[scale_codes[blocks]] * of_group + mean[module]
        pairs = codes[blocks.start * NF4_BLOCK // 2 : blocks.stop * NF4_BLOCK // 2]
        values = np.empty((len(pairs), 2), np.float32)
        values[:, 0], values[:, 1] = NF4_LEVELS[pairs >> 4], NF4_LEVELS[pairs & 15]
        yield blocks, values.reshape(-1, NF4_BLOCK) * scales[:, None]


def e2m1_levels(codes: np.ndarray) -> np.ndarray:
    """The levels of 4-bit codes, F32 (..., 2 n). codes: bytes (..., n) of two codes each, the first
    in the lower bits."""
    return _PAIRS[codes].view(np.float32)


def mxfp4_blocks(codes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """The values of blocks, F32 (blocks, 32): level * 2^(exponent - 127)."""
    values = e2m1_levels(codes).reshape(-1, MXFP4_BLOCK)
    with np.errstate(over="ignore", invalid="ignore"):  # exponent 255 stands for no number
        values *= np.exp2(exponents.astype(np.float32) - MXFP4_BIAS)[:, None]
    return values


def _rotate(
    qkv: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    num_heads: int,
    num_kv_heads: int,
    by: np.ndarray | None,
) -> None:
    """Rotate the query and key heads of qkv by angles, whose cos and sin are (T, Hd/2). Multiply
    query heads by `by` (T,), unless that is None. The angles are copied to the heads' layout, (T,
    Hq + Hkv, 2, Hd/2): with a broadcast NumPy's inner loop would have the length of half a head,
    which is slow."""
    seq_length, half = cos.shape
    heads = num_heads + num_kv_heads
    wide_cos = np.empty((seq_length, heads, 2, half), cos.dtype)
    wide_cos[...] = cos[:, None, None]
    wide_sin = np.empty_like(wide_cos)
    np.negative(sin[:, None], out=wide_sin[:, :, 0])
    wide_sin[:, :, 1] = sin[:, None]
    swapped = np.empty_like(wide_cos)
    for sequence in qkv:  # so that the temporaries are small
        x = sequence[:, :heads].reshape(seq_length, heads, 2, half)
        np.copyto(swapped, x[:, :, ::-1])
        swapped *= wide_sin
        rotated = np.multiply(x, wide_cos, out=x if x.dtype == cos.dtype else None)
        rotated += swapped
        if by is not None:
            rotated[:, :num_heads] *= by[:, None, None, None]
        if rotated is not x:
            x[...] = rotated


def turn_heads(
    qkv: np.ndarray,
    table: np.ndarray,
    num_heads: int,
    num_kv_heads: int,
    starts: np.ndarray | None,
    sign: int,
    rotary: int | None = None,
    lengths: np.ndarray | None = None,
) -> None:
    """Rotate the query and key heads of qkv (B, T, heads, Hd), in the computing precision. table
    has cos and sin of each position's angles, which are multiplied by sign. rotary: number of first
    channels, paired at a distance of rotary/2; the other channels are paired among themselves.
    None: all channels. lengths: factor of query heads at each position; None: 1."""
    rest = qkv.shape[-1] - (rotary or qkv.shape[-1])
    if rest:
        halves = np.arange(rotary).reshape(2, -1), rotary + np.arange(rest).reshape(2, -1)
        order = np.concatenate(halves, axis=1).reshape(-1)
        heads = np.ascontiguousarray(qkv[:, :, : num_heads + num_kv_heads, order])
        turn_heads(heads, table, num_heads, num_kv_heads, starts, sign, None, lengths)
        qkv[:, :, : num_heads + num_kv_heads, order] = heads
        return
    positions = np.arange(qkv.shape[1])
    # Sequences with the same positions are rotated together.
    pieces = [(qkv, positions)]
    if starts is not None and len(positions) == 1:  # one token each: the batch is the sequence
        pieces = [(qkv.swapaxes(0, 1), -starts[:, 0])]
    elif starts is not None:
        pieces = [(qkv[b : b + 1], positions - row) for b, row in enumerate(starts)]
    for piece, rows in pieces:
        angles = table[rows].astype(compute(qkv[:0]).dtype, copy=False)
        by = None if lengths is None else lengths[rows]
        _rotate(piece, angles[..., 0], sign * angles[..., 1], num_heads, num_kv_heads, by)


# -- The gated activation, alone and fused with a product


def swiglu_forward(out, up_gate, rows, F, abs_max=None, *, gelu=0):
    out, up_gate = out.reshape(rows, F), up_gate.reshape(rows, 2 * F)
    with np.errstate(over="ignore"):
        for block in row_blocks(rows, F):
            up, gate = compute(up_gate[block, :F]), compute(up_gate[block, F:])
            value = (gelu_share if gelu else sigmoid)(gate)
            value *= gate
            np.multiply(value, up, out=out[block], casting="same_kind")
            update_abs_max(abs_max, out[block])


def swiglu_backward(d_up_gate, d_out, up_gate, rows, F, abs_max=None, out=None, *, gelu=0):
    """out: forward's result again; may be d_out."""
    d_out = d_out.reshape(rows, F)
    if d_up_gate is None:
        d_up_gate = np.empty((rows, 2 * F), up_gate.dtype)
    up_gate, d_up_gate = up_gate.reshape(rows, 2 * F), d_up_gate.reshape(rows, 2 * F)
    with np.errstate(over="ignore"):
        for block in row_blocks(rows, F):
            up, gate = compute(up_gate[block, :F]), compute(up_gate[block, F:])
            d = compute(d_out[block])
            s = (gelu_share if gelu else sigmoid)(gate)
            slope = (gelu_slope if gelu else silu_slope)(gate, s)
            slope *= up
            slope *= d
            active = np.multiply(gate, s, out=s)
            again = None if out is None else active * up
            active *= d
            if out is not None:  # written after all reads of d, since out may be d_out
                out.reshape(rows, F)[block] = again
            d_up_gate[block, :F] = active
            d_up_gate[block, F:] = slope
            update_abs_max(abs_max, d_up_gate[block])


def swiglu_forward_fp8(out, up_gate, rows, F, abs_max, *fp8, gelu=0):
    """swiglu_forward, and the result in FP8. fp8: codes, transposed, scale, saturated of the
    result; then scale, largest, abs_max, saturated of up_gate if up_gate is codes."""
    *codes, in_scale, in_largest, in_abs_max, in_saturated = fp8
    look_at_codes(up_gate, in_scale, in_largest, in_abs_max, in_saturated)
    up_gate = decoded(up_gate.reshape(rows, 2 * F), in_scale)
    if out is None:
        out = np.empty((rows, F), BF16 if in_scale is not None else up_gate.dtype)
    swiglu_forward(out, up_gate, rows, F, abs_max, gelu=gelu)
    emit_fp8(*codes, out.reshape(rows, F))


def swiglu_backward_fp8(d_up_gate, d_out, up_gate, rows, turned, F, abs_max, *fp8, gelu=0):
    """swiglu_backward, and the results in FP8. fp8: codes, transposed, scale, saturated; out,
    out_transposed, out_scale, out_saturated; then, if the inputs are codes, the scale of up_gate,
    and scale, largest, abs_max, saturated of d_out."""
    *codes, out, out_transposed, out_scale, out_saturated = fp8[:8]
    up_scale, in_scale, in_largest, in_abs_max, in_saturated = fp8[8:]
    result = BF16 if up_scale is not None else up_gate.dtype
    look_at_codes(d_out, in_scale, in_largest, in_abs_max, in_saturated)
    d_out = decoded(d_out.reshape(rows, F), in_scale)
    up_gate = decoded(up_gate.reshape(rows, 2 * F), up_scale)
    if d_up_gate is None:
        d_up_gate = np.empty((rows, 2 * F), result)
    if out_transposed is not None:
        out = np.empty((rows, F), result)
    swiglu_backward(d_up_gate, d_out, up_gate, rows, F, abs_max, out, gelu=gelu)
    emit_fp8(*codes, d_up_gate.reshape(rows, 2 * F))
    if out_transposed is not None:
        emit_fp8(None, out_transposed, out_scale, out_saturated, out.reshape(rows, F))


def heads_of(
    qkv: np.ndarray, key_heads: int, value_heads: int, dk: int, dv: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys (B, T, Hk, DK) and values (B, T, Hv, DV): views of qkv (B, T, ...)."""
    (B, T, _), width = qkv.shape, key_heads * dk
    parts = (qkv[..., :width], qkv[..., width : 2 * width], qkv[..., 2 * width :])
    shapes = ((key_heads, dk), (key_heads, dk), (value_heads, dv))
    return tuple(p.reshape(B, T, *s) for p, s in zip(parts, shapes, strict=True))


def chunks_of(x: np.ndarray, times: int = 1) -> np.ndarray:
    """x (B, T, heads, ...) as (B, heads * times, chunks, 64, ...), with 0 from token T on."""
    B, T, heads, *rest = x.shape
    chunks = -(-T // CHUNK)
    padded = np.zeros((B, chunks * CHUNK, heads, *rest), x.dtype)
    padded[:, :T] = x
    return np.repeat(np.moveaxis(padded.reshape(B, chunks, CHUNK, heads, *rest), 3, 1), times, 1)


def from_chunks(x: np.ndarray, T: int) -> np.ndarray:
    """The inverse of chunks_of."""
    B, heads, chunks, _, *rest = x.shape
    return np.moveaxis(x, 1, 3).reshape(B, chunks * CHUNK, heads, *rest)[:, :T]


def inputs_of(
    qkv: np.ndarray, gates: np.ndarray, key_heads: int, value_heads: int, dk: int, dv: int
) -> tuple[np.ndarray, ...]:
    """Queries, keys, values (B, Hv, chunks, 64, D), decays and betas (B, Hv, chunks, 64)."""
    times = value_heads // key_heads
    q, k, v = heads_of(compute(qkv), key_heads, value_heads, dk, dv)
    decay, beta = (chunks_of(compute(gates)[:, :, i]) for i in (0, 1))
    decay = np.maximum(decay, LEAST_DECAY)
    return chunks_of(q, times), chunks_of(k, times), chunks_of(v), decay, beta


def begins_of(starts: np.ndarray | None, carried: int, B: int, T: int) -> np.ndarray:
    """Position in the chunk at which each token's document begins, (B, 1, chunks, 64); -1: before
    the chunk."""
    first = np.arange(0, T, CHUNK)
    if starts is None:
        starts = np.full((B, T), -1 if carried else 0, np.int32)
    starts = np.pad(starts, ((0, 0), (0, len(first) * CHUNK - T)), "edge")
    return np.maximum(starts.reshape(B, 1, -1, CHUNK) - first[:, None], -1)


def decays_of(begin: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Decay from token j to i, (B, Hv, chunks, i, j); 0 where j > i or j is in another document."""
    at = np.arange(CHUNK)
    same = (begin[..., :, None] <= at) & (at <= at[:, None])
    with np.errstate(over="ignore"):
        return np.where(same, np.exp(sums[..., :, None] - sums[..., None, :]), 0)
