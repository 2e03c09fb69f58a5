"""Stream memory operations of the CUDA driver, which CuPy does not bind."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from llmq.runtime.cuda_device import CudaDevice

WAIT_AND = 2  # CU_STREAM_WAIT_VALUE_AND: until (word & value) != 0


@functools.cache
def _driver() -> Any:
    """libcuda. Calls release the interpreter lock: they block where a stream's queue is full, and
    it may be another rank's thread that lets the stream go on."""
    driver = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"):
        function = getattr(driver, name)
        function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        function.restype = ctypes.c_int
    return driver


class CudaQueue:
    """The current stream of a device, as staged.Queue describes it."""

    def __init__(self, dev: CudaDevice):
        self._dev = dev
        self.copy = dev.copy_bytes
        self._wait = _driver().cuStreamWaitValue32_v2
        self._write = _driver().cuStreamWriteValue32_v2

    def wait(self, address: int, value: int) -> None:
        """Wait until the 32-bit word at the address has a bit in common with value."""
        self._check(self._wait(self._dev.stream, address, value, WAIT_AND))

    def write(self, address: int, value: int) -> None:
        """Write the word; everything before is visible to whoever sees it."""
        self._check(self._write(self._dev.stream, address, value, 0))

    def pace(self) -> None:
        """Outside of graphs, wait for the stream.

        A stream holds about a thousand operations. Where it is full the driver blocks the thread,
        and with it, for peer copies, threads of other ranks that would let the stream go on.
        """
        if not self._dev.capturing:
            self._dev.synchronize_stream()

    def _check(self, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            _driver().cuGetErrorName(status, ctypes.byref(text))
            name = (text.value or b"unknown error").decode()
            raise RuntimeError(f"stream memory operation: {name} (rank {self._dev.rank})")
