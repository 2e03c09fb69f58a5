"""SwiGLU: up * silu(gate), the activation of Llama- and Qwen-class MLPs; and GeGLU, Gemma's."""

from llmq.base.dtypes import BF16, E4M3, F32, I32
from llmq.base.operand import Fp8Out, ProductCodes, turned
from llmq.base.tensor import Tensor
from llmq.ops.common import (
    AGAIN_ARGS,
    FP8_ARGS,
    NOT_AGAIN,
    PRODUCT_ARGS,
    VECTOR_BYTES,
    WARP,
    abs_max_consts,
    again_args,
    again_consts,
    expect_float,
    expect_multiple,
    expect_product,
    fp8_args,
    fp8_consts,
    octet_tiles,
    product_args,
)
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256
VECTORS = 2  # 16-byte vectors per thread; VECTORS in cu/pointwise/swiglu.cu

FORWARD = Kernel(
    "pointwise/swiglu.cu",
    "swiglu_forward",
    args="T* out, const T* up_gate, i64 rows, i32 F, inout f32*? abs_max",
)
BACKWARD = Kernel(
    "pointwise/swiglu.cu",
    "swiglu_backward",
    args="T*? d_up_gate, const T* d_out, const T* up_gate, i64 rows, i32 F, inout f32*? abs_max, "
    "T*? out",
)
FORWARD_FP8 = Kernel(
    "pointwise/swiglu.cu",
    "swiglu_forward_fp8",
    args="T*? out, const U* up_gate, i64 rows, i32 F, inout f32*? abs_max, "
    f"{FP8_ARGS}, {PRODUCT_ARGS}",
)
BACKWARD_FP8 = Kernel(
    "pointwise/swiglu.cu",
    "swiglu_backward_fp8",
    args="T*? d_up_gate, const D* d_out, const U* up_gate, i64 rows, i64 turned, i32 F, "
    f"inout f32*? abs_max, {FP8_ARGS}, {AGAIN_ARGS}, const f32*? up_scale, {PRODUCT_ARGS}",
)


def grid(size: int, itemsize: int) -> int:
    """Blocks for `size` output elements: every thread handles VECTORS vectors of 16 bytes."""
    return ceil_div(size * itemsize, VECTOR_BYTES * THREADS * VECTORS)


def forward(
    dev: Device,
    out: Tensor | None,
    up_gate: Tensor | ProductCodes,
    *,
    gelu: bool = False,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
) -> None:
    """out = up * gate * sigmoid(gate), computed in F32.

    With gelu it is GeGLU: out = up * gelu(gate), the tanh approximation of llmq.ops.pointwise.gelu.

    Args (T is BF16 or F32):
        out      out    T (*S, F)    F a multiple of 16 bytes; may be None with fp8
        up_gate  in     T (*S, 2F)   [up | gate] along the last dimension; or the codes of a
                                     product (rows, 2F), E4M3: T is BF16, F a multiple of 16
        abs_max  inout  F32 (1,)     or None; raised to the largest |out|
        fp8      out    (rows, F)    or None; out in FP8, rows and F multiples of 4, 16

    Cost:    one launch; with fp8 no more bytes than the codes.
    """
    op = "swiglu.forward"
    if out is None and fp8 is None:
        raise TypeError(f"{op}: out or fp8 must be given, both are None")
    product, up_gate = _taken(op, "up_gate", up_gate)
    rows, F = _check(op, dev, "out", out, up_gate, coded=product is not None)
    args, consts = (out, up_gate, rows, F, abs_max), abs_max_consts(op, abs_max) | NOT_AGAIN
    consts |= {"GELU": int(gelu), "CODED": int(product is not None)}
    if fp8 is None and product is None:
        dev.launch(FORWARD, grid(out.size, out.dtype.itemsize), THREADS, args, consts=consts)
    else:
        consts |= fp8_consts(op, fp8, rows, F)
        blocks = octet_tiles(op, rows, F)
        args += fp8_args(fp8) + product_args(product)
        dev.launch(FORWARD_FP8, blocks, THREADS, args, consts=consts)


