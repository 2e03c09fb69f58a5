"""Descriptions of matrices for the copy engine of Hopper and later GPUs, made by the driver."""

from __future__ import annotations

import ctypes
from typing import Any

from llmq.base.tensor import Tensor
from llmq.runtime.arguments import MAP_BYTES

ROW_BYTES = 128  # of a box: what one swizzle spans


def tensor_map(driver: Any, tensor: Tensor, box_rows: int) -> bytes:
    """The CUtensorMap of a row-major matrix: boxes of so many rows of 128 bytes, swizzled as
    cu/ptx.cuh says; zeros stand for what lies outside of the matrix.

    driver: NVIDIA's binding. Raises RuntimeError where the driver refuses.
    """
    rows, columns = tensor.shape
    itemsize = tensor.dtype.itemsize
    types = driver.CUtensorMapDataType
    status, found = driver.cuTensorMapEncodeTiled(
        # Elements are moved, not computed with.
        {
            1: types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            2: types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        }[itemsize],
        2,
        tensor.ptr,
        [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(columns * itemsize)],
        [driver.cuuint32_t(ROW_BYTES // itemsize), driver.cuuint32_t(box_rows)],
        [driver.cuuint32_t(1)] * 2,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled: {status.name} for {tensor!r}")
    return ctypes.string_at(int(found.getPtr()), MAP_BYTES)
