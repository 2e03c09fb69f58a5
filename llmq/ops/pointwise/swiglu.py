"""SwiGLU: up * silu(gate), the activation of Llama- and Qwen-class MLPs; and GeGLU, Gemma's."""

from dataclasses import replace

from llmq.base.operand import Fp8Out, ProductCodes, turned
from llmq.base.tensor import Tensor
from llmq.ops.common import (
    NOT_AGAIN,
    PRODUCT_ARGS,
    VECTOR_BYTES,
    WARP,
    abs_max_consts,
    again_args,
    again_consts,
    declared_again,
    declared_fp8,
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
    "out T[*rows,F] out, T[*rows,2*F] up_gate, i64 rows, i32 F, inout f32[1]? abs_max",
    gpu="F % vector_T",
    programmatic=True,
)
BACKWARD = Kernel(
    "pointwise/swiglu.cu",
    "swiglu_backward",
    "out T[*rows,2*F]? d_up_gate, T[*rows,F] d_out, T[*rows,2*F] up_gate, i64 rows, i32 F, "
    "inout f32[1]? abs_max, out T[*rows,F]? out",
    gpu="F % vector_T",
)
FORWARD_FP8 = Kernel(
    "pointwise/swiglu.cu",
    "swiglu_forward_fp8",
    "out T[*rows,F]? out, U[*rows,2*F] up_gate, i64 rows, i32 F, inout f32[1]? abs_max, "
    f"{declared_fp8('rows', 'F')}, {PRODUCT_ARGS}",
    where="rows % 4, F % 16",
)
FORWARD_CODED = replace(FORWARD_FP8, types="T=bf16, U=e4m3")
BACKWARD_FP8 = Kernel(
    "pointwise/swiglu.cu",
    "swiglu_backward_fp8",
    "out T[*rows,2*F]? d_up_gate, D[*rows,F] d_out, U[*rows,2*F] up_gate, i64 rows, i64 turned, "
    f"i32 F, inout f32[1]? abs_max, {declared_fp8('rows', '2*F')}, {declared_again('rows', 'F')}, "
    f"f32[1]? up_scale, {PRODUCT_ARGS}",
    where="rows % 4, F % 16",
)
BACKWARD_CODED = replace(BACKWARD_FP8, types="T=bf16, U=e4m3, D=e4m3|e5m2")


def grid(size: int, itemsize: int) -> int:
    """Number of thread blocks for `size` output elements: a thread has VECTORS vectors of 16
    bytes."""
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
    """out = up * gate * sigmoid(gate), or with gelu up * gelu(gate), GeGLU's tanh approximation.

    Computed in F32. up_gate: [up | gate] along the last dimension, or a product's E4M3 codes, with
    BF16 out. fp8: gets the FP8 codes of out, and then out may be None; rows must be a multiple of
    4, F of 16. abs_max: raised to the largest |out|.

    Cost:    one launch; fp8 adds only the bytes of the codes.
    """
    op = "swiglu.forward"
    if out is None and fp8 is None:
        raise TypeError(f"{op}: out or fp8 must be given, both are None")
    product, up_gate = _codes_and_tensor(up_gate)
    kernel = FORWARD_CODED if product else FORWARD_FP8 if fp8 else FORWARD
    rows, F = kernel.dims(up_gate=up_gate)
    args, consts = (out, up_gate, rows, F, abs_max), abs_max_consts(abs_max) | NOT_AGAIN
    consts |= {"GELU": int(gelu), "CODED": int(product is not None)}
    if kernel is FORWARD:
        dev.launch(kernel, grid(out.size, out.dtype.itemsize), THREADS, args, consts=consts)
        return
    if product is None and out is not None:
        expect(op, "out", out, up_gate.dtype, out.shape)
    consts |= fp8_consts(op, fp8, rows, F)
    args += fp8_args(fp8) + product_args(product)
    dev.launch(kernel, octet_tiles(rows, F), THREADS, args, consts=consts)


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
    """d_up = d_out * silu(gate), d_gate = d_out * up * silu'(gate); with gelu, GeGLU's gradients.

    up_gate, d_out: both tensors, or both codes of products, and then out must be None. d_up_gate:
    [d_up | d_gate]; may be up_gate. fp8, abs_max: get d_up_gate's codes and largest |value|, as in
    forward; with one of these d_up_gate may be None. out, out_fp8: get forward's output again, bit
    for bit, in the same launch. out may be d_out. out_fp8 gets transposed E4M3 codes only.
    """
    op = "swiglu.backward"
    (product, up_gate), (d_product, d_out) = map(_codes_and_tensor, (up_gate, d_out))
    coded = product is not None
    if coded != (d_product is not None):
        raise TypeError(f"{op}: d_out and up_gate must both be codes of products, or none")
    if d_up_gate is None and fp8 is None and abs_max is None:
        raise TypeError(f"{op}: d_up_gate, fp8 or abs_max must be given, all are None")
    kernel = BACKWARD_CODED if coded else BACKWARD_FP8 if fp8 or out_fp8 else BACKWARD
    rows, F = kernel.dims(up_gate=up_gate)
    tensors, consts = (d_up_gate, d_out, up_gate), abs_max_consts(abs_max)
    consts |= again_consts(op, out, out_fp8) | {"GELU": int(gelu), "CODED": int(coded)}
    if kernel is BACKWARD:
        blocks = grid(d_out.size, d_out.dtype.itemsize)
        args = (*tensors, rows, F, abs_max, out)
        dev.launch(kernel, blocks, THREADS, args, consts=consts)
        return
    for name, tensor in (("d_up_gate", d_up_gate), ("d_out", d_out), ("out", out)):
        if not coded and tensor is not None:
            expect(op, name, tensor, up_gate.dtype, tensor.shape)
    consts |= fp8_consts(op, fp8, rows, 2 * F)
    args = (*tensors, rows, turned((rows, F))[1], F, abs_max)
    args += fp8_args(fp8) + again_args(out, out_fp8)
    args += (product.scale if coded else None, *product_args(d_product))
    dev.launch(kernel, octet_tiles(rows, F), THREADS, args, consts=consts)


