"""Kernel arguments as cuLaunchKernel takes them: an array of pointers to typed values."""

from __future__ import annotations

import ctypes
import struct

from llmq.base.tensor import Tensor
from llmq.runtime.kernel import Kernel

# One 8-byte slot per argument, whatever its type. Neither CuPy nor the driver converts values.
_POINTER = "Q"
_SLOT = {"i32": "i4x", "u32": "I4x", "i64": "q", "f32": "f4x", "f64": "d"}


class Arguments:
    """A reusable place for the arguments of one kernel; not for use by two threads.

    address: of the pointer array, the kernelParams of cuLaunchKernel. It stays the same.
    """

    def __init__(self, kernel: Kernel):
        slots = [_POINTER if a.pointer else _SLOT[a.type] for a in kernel.declared]
        self._values = (ctypes.c_uint64 * len(slots))()
        self._pack_into = struct.Struct("<" + "".join(slots)).pack_into
        first = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * len(slots))(*(first + 8 * i for i in range(len(slots))))
        self.address = ctypes.addressof(self._pointers)

    def set(self, args: tuple) -> None:
        """Store the values: tensors by address, None as null. They fit: Kernel.bind was called."""
        plain = [a.ptr if isinstance(a, Tensor) else 0 if a is None else a for a in args]
        self._pack_into(self._values, 0, *plain)
