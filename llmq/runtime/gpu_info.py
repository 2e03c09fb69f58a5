"""Facts of a GPU and the libraries on it, for reports."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

from llmq.base.errors import MachineError
from llmq.runtime.nvml import open_nvml


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInfo:
    """One GPU as CUDA sees it. Sizes in bytes; shared_mem is that of one multiprocessor. bus_id:
    its place in the machine, by which NVML finds it whatever CUDA_VISIBLE_DEVICES says.
    cuda_driver, cuda_runtime: releases, 1000 * major + 10 * minor."""

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
    """The place of GPU `index` in the machine, such as 0000:19:00.0."""
    from cupy.cuda import runtime

    return runtime.deviceGetPCIBusId(index)


def cuda_uuid(index: int) -> str:
    """Hexadecimal; of a MIG instance its own. CuPy ends it at a byte that is 0."""
    from cupy.cuda import runtime

    return runtime.getDeviceProperties(index).get("uuid", b"").hex()


def gpu_info(index: int) -> GpuInfo:
    """GPU `index`, which must be usable and the calling thread's current one. Raises MachineError
    where others leave it no memory for us to begin with."""
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
    """Bytes that are free on the fullest of the first `count` GPUs. Raises as gpu_info does."""
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
    """Whether a display is connected to one of the first `count` GPUs, as far as NVML says so."""
    with contextlib.suppress(Exception):  # no module, no library, no answer: each its own class
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
    """Releases of the CUDA libraries in use; those that do not load are left out."""
    versions = {}
    for name, read in libraries.items():
        with contextlib.suppress(Exception):  # the loaders raise what they like
            versions[name] = str(read())
    return versions
