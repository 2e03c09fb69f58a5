"""Pinned host memory: the GPU copies to and from it without the host's help."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from llmq.errors import LlmqError
from llmq.runtime.tensor import Storage

PORTABLE = 1  # cudaHostAllocPortable: pinned for every GPU, not only the current one
WRITE_COMBINED = 4  # cudaHostAllocWriteCombined: not cached by the CPU


class PinnedMemory:
    """One cudaHostAlloc; `storage` is readable and writable by the host and by all GPUs."""

    def __init__(self, api: Any, nbytes: int, place: str = "pinned"):
        """api: CuPy's CUDA runtime module. place: "pinned" or "write_combined".

        Raises LlmqError if so much cannot be locked.
        """
        flags = PORTABLE | (WRITE_COMBINED if place == "write_combined" else 0)
        self._api = api
        try:
            # A byte more than nothing: cudaHostAlloc(0) gives no address.
            self._address = api.hostAlloc(max(nbytes, 1), flags)
        except api.CUDARuntimeError as error:
            raise LlmqError(
                f"cannot pin {nbytes / 2**30:.1f} GiB of host memory ({error}); offload less, or "
                "raise the memory limit of the container and `ulimit -l`"
            ) from error
        data = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(self._address), np.uint8)
        self.storage = Storage(place, self._address, data)

    def free(self) -> None:
        """Give the memory back; no tensor in it may be used afterwards."""
        self._api.freeHost(self._address)
