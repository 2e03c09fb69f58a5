"""CUDA's Python bindings and the properties of GPUs. Libraries are loaded at the first use, not at
import.

llmq uses CuPy's runtime functions and RawModule, and NVIDIA's driver binding, but neither CuPy's
allocators nor its streams.
"""

import functools
import os
import shlex
from importlib import metadata
from types import SimpleNamespace

from llmq.base.errors import ConfigError, LlmqError
from llmq.runtime.cuda_libraries import cupy_release, load_libraries, set_queues
from llmq.runtime.device import DeviceSpec
from llmq.runtime.nvml import open_nvml

MIN_CAPABILITY, OLDEST_CUDA = 80, 12000


def has_gpu() -> bool:
    """True if NVML sees an NVIDIA GPU; the check needs no CUDA package."""
    try:
        return open_nvml().nvmlDeviceGetCount() > 0
    except Exception:  # missing libraries and drivers raise different classes
        return False


def install_command() -> str:
    """Return the pip command that installs llmq's GPU packages for CUDA 12, as llmq's metadata
    lists the packages."""
    try:
        listed = [line.partition(";") for line in metadata.requires("llmq-train") or []]
    except metadata.PackageNotFoundError:  # llmq runs from its source tree, which has no metadata
        return "pip install ."
    packages = [name.strip() for name, _, marker in listed if "platform_machine" in marker]
    return shlex.join(["pip", "install", *packages])


@functools.cache
def load() -> SimpleNamespace:
    """Return CuPy's modules `runtime` and `nvtx`, its classes RawModule and DriverError, and the
    module `driver` of cuda.bindings. Raises LlmqError if a library is missing."""
    set_queues()
    load_libraries()
    try:
        from cupy import RawModule
        from cupy.cuda import driver as cupy_driver
        from cupy.cuda import nvtx, runtime
    except ImportError as error:
        if cupy_release() is None and has_gpu():
            raise LlmqError(
                "this machine has an NVIDIA GPU, but the packages for it are not installed; type "
                f"`{install_command()}`, or use --device cpu"
            ) from error
        reason = error.__cause__ or error  # CuPy's own message is a page long
        raise LlmqError(
            f"CuPy cannot be loaded ({reason}); install cupy-cuda12x or cupy-cuda13x, or use "
            "--device cpu"
        ) from error
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise LlmqError(
            f"CUDA's Python bindings cannot be loaded ({error}); install cuda-bindings, or "
            "use --device cpu"
        ) from error
    return SimpleNamespace(
        runtime=runtime,
        driver=driver,
        nvtx=nvtx,
        RawModule=RawModule,
        DriverError=cupy_driver.CUDADriverError,
    )


def device_spec(index: int) -> DeviceSpec:
    """Return the properties of GPU `index`. Raises LlmqError if the GPU is missing or unusable."""
    runtime = load().runtime
    try:
        have, need = runtime.driverGetVersion(), runtime.runtimeGetVersion()
        if have == 0:
            raise LlmqError("no NVIDIA driver is installed; install one, or use --device cpu")
        if have // 1000 < need // 1000:
            other = f", or install cupy-cuda{have // 1000}x" if have >= OLDEST_CUDA else ""
            raise LlmqError(
                f"the NVIDIA driver supports CUDA {_version(have)} and this CuPy needs "
                f"{_version(need)}; update the driver{other}"
            )
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise LlmqError(
            f"no NVIDIA GPU can be used ({error}); see nvidia-smi, CUDA_VISIBLE_DEVICES is {gpus}"
        ) from error
    if index >= count:
        raise LlmqError(f"GPU {index} is asked for, there are {count}; check CUDA_VISIBLE_DEVICES")
    properties = runtime.getDeviceProperties(index)
    capability = 10 * properties["major"] + properties["minor"]
    name = properties["name"].decode()
    if capability < MIN_CAPABILITY:
        raise LlmqError(
            f"GPU {index} ({name}) has compute capability {capability / 10}, "
            f"{MIN_CAPABILITY / 10} (Ampere) is the oldest that works; use --device cpu"
        )
    return DeviceSpec(
        name=name,
        capability=min(capability, lowered(capability)),
        num_sms=properties["multiProcessorCount"],
        memory=properties["totalGlobalMem"],
    )


def lowered(capability: int) -> int:
    """Return the compute capability, times 10, for which kernels are chosen: LLMQ_CAPABILITY of the
    environment (for developers) if set, else `capability`. Raises ConfigError if LLMQ_CAPABILITY is
    not a number."""
    text = os.environ.get("LLMQ_CAPABILITY") or str(capability)
    if not text.isdecimal():
        raise ConfigError(f"LLMQ_CAPABILITY: '{text}' is no number as 89, which means 8.9")
    return int(text)


def compute_capability(index: int) -> int:
    """Return the compute capability, times 10, of GPU `index`, for which kernels are compiled."""
    properties = load().runtime.getDeviceProperties(index)
    return 10 * properties["major"] + properties["minor"]


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
