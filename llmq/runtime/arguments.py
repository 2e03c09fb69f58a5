"""Kernel arguments as cuLaunchKernel takes them: an array of pointers to typed values."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

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
