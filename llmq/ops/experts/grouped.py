"""Grouped products: rows sorted by expert, multiplied with the matrix of their expert.

The host does not know how many rows an expert has. Shapes, launches and plans are the same for
every routing, and blocks find their tiles on the device.
"""

from llmq.base.dtypes import E4M3_HALF, FP8
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.common import expect_scales
from llmq.runtime.cost import product_cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

TILE, THREADS = 128, 128  # rows and columns of a block's tile of out
STAGES, STAGE_BYTES = 3, 2 * TILE * 64
BLOCKS = 2  # thread blocks per multiprocessor


def _product(w: str, **types: str) -> Kernel:
    return Kernel(
        "experts/grouped.cu",
        "grouped_product",
        f"out T[R,N] out, A[R,K] x, B[E,{w}] w, f32[1]? scale_x, f32[1]? scale_w, T[E,N]? bias, "
        "T[R,N]? addend, i32[E+1]? starts, i32 R, i32 N, i32 K, i32 E",
        gpu="N % vector_T, K % vector_A",
        **types,
    )


# The same entry has separate declarations for transposed matrices and for codes.
PRODUCT, TRANSPOSED = _product("K,N"), _product("N,K")
CODES = _product("N,K", types="T=bf16, A=e4m3|e4m3_half|e5m2, B=e4m3|e4m3_half|e5m2")
GRADIENT = Kernel(
    "experts/grouped.cu",
    "grouped_gradient",
    "inout G[E,N,K] d_w, T[R,N] d_y, T[R,K] x, i32[16] scalars, i32[E+1] starts, i32 R, i32 N, "
    "i32 K, i32 E, i32 accumulate, u32 salt",
    gpu="N % vector_T, K % vector_T",
)


def grouped_matmul(
    dev: Device,
    out: Tensor,
    x: Tensor,
    w: Tensor,
    starts: Tensor | None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    *,
    trans_b: bool = False,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    half: bool = False,
) -> None:
    """out[r] = x[r] @ op(w[e]) [+ bias[e]] [+ addend[r]], r in [starts[e], starts[e + 1]).

    Sums are F32, rounded once. Products of codes are summed in groups of 64, and the sum is
    multiplied by scale_x * scale_w. half: True if sums of 64 products of E4M3_HALF are in half
    precision, rounded after 32 and after 64 products.

    w: (E, K, N), or (E, N, K) with trans_b. Dtypes: out, x and w are equal, or x and w are fp8
    codes with scales and trans_b, and out is BF16. starts: ascending from 0 to R, possibly equal;
    None if E = 1. addend: may be out.

    Cost:    2 R N K FLOPs; an expert's matrix is read once for each 128 of the expert's rows.
    """
    op, codes = "grouped_matmul", x.dtype in FP8
    if codes and not trans_b:
        raise ValueError(f"{op}: codes of w must be (E, N, K), with trans_b")
    expect_scales(op, x, w, scale_x, scale_w)
    if not codes and not (out.dtype is x.dtype is w.dtype):
        given = ", ".join(each.dtype.label for each in (out, x, w))
        raise TypeError(f"{op}: out, x and w must have one dtype, got {given}")
    if half and not x.dtype is w.dtype is E4M3_HALF:
        raise TypeError(f"{op}: half needs operands in {E4M3_HALF.label}, got {x.dtype.label}")
    kernel = CODES if codes else TRANSPOSED if trans_b else PRODUCT
    R, N, K, E = kernel.dims(out=out, x=x, w=w)
    if starts is None and E != 1:
        raise TypeError(f"{op}: starts must be given for {E} experts")
    tiles = (ceil_div(R, TILE) + E) * ceil_div(N, TILE)  # most tiles of any routing
    dev.launch(
        kernel,
        min(tiles, BLOCKS // (1 + codes) * dev.spec.num_sms),
        2 * THREADS if codes else THREADS,
        (out, x, w, scale_x, scale_w, bias, addend, starts, R, N, K, E),
        consts={"STAGES": STAGES, "TRANS_B": int(trans_b), "HALF": int(half)},
        smem=STAGES * STAGE_BYTES,
        cost=product_cost(
            (R, N, K),
            x.dtype,
            out.dtype,
            epilogue="grouped",
            trans_b=trans_b,
            addend=addend is not None,
            half=half,
        ),
    )


def grouped_gradient(dev: Device, d_w: Accumulator, d_y: Tensor, x: Tensor, starts: Tensor) -> None:
    """d_w[e] (N, K) = or += d_y^T @ x over the rows of expert e.

    An expert without rows gets 0, or keeps d_w if it accumulates. Sums are F32 and rounded to d_w's
    dtype before the addition, which rounds a BF16 d_w stochastically.

    starts: see grouped_matmul.

    Cost:    2 R N K FLOPs; d_w written once, and read once if it accumulates.
    """
    R, N, K = GRADIENT.dims(d_y=d_y, x=x)
    E = starts.size - 1
    tensor, accumulate, scalars, salt = d_w
    dev.launch(
        GRADIENT,
        E * ceil_div(N, TILE) * ceil_div(K, TILE),
        THREADS,
        (tensor, d_y, x, scalars, starts, R, N, K, E, int(accumulate), salt),
        consts={"STAGES": STAGES},
        smem=STAGES * STAGE_BYTES,
        cost=product_cost(
            (N, K, R),
            x.dtype,
            tensor.dtype,
            epilogue="grouped",
            trans_a=True,
            accumulate=accumulate,
        ),
    )