def backward(
    dev: Device,
    d_up_gate: Tensor | None,
    d_out: Tensor | ProductCodes,
    up_gate: Tensor | ProductCodes,
    *,
    gelu: bool = False,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
    out: Tensor | None = None,
    out_fp8: Fp8Out | None = None,
) -> None:
    """The gradient of forward: d_up = d_out * silu(gate), d_gate = d_out * up * silu'(gate).

    With gelu of GeGLU.

    If forward's result was not kept, it can be written again, without another look at up_gate.

    Args (T is BF16 or F32):
        d_up_gate  out    T (*S, 2F)   [d_up | d_gate]; may be up_gate itself; or None with fp8, or
                                       if only abs_max is wanted
        d_out      in     T (*S, F)     or with up_gate the codes of a product (rows, F)
        up_gate    in     T (*S, 2F)    or codes, as in forward; then there is no `out`
        abs_max    inout  F32 (1,)     or None; raised to the largest |d_up_gate|
        fp8        out    (rows, 2F)   or None; d_up_gate in FP8, rows and F multiples of 4, 16
        out        out    T (*S, F)    or None; the bits of forward's out; may be d_out itself
        out_fp8    out    (rows, F)    or None, if out is; those of its fp8, E4M3, only transposed
    """
    op = "swiglu.backward"
    (product, up_gate), (d_product, d_out) = (
        _taken(op, name, x) for name, x in (("up_gate", up_gate), ("d_out", d_out))
    )
    coded = product is not None
    if coded != (d_product is not None):
        raise TypeError(f"{op}: d_out and up_gate must both be codes of products, or none")
    if coded:
        rows, F = _check(op, dev, "d_out", None, up_gate, coded=True)
        expect(op, "d_out", d_out, None, (rows, F))
    else:
        rows, F = _check(op, dev, "d_out", d_out, up_gate)
    dtype = BF16 if coded else up_gate.dtype
    if d_up_gate is not None or (fp8 is None and abs_max is None):
        expect(op, "d_up_gate", d_up_gate, dtype, up_gate.shape)
    tensors, consts = (d_up_gate, d_out, up_gate), abs_max_consts(op, abs_max)
    consts |= again_consts(op, out, out_fp8, dtype, d_out.shape)
    consts |= {"GELU": int(gelu), "CODED": int(coded)}
    if fp8 is None and out_fp8 is None and not coded:
        blocks = grid(d_out.size, d_out.dtype.itemsize)
        args = (*tensors, rows, F, abs_max, out)
        dev.launch(BACKWARD, blocks, THREADS, args, consts=consts)
    else:
        consts |= fp8_consts(op, fp8, rows, 2 * F)
        blocks = octet_tiles(op, rows, F)
        args = (*tensors, rows, turned((rows, F))[1], F, abs_max)
        args += fp8_args(fp8) + again_args(out, out_fp8)
        args += (product.scale if coded else None, *product_args(d_product))
        dev.launch(BACKWARD_FP8, blocks, THREADS, args, consts=consts)


def _taken(op: str, name: str, x: Tensor | ProductCodes) -> tuple[ProductCodes | None, Tensor]:
    """The record of codes, if x is one, and the tensor."""
    if not isinstance(x, ProductCodes):
        return None, x
    expect_product(op, name, x)
    return x, x.codes


