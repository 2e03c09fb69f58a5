"""Stream memory operations of the CUDA driver."""

from __future__ import annotations

from typing import Any

from llmq.runtime import cuda_api
from llmq.runtime.cuda_device import CudaDevice

WAIT_AND = 2  # CU_STREAM_WAIT_VALUE_AND: until (word & value) != 0


class CudaQueue:
    """The current stream of a device, as staged.Queue describes it.

    Calls release the interpreter lock: they block where a stream's queue is full, and it may be
    another rank's thread that lets the stream go on.
    """

    def __init__(self, dev: CudaDevice):
        self._dev = dev
        self.copy = dev.copy_bytes
        self._driver = cuda_api.load().driver

    def wait(self, address: int, value: int) -> None:
        """Wait until the 32-bit word at the address has a bit in common with value."""
        self._check(*self._driver.cuStreamWaitValue32(self._dev.stream, address, value, WAIT_AND))

    def write(self, address: int, value: int) -> None:
        """Write the word; everything before is visible to whoever sees it."""
        self._check(*self._driver.cuStreamWriteValue32(self._dev.stream, address, value, 0))

    def pace(self) -> None:
        """Outside of graphs, wait for the stream.

        A stream holds about a thousand operations. Where it is full the driver blocks the thread,
        and with it, for peer copies, threads of other ranks that would let the stream go on.
        """
        if not self._dev.capturing:
            self._dev.synchronize_stream()

    def _check(self, status: Any) -> None:
        if status:
            raise RuntimeError(
                f"stream memory operation: {status.name} (rank {self._dev.mesh.rank})"
            )
