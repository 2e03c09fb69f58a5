"""One matrix product for cuBLASLt: what tells it from others, its tensors, how it is computed,
and cuBLASLt's description of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from llmq.base.dtypes import BF16, E4M3, E4M3_HALF, E5M2, F32, FP8, U8, DType
from llmq.base.tensor import POINTER_ALIGN, Tensor
from llmq.runtime.kernel import ceil_div
from llmq.runtime.tuning import DEVICE_TO_HOST, HOST_TO_DEVICE, Unsupported


class Product(NamedTuple):
    """Everything that tells one plan from another; all matrices are contiguous."""

    M: int
    N: int
    K: int
    trans_a: bool
    trans_b: bool
    a: DType
    b: DType
    out: DType
    bias: bool
    accumulate: bool
    workspace: int  # bytes that the library may use
    fast_accumulation: bool = False  # may be used; of FP8 only
    addend: bool = False  # another matrix than out is added; not to codes
    block_scaled: bool = False  # of FP8, by scales of blocks that are one; see below
    batch: int = 1  # products of these sizes, whose matrices lie one after another

    @property
    def fp8(self) -> bool:
        return self.a in FP8

    @property
    def adds(self) -> bool:
        return self.accumulate or self.addend

    @property
    def makes_codes(self) -> bool:
        return self.out in FP8

    @property
    def layouts(self) -> tuple[tuple[int, int, int], ...]:
        """Column-major (rows, columns, leading dimension) of b, a and out, in cuBLASLt's order."""
        b = (self.K, self.N) if self.trans_b else (self.N, self.K)
        a = (self.M, self.K) if self.trans_a else (self.K, self.M)
        return tuple((rows, columns, rows) for rows, columns in (b, a, (self.N, self.M)))

    def __str__(self) -> str:
        flags = "".join("t" if flag else "n" for flag in (self.trans_a, self.trans_b))
        operands = self.a.name if self.a == self.b else f"{self.a.name}*{self.b.name}"
        text = f"{self.M}x{self.N}x{self.K} {flags} {operands}->{self.out.name}"
        text += (" bias" if self.bias else "") + (" accumulate" if self.accumulate else "")
        text += (" addend" if self.addend else "") + (" fast" if self.fast_accumulation else "")
        text += " block-scaled" if self.block_scaled else ""
        text += f" batch of {self.batch}" if self.batch > 1 else ""
        return f"{text}, {self.workspace} bytes of workspace"


class Operands(NamedTuple):
    """The tensors of one call."""

    out: Tensor
    a: Tensor
    b: Tensor
    bias: Tensor | None
    addend: Tensor | None
    workspace: Tensor
    scale_a: Tensor | None = None  # of FP8 operands
    scale_b: Tensor | None = None
    factor: Tensor | None = None  # of results that are codes
    largest: Tensor | None = None
    scalars: Tensor | None = None  # alpha and beta, of block-scaled products
    alpha: float = 1.0  # factors of the product, and of what is added, of all others
    beta: float = 1.0


class Algorithm(NamedTuple):
    """How a product is computed: algorithm uint8 (64,), and whether it accumulates fast (FP8)."""

    algorithm: np.ndarray
    fast: bool

    def tobytes(self) -> bytes:
        return self.algorithm.tobytes() + bytes([self.fast])

    @classmethod
    def frombytes(cls, content: bytes) -> Algorithm:
        return cls(np.frombuffer(content[:-1], np.uint8), bool(content[-1]))


COMPUTE_32F = 68  # cublasComputeType_t: products summed in F32, and no TF32 for F32 operands
CUDA_TYPES = {F32: 0, BF16: 14, E4M3: 28, E4M3_HALF: 28, E5M2: 29}  # cudaDataType_t


class Plan:
    """cuBLASLt's description of one product, and how it is computed."""

    __slots__ = ("address", "choice", "desc", "layouts", "product")

    def __init__(self, product: Product, desc: int, layouts: tuple[int, ...]):
        self.product = product
        self.desc = desc
        self.layouts = layouts  # of b, a, what is added, out
        self.choice: Algorithm | None = None
        self.address = np.zeros(1, np.int64)  # on its way into desc


def describe(lt: Any, product: Product) -> Plan:
    """Raises Unsupported where the library, nvmath.bindings.cublasLt, is too old for it."""
    attribute = lt.MatmulDescAttribute
    # The first operand of out^T = op(b)^T @ op(a)^T is b.
    values = {attribute.TRANSA: product.trans_b, attribute.TRANSB: product.trans_a}
    if product.bias:
        values[attribute.EPILOGUE] = lt.Epilogue.BIAS
        # Not an address yet: the heuristic reads from it how the bias will be aligned.
        values[attribute.BIAS_POINTER] = POINTER_ALIGN
    if product.fp8:
        # Not addresses yet. One scale a tensor is the default mode.
        values[attribute.A_SCALE_POINTER] = values[attribute.B_SCALE_POINTER] = POINTER_ALIGN
        if product.bias:
            values[attribute.BIAS_DATA_TYPE] = CUDA_TYPES[BF16]
    if product.makes_codes:
        values[attribute.D_SCALE_POINTER] = values[attribute.AMAX_D_POINTER] = POINTER_ALIGN
    if product.block_scaled:
        values |= _block_scaling(lt)
    desc = lt.matmul_desc_create(COMPUTE_32F, CUDA_TYPES[F32])
    try:
        for name, value in values.items():
            set_attribute(lt, "matmul_desc", desc, name, value)
    except lt.cuBLASLtError as error:
        lt.matmul_desc_destroy(desc)
        raise Unsupported(f"cuBLASLt {lt.get_version()} cannot describe {product}") from error
    dtypes = (product.b, product.a, product.out)
    layouts = tuple(
        lt.matrix_layout_create(CUDA_TYPES[dtype], *layout)
        for dtype, layout in zip(dtypes, product.layouts, strict=True)
    )
    if product.batch > 1:
        attribute = lt.MatrixLayoutAttribute
        for layout, (rows, columns, _) in zip(layouts, product.layouts, strict=True):
            set_attribute(lt, "matrix_layout", layout, attribute.BATCH_COUNT, product.batch)
            set_attribute(
                lt, "matrix_layout", layout, attribute.STRIDED_BATCH_OFFSET, rows * columns
            )
    # The addend lies as out does; codes, to which nothing is added, still need one in BF16.
    added = layouts[-1]
    if product.makes_codes:
        added = lt.matrix_layout_create(CUDA_TYPES[BF16], *product.layouts[-1])
    return Plan(product, desc, (*layouts[:2], added, layouts[-1]))


