"""Choose the CUDA release of the shared libraries, and load the libraries early.

This module imports nothing large, so that libraries can load while Python imports other modules.
"""

import contextlib
import ctypes
import functools
import os
import threading
from importlib import metadata

# LIBRARIES_OF_12 has folders, within CUDA 12's wheels, of the libraries whose file names differ in
# CUDA 13. The file names of cuDNN and NCCL are the same in both releases.
LIBRARIES_OF_12 = {
    "libnvrtc.so.12": "nvidia/cuda_nvrtc/lib",
    "libcublasLt.so.12": "nvidia/cublas/lib",
}


def cupy_release() -> int | None:
    """Return the CUDA release of the installed CuPy wheel, 12 or 13; None if no wheel is
    installed."""
    for major in (12, 13):
        with contextlib.suppress(metadata.PackageNotFoundError):
            metadata.distribution(f"cupy-cuda{major}x")
            return major
    return None


@functools.cache
def load_libraries() -> None:
    """Load NVRTC and cuBLASLt of CuPy's CUDA release before other packages search for them. CuPy,
    cuda-bindings and nvmath-python use libraries that the process has already loaded; without these
    they prefer CUDA 13, which PyTorch may have installed beside them. A missing library causes no
    error here: these packages may find the library elsewhere, or report the error."""
    if cupy_release() != 12:
        return
    for name, folder in LIBRARIES_OF_12.items():
        wheel = metadata.distribution("cupy-cuda12x").locate_file(f"{folder}/{name}")
        for place in (str(wheel), name):
            with contextlib.suppress(OSError):
                ctypes.CDLL(place)
                break


def set_queues() -> None:
    """Ask the driver for 32 hardware queues instead of 8; call this before the driver opens.
    Streams that share a queue block each other: a stream that waits for another GPU could hold up
    the work for which the other GPU waits."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def load_ahead(*, alone: bool) -> None:
    """Start a thread that opens the driver and loads libraries while other threads use the
    interpreter. Errors are ignored, because the driver's first use raises each error again. alone:
    True if no other process shares the GPUs, so that the first GPU's context is created too."""

    def work() -> None:
        with contextlib.suppress(OSError):  # no driver is installed
            driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
            if driver.cuInit(0) == 0 and alone:
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
            load_libraries()

    set_queues()
    threading.Thread(target=work, name="CUDA", daemon=True).start()
