"""cuBLASLt's description of a product: which matrices, in which formats, with what scales."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmq.base.dtypes import BF16, E4M3, E5M2, F32
from llmq.runtime.kernel import POINTER_ALIGN
from llmq.runtime.product import Algorithm, Product
from llmq.runtime.tuning import Unsupported

COMPUTE_32F = 68  # cublasComputeType_t: products summed in F32, and no TF32 for F32 operands
CUDA_TYPES = {F32: 0, BF16: 14, E4M3: 28, E5M2: 29}  # cudaDataType_t


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
    """Free the library's descriptors."""
    for layout in set(plan.layouts):
        lt.matrix_layout_destroy(layout)
    lt.matmul_desc_destroy(plan.desc)


def set_attribute(lt: Any, kind: str, handle: int, name: int, value: Any) -> None:
    """kind: of the handle, "matmul_desc", "matmul_preference" or "matrix_layout"."""
    buffer = np.array([value], getattr(lt, f"get_{kind}_attribute_dtype")(name))
    getattr(lt, f"{kind}_set_attribute")(handle, name, buffer.ctypes.data, buffer.nbytes)
