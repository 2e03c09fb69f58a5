"""One matrix product by cuBLASLt: its key, tensors, algorithm and descriptors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from llmq.base.dtypes import BF16, E4M3, E4M3_HALF, E5M2, F32, FP8, U8, DType
from llmq.base.tensor import POINTER_ALIGN, Tensor
from llmq.runtime.kernel import ceil_div
from llmq.runtime.tuning import DEVICE_TO_HOST, HOST_TO_DEVICE, Unsupported


class Product(NamedTuple):
    """The key of a plan, that is a product's dtypes, sizes and options; all matrices are
    contiguous."""

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
    workspace: int  # bytes of the workspace that the library may use
    fast_accumulation: bool = False  # True if fast accumulation is allowed; only for FP8
    addend: bool = False  # True if a matrix other than out is added; never if out holds codes
    block_scaled: bool = False  # True for FP8 with block scales, all equal to 1 (see below)
    batch: int = 1  # number of equal products, whose matrices are adjacent

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
        """Return column-major (rows, columns, leading dimension) of b, a and out, in cuBLASLt's
        order."""
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
    """The tensors of one call of a product."""

    out: Tensor
    a: Tensor
    b: Tensor
    bias: Tensor | None
    addend: Tensor | None
    workspace: Tensor
    scale_a: Tensor | None = None  # scales of FP8 operands
    scale_b: Tensor | None = None
    factor: Tensor | None = None  # factor and largest are set if results are codes
    largest: Tensor | None = None
    scalars: Tensor | None = None  # alpha and beta of block-scaled products
    alpha: float = 1.0  # alpha and beta of other products are factors of product and addend
    beta: float = 1.0


class Algorithm(NamedTuple):
    """An algorithm of cuBLASLt, uint8 (64,); fast: True if an FP8 product accumulates fast."""

    algorithm: np.ndarray
    fast: bool

    def tobytes(self) -> bytes:
        return self.algorithm.tobytes() + bytes([self.fast])

    @classmethod
    def frombytes(cls, content: bytes) -> Algorithm:
        return cls(np.frombuffer(content[:-1], np.uint8), bool(content[-1]))


COMPUTE_32F = 68  # cublasComputeType_t: F32 sums, without TF32 for F32 operands
CUDA_TYPES = {F32: 0, BF16: 14, E4M3: 28, E4M3_HALF: 28, E5M2: 29}  # cudaDataType_t


class Plan:
    """cuBLASLt's descriptors of one product, and the chosen algorithm."""

    __slots__ = ("address", "choice", "desc", "layouts", "product")

    def __init__(self, product: Product, desc: int, layouts: tuple[int, ...]):
        self.product = product
        self.desc = desc
        self.layouts = layouts  # handles of the layouts of b, a, the addend and out
        self.choice: Algorithm | None = None
        # buffer through which pointer attributes of desc are set
        self.address = np.zeros(1, np.int64)


def describe(lt: Any, product: Product) -> Plan:
    """Return a product's plan, in which no algorithm is chosen yet. lt: the module
    nvmath.bindings.cublasLt. Raises Unsupported if the library is too old for the product."""
    attribute = lt.MatmulDescAttribute
    # In out^T = op(b)^T @ op(a)^T the first operand is b.
    values = {attribute.TRANSA: product.trans_b, attribute.TRANSB: product.trans_a}
    if product.bias:
        values[attribute.EPILOGUE] = lt.Epilogue.BIAS
        # The value is not a real address: the heuristic derives the bias's alignment from this
        # value.
        values[attribute.BIAS_POINTER] = POINTER_ALIGN
    if product.fp8:
        # The values are not real addresses. The default mode has one scale per tensor.
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
    # The addend has the layout of out; codes, to which nothing is added, still need a BF16 layout.
    added = layouts[-1]
    if product.makes_codes:
        added = lt.matrix_layout_create(CUDA_TYPES[BF16], *product.layouts[-1])
    return Plan(product, desc, (*layouts[:2], added, layouts[-1]))


def _block_scaling(lt: Any) -> dict[int, int]:
    """Return the attributes of block-scaled products, whose alpha and beta are in device memory."""
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
    """Set an attribute of a cuBLASLt object. kind: kind of the object: "matmul_desc",
    "matmul_preference" or "matrix_layout"."""
    buffer = np.array([value], getattr(lt, f"get_{kind}_attribute_dtype")(name))
    getattr(lt, f"{kind}_set_attribute")(handle, name, buffer.ctypes.data, buffer.nbytes)


# -- Block-scaled products (MXFP8) of codes with one scale a tensor: all block scales are one
# GeForce cards of Blackwell multiply block-scaled codes at twice the speed of other codes. The
# scale of a block of 32 codes along K is a byte, 2^(byte - 127), and cuBLASLt wants these bytes in
# tiles of 128 x 4. If all bytes are equal, only their number matters. The scales of the whole
# tensors then go into the factor `alpha`, which must be in device memory together with `beta`.

ONE = 127  # the byte that stands for the scale 1
BLOCK = 32  # number of codes that share a scale
BETA = 4  # index of beta among the F32 scalars: 16 bytes behind alpha
SCALARS = 8  # number of F32 values that hold alpha and beta
M, N, K = 144, 272, 160  # sizes of the test, whose scales do not fill their tiles
TRIAL_BYTES = 1 << 20


def scales_bytes(rows: int, depth: int) -> int:
    """Return the bytes of the block scales of codes (rows, depth), in whole tiles of 128 rows by 4
    blocks of codes."""
    return 128 * ceil_div(rows, 128) * 4 * ceil_div(depth, 4 * BLOCK)


def computes_right(
    cuda: Any, stream: int, workspace: Tensor, run: Callable[[Product, Operands], None]
) -> bool:
    """True if cuBLASLt multiplies small integers with block scales exactly, both when the result
    overwrites NaNs (beta 0) and when it is added (beta 1). The call waits for the stream.
    workspace: the workspace of a product, U8; the test's data lie at its start. run: function that
    enqueues a product."""
    if workspace.nbytes < 2 * TRIAL_BYTES:
        return False
    offset = 0

    def put(name: str, array: np.ndarray, dtype: DType) -> Tensor:
        nonlocal offset
        tensor = Tensor(name, array.shape, dtype, workspace.storage, workspace.offset + offset)
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
    want = 0.25 * (a @ b.T)  # exact in any order of summation
    for beta, factor in ((0.0, 1), (1.0, 2)):
        factors = np.zeros(SCALARS, np.float32)
        factors[0], factors[BETA] = 0.25, beta
        scalars = put("scalars", factors, F32)
        run(product, Operands(out, *codes, None, None, rest, scales, scales, scalars=scalars))
        got = np.empty((M, N), np.float32)
        cuda.memcpyAsync(got.ctypes.data, out.ptr, out.nbytes, DEVICE_TO_HOST, stream)
        cuda.streamSynchronize(stream)
        if not np.array_equal(got, factor * want):
            return False
    return True


def _integers(shape: tuple[int, int], step: int) -> np.ndarray:
    """Return integers from -4 to 4 as F32, in an order that does not soon repeat along rows or
    columns."""
    rows, columns = np.indices(shape)
    return ((step * rows + 3 * columns + rows * columns // 11) % 9 - 4).astype(np.float32)