def _check(
    op: str,
    dev: Device,
    name: str,
    narrow: Tensor | None,
    up_gate: Tensor,
    *,
    coded: bool = False,
    wide: str = "up_gate",
) -> tuple[int, int]:
    """rows and F. narrow: the tensor (*S, F), None if there is none. coded: up_gate are codes.
    name, wide: of the two."""
    if coded:
        expect(op, "up_gate", up_gate, E4M3, up_gate.shape)
        rows, F = up_gate.shape[0], up_gate.shape[-1] // 2
        if narrow is not None:
            expect(op, name, narrow, BF16, (rows, F))
        return rows, F
    if narrow is None:
        expect_float(op, "up_gate", up_gate)
        return up_gate.size // up_gate.shape[-1], up_gate.shape[-1] // 2
    expect_float(op, name, narrow)
    F = narrow.shape[-1]
    expect_multiple(op, dev, "F", F, VECTOR_BYTES // narrow.dtype.itemsize)
    expect(op, wide, up_gate, narrow.dtype, (*narrow.shape[:-1], 2 * F))
    return narrow.size // F, F


# -- The gradient where rows have weights: of experts

WEIGHTED_BACKWARD = Kernel(
    "pointwise/swiglu.cu",
    "weighted_swiglu_backward",
    args="T*? d_up_gate, f32* d_weights, T*? weighted, const T* d_out, const T* up_gate, "
    f"const i32* order, const f32* weights, i64 rows, i32 F, inout f32*? abs_max, {FP8_ARGS}",
)


def weighted_backward(
    dev: Device,
    d_up_gate: Tensor | None,
    d_weights: Tensor,
    d_out: Tensor,
    up_gate: Tensor,
    order: Tensor,
    weights: Tensor,
    weighted: Tensor | None = None,
    *,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
) -> None:
    """`expert_rows.combine_backward`, y = forward's result, then `backward`: their bits, in one
    launch, which makes forward's result again.

    Args (T is BF16 or F32; rows are sorted by expert):
        d_up_gate  out    T   (rows, 2F)    F a multiple of 8, with fp8 of 16; may be up_gate; or
                                            None, with fp8
        d_weights  out    F32 (S, top_k)    d_out . forward's result; rows = S * top_k
        d_out      in     T   (rows, F)     without weights
        up_gate    in     T   (rows, 2F)    as of forward
        order      in     I32 (rows,)       as `expert_rows.sort_rows` has it
        weights    in     F32 (S, top_k)
        weighted   out    T   (rows, F)     weights * forward's result; or None
        abs_max    inout  F32 (1,)          or None; raised to the largest |d_up_gate|
        fp8        out    (rows, 2F)        or None; d_up_gate's codes, not transposed

    Cost:    d_out and up_gate read, d_up_gate, weighted and codes written once.
    Raises: as backward.
    """
    op = "swiglu.weighted_backward"
    rows, F = _check(op, dev, "d_out", d_out, up_gate)
    expect_multiple(op, dev, "F", F, 8)
    if d_up_gate is None and fp8 is None:
        raise TypeError(f"{op}: d_up_gate or fp8 must be given, both are None")
    for name, tensor, width in (("d_up_gate", d_up_gate, 2 * F), ("weighted", weighted, F)):
        if tensor is not None:
            expect(op, name, tensor, d_out.dtype, (rows, width))
    expect(op, "order", order, I32, (rows,))
    for name, tensor in (("weights", weights), ("d_weights", d_weights)):
        expect(op, name, tensor, F32, weights.shape)
    if weights.size != rows:
        raise ValueError(f"{op}: weights must be of {rows} rows, got {weights.shape}")
    consts = abs_max_consts(op, abs_max) | fp8_consts(op, fp8, rows, 2 * F)
    if consts["TRANSPOSED"]:
        raise ValueError(f"{op}: fp8.transposed must be None")
    consts |= NOT_AGAIN | {"GELU": 0, "CODED": 0}
    args = (d_up_gate, d_weights, weighted, d_out, up_gate, order, weights, rows, F, abs_max)
    blocks = ceil_div(rows * WARP, THREADS)
    dev.launch(WEIGHTED_BACKWARD, blocks, THREADS, (*args, *fp8_args(fp8)), consts=consts)


# -- The gated activation of pairs that are cut off: gpt-oss's, beside its formula in arch/experts

CLAMPED_FORWARD = Kernel(
    "pointwise/swiglu.cu",
    "clamped_swiglu_forward",
    args="T* out, const T* pairs, i64 n, f32 alpha, f32 limit",
)
CLAMPED_BACKWARD = Kernel(
    "pointwise/swiglu.cu",
    "clamped_swiglu_backward",
    args="T* d_pairs, const T* d_out, const T* pairs, i64 n, f32 alpha, f32 limit",
)


def clamped_forward(dev: Device, out: Tensor, pairs: Tensor, alpha: float, limit: float) -> None:
    """out = (u + 1) * g * sigmoid(alpha * g), with g at most limit, u from -limit to limit.

    Args (T is BF16 or F32):
        out    out  T (*S, F)    F a multiple of 16 bytes
        pairs  in   T (*S, 2F)   g0 u0 g1 u1 ...; NaN stays NaN
    """
    _check("clamped_swiglu.forward", dev, "out", out, pairs, wide="pairs")
    args = (out, pairs, out.size, alpha, limit)
    dev.launch(CLAMPED_FORWARD, _blocks(out), THREADS, args)


def clamped_backward(
    dev: Device, d_pairs: Tensor, d_out: Tensor, pairs: Tensor, alpha: float, limit: float
) -> None:
    """The gradient of clamped_forward, which is 0 of what is cut off. Args as clamped_forward's,
    and d_pairs out, as pairs, which it may be; d_out in, as out."""
    op = "clamped_swiglu.backward"
    _check(op, dev, "d_out", d_out, pairs, wide="pairs")
    expect(op, "d_pairs", d_pairs, pairs.dtype, pairs.shape)
    args = (d_pairs, d_out, pairs, d_out.size, alpha, limit)
    dev.launch(CLAMPED_BACKWARD, _blocks(d_out), THREADS, args)


def _blocks(narrow: Tensor) -> int:
    return ceil_div(narrow.nbytes, VECTOR_BYTES * THREADS)
