"""CudaKernels loads CUDA C kernels by CuPy's RawModule and launches the kernels by the driver.

CuPy's own launch makes an object for every argument and derives C types from Python types. This
module instead calls the driver's cuLaunchKernel with the function handle that CuPy has loaded, and
reuses an array of pointers to typed values in each launch. The driver encodes TensorMaps, the
matrix descriptors that the copy engine of Hopper and later GPUs reads.
"""

import ctypes
import struct
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from llmq.base.dtypes import DType
from llmq.base.errors import LlmqError
from llmq.base.stopwatch import START
from llmq.base.tensor import Tensor
from llmq.runtime.compile import compile_kernel
from llmq.runtime.device import FUSED, Launch
from llmq.runtime.kernel import Kernel, KernelSource

# Each argument of any type has an 8-byte slot. Neither CuPy nor the driver converts the values.
_POINTER = "Q"
_SLOT = {"i32": "i4x", "u32": "I4x", "i64": "q", "f32": "f4x", "f64": "d"}
MAP_BYTES = 128
_MAP = f"{MAP_BYTES}s"

EncodeMap = Callable[[Tensor, int], bytes]
"""Function (matrix, box_rows) that returns a TensorMap of MAP_BYTES bytes, by which kernels copy
boxes of box_rows rows."""


class Arguments:
    """Reusable memory for the arguments of one kernel, used by one thread. address: the constant
    address of the pointer array (kernelParams of cuLaunchKernel)."""

    def __init__(self, kernel: Kernel, encode_map: EncodeMap | None = None):
        """encode_map: function that encodes TensorMaps; kernels without TensorMaps need none."""
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
        """Store the arguments: tensors by address or as TensorMaps, None as zeros. `Kernel.bind`
        has checked that the arguments fit."""
        plain = [a.ptr if isinstance(a, Tensor) else 0 if a is None else a for a in args]
        for i, rows in self._maps:
            plain[i] = b"" if args[i] is None else self._encode_map(args[i], rows)
        self._pack_into(self._values, 0, *plain)


ROW_BYTES = 128  # bytes of a box's row: the width of one swizzle


def tensor_map(driver: Any, tensor: Tensor, box_rows: int) -> bytes:
    """Return the CUtensorMap of a row-major matrix: boxes have box_rows rows of 128 bytes, swizzled
    as cu/ptx.cuh describes, and elements outside the matrix read as zero. driver: NVIDIA's driver
    binding. Raises RuntimeError if the driver refuses the map."""
    rows, columns = tensor.shape
    itemsize = tensor.dtype.itemsize
    types = driver.CUtensorMapDataType
    status, encoded = driver.cuTensorMapEncodeTiled(
        # Elements are only copied, so only their size matters.
        {1: types.CU_TENSOR_MAP_DATA_TYPE_UINT8, 2: types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16}[
            itemsize
        ],
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
    return ctypes.string_at(int(encoded.getPtr()), MAP_BYTES)


DEFAULT_SHARED = 48 << 10  # bytes of shared memory that a thread block may use without `allow`


class Loaded:
    """A kernel that is loaded on the GPU. shared: bytes of dynamic shared memory that a launch may
    request."""

    def __init__(self, api: SimpleNamespace, raw: Any):
        self.function = api.driver.CUfunction(raw.kernel.ptr)
        self.shared = DEFAULT_SHARED - raw.shared_size_bytes  # the rest is static shared memory
        self._raw = raw

    def allow(self, smem: int) -> None:
        """Let launches request `smem` bytes of dynamic shared memory."""
        if smem > self.shared:
            # Another CudaDevice of this GPU shares the module, and may have raised the limit.
            self.shared = max(smem, self._raw.max_dynamic_shared_size_bytes)
            self._raw.max_dynamic_shared_size_bytes = self.shared


class CudaKernels:
    """The loaded kernels of the calling thread's current GPU, for one thread. CuPy keeps the
    modules that are loaded on a GPU until the process ends, and the next device of this GPU gets
    the same modules."""

    def __init__(self, api: SimpleNamespace, capability: int):
        self._api = api
        self._launch = api.driver.cuLaunchKernel
        self._capability = capability
        self._loaded: dict[KernelSource, Loaded] = {}
        self._arguments: dict[Kernel, Arguments] = {}

    def launch(self, launch: Launch, stream: int, *, overlaps: bool = False) -> None:
        """Enqueue a launch on the stream (a cudaStream_t); a kernel's first use compiles and loads
        it. overlaps: True to let a programmatic kernel start while the kernel before it still runs.
        Raises DriverError of `cuda_api.load()`."""
        kernel, grid, block, args, types, consts, smem, _ = launch
        loaded = self.load(kernel, types, consts)
        loaded.allow(smem)
        arguments = self._arguments.get(kernel)
        if arguments is None:
            encode = partial(tensor_map, self._api.driver)
            arguments = self._arguments[kernel] = Arguments(kernel, encode)
        arguments.set(args)
        if overlaps:
            config = self._overlapping(_three(grid), _three(block), smem, stream)
            (status,) = self._api.driver.cuLaunchKernelEx(
                config, loaded.function, arguments.address, 0
            )
        else:
            (status,) = self._launch(
                loaded.function, *_three(grid), *_three(block), smem, stream, arguments.address, 0
            )
        if status:
            raise self._api.DriverError(status)

    def _overlapping(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], smem: int, stream: int
    ) -> Any:
        """Return the CUlaunchConfig of a programmatic dependent launch."""
        driver, config = self._api.driver, self._api.driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes, config.hStream = smem, driver.CUstream(stream)
        attribute = driver.CUlaunchAttribute()
        ids = driver.CUlaunchAttributeID
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
        return config

    def load(self, kernel: Kernel, types: dict[str, DType], consts: dict[str, int]) -> Loaded:
        source = KernelSource.of(kernel, types, consts)
        loaded = self._loaded.get(source)
        if loaded is None:
            if kernel.capability not in (None, self._capability):
                raise LlmqError(
                    f"{kernel.entry} is for GPUs of compute capability {kernel.capability / 10}, "
                    f"this one has {self._capability / 10}"
                )
            with START.part("loading kernels"):
                cubin = compile_kernel(source, self._capability)
                raw = self._api.RawModule(path=str(cubin.path)).get_function(kernel.entry)
            loaded = self._loaded[source] = Loaded(self._api, raw)
        return loaded

    def fast_products(self) -> list[str]:
        """Return our matrix products of fp8 codes, among those launched so far, that accumulate in
        fewer bits; products with the constant EXACT do not."""
        ours = [source for source in self._loaded if source.entry in FUSED]
        fast = [source for source in ours if not dict(source.consts).get("EXACT")]
        return [str(source) for source in fast if dict(source.types).get("A", "bf16") != "bf16"]


def _three(size: int | tuple[int, ...]) -> tuple[int, int, int]:
    return (size, 1, 1) if isinstance(size, int) else (*size, 1, 1)[:3]
