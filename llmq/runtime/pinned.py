"""Pinned host memory, which a GPU can read and write directly."""

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from llmq.base.errors import LlmqError
from llmq.base.tensor import PINNED, Storage, Tensor, Tier

PORTABLE = 1  # cudaHostAllocPortable, cudaHostRegisterPortable: memory pinned for every GPU
WRITE_COMBINED = 4  # cudaHostAllocWriteCombined: memory that the CPU does not cache
PIECE = 256 << 20  # bytes that one thread faults in at a time
THREADS = 8
# _REGISTERED has the registered memory by address. Registered memory stays mapped even if its owner
# never frees it, because the driver would refuse new memory at the same address.
_REGISTERED: dict[int, mmap.mmap] = {}
BOUNCE_BYTES = 4 << 20


class PinnedMemory:
    """A range of page-locked memory, `storage`, which the host and all GPUs read and write.
    cudaHostAlloc would fault in pages one by one, in a single thread per process. This class
    therefore maps CPU-cached memory in large pages with several threads, and CUDA only registers
    the memory."""

    def __init__(self, api: Any, nbytes: int, tier: Tier = PINNED):
        """api: CuPy's CUDA runtime module. tier: a tier of host memory, PINNED or WRITE_COMBINED.
        Raises LlmqError if the memory cannot be locked."""
        self._api = api
        try:
            # The size is at least one byte, because empty memory has no address.
            if not tier.cached:
                self._address = api.hostAlloc(max(nbytes, 1), PORTABLE | WRITE_COMBINED)
            else:
                memory, self._address = _present(max(nbytes, 1))
                api.hostRegister(self._address, max(nbytes, 1), PORTABLE)
                _REGISTERED[self._address] = memory
        except (api.CUDARuntimeError, OSError) as error:
            raise LlmqError(
                f"cannot pin {nbytes / 2**30:.1f} GiB of host memory ({error}); offload less, or "
                "raise the memory limit of the container and `ulimit -l`"
            ) from error
        data = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(self._address), np.uint8)
        self.storage = Storage(tier.name, self._address, data)

    def free(self) -> None:
        """Free the memory; no tensor in this memory may be used afterwards."""
        if self._address not in _REGISTERED:
            self._api.freeHost(self._address)
            return
        self._api.hostUnregister(self._address)
        _REGISTERED.pop(self._address).close()


def _present(nbytes: int) -> tuple[mmap.mmap, int]:
    """Return zeroed memory, in large pages if the system has any, and the memory's address."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # DONTFORK keeps the page in place: after a fork, a write by this process would move the page,
    # and the GPU would still use the old page.
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            memory.madvise(getattr(mmap, advice))
    address = ctypes.addressof(ctypes.c_uint8.from_buffer(memory))

    def touch(start: int) -> None:
        ctypes.memset(address + start, 0, min(PIECE, nbytes - start))

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(touch, range(0, nbytes, PIECE)))
    return memory, address


def read_write_combined(api: Any, target: int, src: Tensor) -> None:
    """Copy a tensor to other host memory through the GPU, because the CPU reads write-combined
    memory at a hundredth of the usual speed."""
    size = min(src.nbytes, BOUNCE_BYTES)
    bounce = api.malloc(size)
    for start in range(0, src.nbytes, size):
        count = min(size, src.nbytes - start)
        api.memcpy(bounce, src.ptr + start, count, api.memcpyDefault)
        api.memcpy(target + start, bounce, count, api.memcpyDeviceToHost)
    api.free(bounce)
