"""Kernel arguments as cuLaunchKernel takes them: an array of pointers to typed values.

A matrix that the copy engine of Hopper and later GPUs reads is an argument that the driver makes.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

from llmq.base.tensor import Tensor
from llmq.runtime.kernel import Kernel

# One 8-byte slot per argument, whatever its type. Neither CuPy nor the driver converts values.
_POINTER = "Q"
_SLOT = {"i32": "i4x", "u32": "I4x", "i64": "q", "f32": "f4x", "f64": "d"}
MAP_BYTES = 128
_MAP = f"{MAP_BYTES}s"

EncodeMap = Callable[[Tensor, int], bytes]
"""The TensorMap of a matrix, MAP_BYTES, for copies of boxes of so many of its rows."""


class Arguments:
    """A reusable place for the arguments of one kernel; not for use by two threads.

    address: of the pointer array, the kernelParams of cuLaunchKernel. It stays the same.
    """

    def __init__(self, kernel: Kernel, encode_map: EncodeMap | None = None):
        """encode_map: for kernels that take maps."""
        slots = [
            _MAP if a.box_rows else _POINTER if a.pointer else _SLOT[a.type]
            for a in kernel.declared
        ]
        starts = [struct.calcsize("<" + "".join(slots[:i])) for i in range(len(slots) + 1)]
        self._values = (ctypes.c_uint64 * (starts[-1] // 8))()
        self._pack_into = struct.Struct("<" + "".join(slots)).pack_into
        first = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * len(slots))(*(first + s for s in starts[:-1]))
        self.address = ctypes.addressof(self._pointers)
        self._maps = [(i, a.box_rows) for i, a in enumerate(kernel.declared) if a.box_rows]
        self._encode_map = encode_map

    def set(self, args: tuple) -> None:
        """Store the values: tensors by address or as their maps, None as zeros.

        They fit: Kernel.bind was called.
        """
        plain = [a.ptr if isinstance(a, Tensor) else 0 if a is None else a for a in args]
        for i, rows in self._maps:
            plain[i] = b"" if args[i] is None else self._encode_map(args[i], rows)
        self._pack_into(self._values, 0, *plain)


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