def _codes_and_tensor(x: Tensor | ProductCodes) -> tuple[ProductCodes | None, Tensor]:
    """(record of a product's codes or None, tensor that the kernel reads)."""
    return (x, x.codes) if isinstance(x, ProductCodes) else (None, x)


# -- SwiGLU's gradient with a weight for each row, for experts

WEIGHTED_BACKWARD = Kernel(
    "pointwise/swiglu.cu",
    "weighted_swiglu_backward",
    "out T[rows,2*F]? d_up_gate, out f32[S,top_k] d_weights, out T[rows,F]? weighted, "
    "T[rows,F] d_out, T[rows,2*F] up_gate, i32[rows] order, f32[S,top_k] weights, i64 rows, i32 F, "
    f"inout f32[1]? abs_max, {declared_fp8('rows', '2*F')}",
    where="S*top_k == rows",
    gpu="F % 8",
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
    gelu: bool = False,
    abs_max: Tensor | None = None,
    fp8: Fp8Out | None = None,
) -> None:
    """`expert_rows.combine_backward` of y = forward's output, and `backward`, in one launch.

    Results equal the results of both calls bit for bit. The kernel computes y again. Rows are
    sorted by expert; order: of `expert_rows.sort_rows`. d_out: gradient of the weighted rows.
    d_weights: the dot product of d_out and y in each row. weighted: weights * y. d_up_gate may be
    up_gate. With fp8, which gets d_up_gate's codes (not transposed), d_up_gate may be None. abs_max
    is raised to the largest |d_up_gate|.

    Cost:    d_out and up_gate read, d_up_gate, weighted and codes written once.
    """
    op = "swiglu.weighted_backward"
    if d_up_gate is None and fp8 is None:
        raise TypeError(f"{op}: d_up_gate or fp8 must be given, both are None")
    rows, F = WEIGHTED_BACKWARD.dims(d_out=d_out)
    consts = abs_max_consts(abs_max) | fp8_consts(op, fp8, rows, 2 * F)
    if consts["TRANSPOSED"]:
        raise ValueError(f"{op}: fp8.transposed must be None")
    consts |= NOT_AGAIN | {"GELU": int(gelu), "CODED": 0}
    args = (d_up_gate, d_weights, weighted, d_out, up_gate, order, weights, rows, F, abs_max)
    blocks = ceil_div(rows * WARP, THREADS)
    dev.launch(WEIGHTED_BACKWARD, blocks, THREADS, (*args, *fp8_args(fp8)), consts=consts)


# -- gpt-oss's gated activation of clamped pairs

CLAMPED_FORWARD = Kernel(
    "pointwise/swiglu.cu",
    "clamped_swiglu_forward",
    "out T[*rows,F] out, T[*rows,2*F] pairs, i64 n, f32 alpha, f32 limit",
    gpu="F % vector_T",
)
CLAMPED_BACKWARD = Kernel(
    "pointwise/swiglu.cu",
    "clamped_swiglu_backward",
    "out T[*rows,2*F] d_pairs, T[*rows,F] d_out, T[*rows,2*F] pairs, i64 n, f32 alpha, f32 limit",
    gpu="F % vector_T",
)


def clamped_forward(dev: Device, out: Tensor, pairs: Tensor, alpha: float, limit: float) -> None:
    """out = (u + 1) * g * sigmoid(alpha * g), with g clamped to at most limit, u to +-limit.

    pairs: g0 u0 g1 u1 ... along the last dimension. NaN stays NaN.
    """
    blocks = ceil_div(out.nbytes, VECTOR_BYTES * THREADS)
    dev.launch(CLAMPED_FORWARD, blocks, THREADS, (out, pairs, out.size, alpha, limit))


def clamped_backward(
    dev: Device, d_pairs: Tensor, d_out: Tensor, pairs: Tensor, alpha: float, limit: float
) -> None:
    """Gradient of clamped_forward, 0 for clamped elements. d_pairs may be pairs."""
    args = (d_pairs, d_out, pairs, d_out.size, alpha, limit)
    dev.launch(CLAMPED_BACKWARD, ceil_div(d_out.nbytes, VECTOR_BYTES * THREADS), THREADS, args)
