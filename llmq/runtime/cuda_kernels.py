"""CUDA C kernels on one GPU: loaded as CuPy's RawModule, launched with arguments packed in place.

CuPy's own launch makes an object of every argument and takes its types from Python's, so kernels
are launched by the driver's function, on the handle that CuPy has loaded.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from llmq.base.dtypes import DType
from llmq.base.errors import LlmqError
from llmq.runtime.arguments import Arguments, tensor_map
from llmq.runtime.compile import compile_kernel
from llmq.runtime.device import FUSED, Launch
from llmq.runtime.kernel import Kernel, KernelSource

DEFAULT_SHARED = 48 << 10  # bytes of a block's shared memory that need no opting in


class Loaded:
    """A kernel on the GPU. shared: bytes of dynamic shared memory that it may have."""

    def __init__(self, api: SimpleNamespace, raw: Any):
        self.function = api.driver.CUfunction(raw.kernel.ptr)
        self.shared = DEFAULT_SHARED - raw.shared_size_bytes  # beside the static ones
        self._raw = raw

    def allow(self, smem: int) -> None:
        """Let launches ask for so many bytes of dynamic shared memory."""
        if smem > self.shared:
            # Another device of this GPU, which has the same module, may have asked for more.
            self.shared = max(smem, self._raw.max_dynamic_shared_size_bytes)
            self._raw.max_dynamic_shared_size_bytes = self.shared


class CudaKernels:
    """The kernels of the calling thread's current GPU. Not for use by two threads.

    CuPy keeps what it has loaded for a GPU until the process ends, and the next device of this GPU
    gets the same again.
    """

    def __init__(self, api: SimpleNamespace, capability: int):
        """api: what cuda_api.load() returns."""
        self._api = api
        self._launch = api.driver.cuLaunchKernel
        self._capability = capability
        self._loaded: dict[KernelSource, Loaded] = {}
        self._arguments: dict[Kernel, Arguments] = {}

    def launch(self, launch: Launch, stream: int) -> None:
        """Enqueue on the stream (a cudaStream_t); a kernel's first use compiles and loads it.

        Raises the api's DriverError.
        """
        kernel, grid, block, args, types, consts, smem, _ = launch
        loaded = self.load(kernel, types, consts)
        loaded.allow(smem)
        arguments = self._arguments.get(kernel)
        if arguments is None:
            encode = partial(tensor_map, self._api.driver)
            arguments = self._arguments[kernel] = Arguments(kernel, encode)
        arguments.set(args)
        (status,) = self._launch(
            loaded.function, *_three(grid), *_three(block), smem, stream, arguments.address, 0
        )
        if status:
            raise self._api.DriverError(status)

    def load(self, kernel: Kernel, types: dict[str, DType], consts: dict[str, int]) -> Loaded:
        """The kernel with these types and constants."""
        source = KernelSource.of(kernel, types, consts)
        loaded = self._loaded.get(source)
        if loaded is None:
            if kernel.capability not in (None, self._capability):
                raise LlmqError(
                    f"{kernel.entry} is for GPUs of compute capability {kernel.capability / 10}, "
                    f"this one has {self._capability / 10}"
                )
            cubin = compile_kernel(source, self._capability)
            raw = self._api.RawModule(path=str(cubin.path)).get_function(kernel.entry)
            loaded = self._loaded[source] = Loaded(self._api, raw)
        return loaded

    def fast_products(self) -> list[str]:
        """Products of fp8 codes so far that sum with fewer bits, as ours do but for EXACT ones."""
        ours = [source for source in self._loaded if source.entry in FUSED]
        fast = [source for source in ours if not dict(source.consts).get("EXACT")]
        return [str(source) for source in fast if dict(source.types).get("A", "bf16") != "bf16"]


def _three(size: int | tuple[int, ...]) -> tuple[int, int, int]:
    return (size, 1, 1) if isinstance(size, int) else (*size, 1, 1)[:3]