def _block_scaling(lt: Any) -> dict[int, int]:
    """Attributes of products with scales of blocks, whose factors alpha and beta are on the
    device."""
    if not hasattr(lt, "MatmulMatrixScale"):
        raise Unsupported("nvmath-python is older than block scales")
    attribute, mode = lt.MatmulDescAttribute, lt.MatmulMatrixScale.VEC32_UE8M0
    modes = dict.fromkeys((attribute.A_SCALE_MODE, attribute.B_SCALE_MODE), mode)
    return modes | {attribute.POINTER_MODE: lt.PointerMode.DEVICE}


def free(lt: Any, plan: Plan) -> None:
    for layout in set(plan.layouts):
        lt.matrix_layout_destroy(layout)
    lt.matmul_desc_destroy(plan.desc)


def set_attribute(lt: Any, kind: str, handle: int, name: int, value: Any) -> None:
    """kind: of the handle, "matmul_desc", "matmul_preference" or "matrix_layout"."""
    buffer = np.array([value], getattr(lt, f"get_{kind}_attribute_dtype")(name))
    getattr(lt, f"{kind}_set_attribute")(handle, name, buffer.ctypes.data, buffer.nbytes)


# -- Block-scaled products (MXFP8) of codes that have one scale a tensor: all block scales are one
#
# GeForce cards of Blackwell multiply block-scaled codes at twice the speed of others. The scale of
# a block of 32 codes along K is a byte, 2^(byte - 127), and cuBLASLt wants these bytes in tiles of
# 128 x 4. If all are alike, nothing but their number matters. The scales of the tensors are then
# the factor `alpha`, which has to be in device memory, and with it `beta`.

ONE = 127  # the byte of the scale 1
BLOCK = 32  # codes that share a scale
BETA = 4  # where beta is among the scalars, in numbers of F32: 16 bytes behind alpha
SCALARS = 8  # numbers of F32 that alpha and beta take
M, N, K = 144, 272, 160  # of the trial: its blocks of scales do not fill their tiles
TRIAL_BYTES = 1 << 20


def scales_bytes(rows: int, depth: int) -> int:
    """Bytes of the block scales of codes (rows, depth): whole tiles of 128 rows and 4 blocks."""
    return 128 * ceil_div(rows, 128) * 4 * ceil_div(depth, 4 * BLOCK)


def computes_right(
    cuda: Any, stream: int, workspace: Tensor, run: Callable[[Product, Operands], None]
) -> bool:
    """Whether a block-scaled product of small integers is what it must be, to the bit: with a beta
    of 0 whatever is in the result's memory, and with one of 1. Waits for the stream. workspace: U8,
    that of a product; what the trial needs lies at its start. run: enqueues."""
    if workspace.nbytes < 2 * TRIAL_BYTES:
        return False
    offset = 0

    def put(name: str, array: np.ndarray, dtype: DType) -> Tensor:
        nonlocal offset
        at = workspace.offset + offset
        tensor = Tensor(name, array.shape, dtype, workspace.storage, at)
        offset += 256 * ceil_div(tensor.nbytes, 256)
        cuda.memcpyAsync(tensor.ptr, array.ctypes.data, array.nbytes, HOST_TO_DEVICE, stream)
        cuda.streamSynchronize(stream)
        return tensor

    a, b = (_integers(shape, step) for shape, step in (((M, K), 5), ((N, K), 7)))
    codes = [put(name, x.astype(E4M3.numpy), E4M3) for name, x in (("a", a), ("b", b))]
    ones = np.full(max(scales_bytes(rows, K) for rows in (M, N)), ONE, np.uint8)
    scales = put("scales", ones, U8)
    out = put("out", np.full((M, N), np.nan, np.float32), F32)
    rest = workspace.rows(TRIAL_BYTES, workspace.nbytes)
    product = Product(
        M, N, K, False, True, E4M3, E4M3, F32, False, True, rest.nbytes, block_scaled=True
    )
    want = 0.25 * (a @ b.T)  # exact, in any order
    for beta, factor in ((0.0, 1), (1.0, 2)):
        both = np.zeros(SCALARS, np.float32)
        both[0], both[BETA] = 0.25, beta
        scalars = put("scalars", both, F32)
        run(product, Operands(out, *codes, None, None, rest, scales, scales, scalars=scalars))
        got = np.empty((M, N), np.float32)
        cuda.memcpyAsync(got.ctypes.data, out.ptr, out.nbytes, DEVICE_TO_HOST, stream)
        cuda.streamSynchronize(stream)
        if not np.array_equal(got, factor * want):
            return False
    return True


def _integers(shape: tuple[int, int], step: int) -> np.ndarray:
    """From -4 to 4, in an order that no row or column repeats soon."""
    rows, columns = np.indices(shape)
    return ((step * rows + 3 * columns + rows * columns // 11) % 9 - 4).astype(np.float32)
