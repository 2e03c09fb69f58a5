"""The bindings of CUDA, and what a GPU is. The first use loads them, not the import.

CuPy's runtime functions and RawModule, and NVIDIA's binding of the driver, are used without CuPy's
own allocators and streams.
"""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace

from llmq.base.errors import LlmqError
from llmq.runtime.device import DeviceSpec, library_workspace

MIN_CAPABILITY, OLDEST_CUDA = 80, 12000


@functools.cache
def load() -> SimpleNamespace:
    """runtime, nvtx: CuPy's modules. driver: of cuda.bindings. RawModule, DriverError: CuPy's.

    Raises LlmqError where one of the libraries is missing.
    """
    # Hardware queues per GPU, 8 by default. Streams that share one, of ours and NCCL's, block each
    # other: a stream that waits for another GPU could hold up what that GPU waits for.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        from cupy import RawModule
        from cupy.cuda import driver as cupy_driver
        from cupy.cuda import nvtx, runtime
    except ImportError as error:
        reason = error.__cause__ or error  # CuPy's own message fills a page
        raise LlmqError(
            f"CuPy cannot be loaded ({reason}); install cupy-cuda12x or cupy-cuda13x, or use "
            "--device cpu"
        ) from error
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise LlmqError(
            f"CUDA's Python bindings cannot be loaded ({error}); install cuda-bindings of CuPy's "
            "CUDA release, or use --device cpu"
        ) from error
    return SimpleNamespace(
        runtime=runtime,
        driver=driver,
        nvtx=nvtx,
        RawModule=RawModule,
        DriverError=cupy_driver.CUDADriverError,
    )


def device_spec(index: int) -> DeviceSpec:
    """What GPU `index` is. Raises LlmqError where it is not there or cannot be used."""
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
        capability=capability,
        num_sms=properties["multiProcessorCount"],
        memory=properties["totalGlobalMem"],
        library_workspace=library_workspace(capability),
    )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
