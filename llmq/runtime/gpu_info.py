"""Properties of a GPU and the releases of CUDA libraries, for reports."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

from llmq.base.errors import MachineError
from llmq.runtime.nvml import open_nvml


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInfo:
    """The properties of a GPU as CUDA reports them. memory, free, l2_size: bytes. shared_mem: bytes
    of shared memory of one multiprocessor. major, minor: compute capability. bus_id: PCI address,
    by which NVML finds the GPU independently of CUDA_VISIBLE_DEVICES. cuda_driver, cuda_runtime:
    releases as 1000 * major + 10 * minor."""

    name: str
    bus_id: str
    sm_count: int
    major: int
    minor: int
    memory: int
    free: int
    l2_size: int
    shared_mem: int
    ecc: bool
    cuda_driver: int
    cuda_runtime: int


def gpu_count() -> int:
    from cupy.cuda import runtime

    return runtime.getDeviceCount()


def bus_id(index: int) -> str:
    """Return the PCI address of GPU `index`, such as 0000:19:00.0."""
    from cupy.cuda import runtime

    return runtime.deviceGetPCIBusId(index)


def cuda_uuid(index: int) -> str:
    """Return the UUID of GPU `index`, or of the MIG instance that CUDA shows as this GPU, in
    hexadecimal. CuPy cuts off the UUID at its first zero byte."""
    from cupy.cuda import runtime

    return runtime.getDeviceProperties(index).get("uuid", b"").hex()


def gpu_info(index: int) -> GpuInfo:
    """Return the properties of GPU `index`, which must be usable and the calling thread's current
    GPU. Raises MachineError if other programs leave too little memory to open the GPU."""
    from cupy.cuda import runtime

    properties = runtime.getDeviceProperties(index)
    try:
        free, memory = runtime.memGetInfo()
    except runtime.CUDARuntimeError as error:
        raise MachineError(
            f"GPU {index} cannot be opened ({error}); see nvidia-smi for what else uses it"
        ) from error
    return GpuInfo(
        name=properties["name"].decode(),
        bus_id=runtime.deviceGetPCIBusId(index),
        sm_count=properties["multiProcessorCount"],
        major=properties["major"],
        minor=properties["minor"],
        memory=memory,
        free=free,
        l2_size=properties["l2CacheSize"],
        shared_mem=properties["sharedMemPerMultiprocessor"],
        ecc=bool(properties["ECCEnabled"]),
        cuda_driver=runtime.driverGetVersion(),
        cuda_runtime=runtime.runtimeGetVersion(),
    )


def least_free(count: int) -> int:
    """Return the free bytes of that one of the first `count` GPUs that has the least. Errors are
    raised as in gpu_info."""
    from cupy.cuda import runtime

    current, free = runtime.getDevice(), []
    try:
        for index in range(count):
            runtime.setDevice(index)
            free.append(gpu_info(index).free)
    finally:
        runtime.setDevice(current)
    return min(free)


def drives_display(count: int) -> bool:
    """True if NVML reports a display on at least one of the first `count` GPUs."""
    # missing modules, missing libraries and silent GPUs raise different classes
    with contextlib.suppress(Exception):
        nvml = open_nvml()
        for index in range(count):
            handle = nvml.nvmlDeviceGetHandleByPciBusId(bus_id(index))
            if nvml.nvmlDeviceGetDisplayMode(handle) or nvml.nvmlDeviceGetDisplayActive(handle):
                return True
    return False


_LIBRARIES: dict[str, Callable[[], object]] = {
    "CuPy": lambda: import_module("cupy").__version__,
    "NVRTC": lambda: "{1}.{2}".format(*import_module("cuda.bindings.nvrtc").nvrtcVersion()),
    "cuBLASLt": lambda: import_module("nvmath.bindings.cublasLt").get_version(),
    "cuDNN": lambda: import_module("cudnn").backend_version(),
}


def library_versions(
    libraries: Mapping[str, Callable[[], object]] = _LIBRARIES,
) -> dict[str, str]:
    """Return the releases of the CUDA libraries in use; libraries that do not load are left out."""
    versions = {}
    for name, read in libraries.items():
        with contextlib.suppress(Exception):  # loaders raise errors of many classes
            versions[name] = str(read())
    return versions
