"""CUDA's shared libraries: choose the release, and load the libraries early.

The module imports nothing large, so that libraries load while Python loads other modules.
"""

import contextlib
import ctypes
import functools
import os
import threading
from importlib import metadata

# Folders, within CUDA 12's wheels, of the libraries whose file names are others in CUDA 13. The
# file names of cuDNN and NCCL are the same in both releases.
LIBRARIES_OF_12 = {
    "libnvrtc.so.12": "nvidia/cuda_nvrtc/lib",
    "libcublasLt.so.12": "nvidia/cublas/lib",
}


def cupy_release() -> int | None:
    """Return the CUDA release of the installed CuPy wheel, 12 or 13; None without a wheel."""
    for major in (12, 13):
        with contextlib.suppress(metadata.PackageNotFoundError):
            metadata.distribution(f"cupy-cuda{major}x")
            return major
    return None


@functools.cache
def load_libraries() -> None:
    """Load NVRTC and cuBLASLt of CuPy's CUDA release before other packages search for them. CuPy,
    cuda-bindings and nvmath-python use libraries that the process has loaded, and otherwise prefer
    CUDA 13, which PyTorch in the same environment may install. A missing library is left to these
    packages, which may find it elsewhere or report the error."""
    if cupy_release() != 12:
        return
    for name, folder in LIBRARIES_OF_12.items():
        wheel = metadata.distribution("cupy-cuda12x").locate_file(f"{folder}/{name}")
        for place in (str(wheel), name):
            with contextlib.suppress(OSError):
                ctypes.CDLL(place)
                break


def set_queues() -> None:
    """Ask for 32 hardware queues instead of 8, before the driver opens. Streams that share a queue
    block each other: a stream that waits for another GPU could hold up the very work that this
    other GPU waits for."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def load_ahead(*, alone: bool) -> None:
    """Start to open the driver and to load libraries, in a thread that leaves the interpreter to
    others. Errors are ignored: they come again at the driver's first use. alone: True if no other
    process shares the GPUs; then the first GPU's context is created too."""

    def work() -> None:
        with contextlib.suppress(OSError):  # no driver
            driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
            if driver.cuInit(0) == 0 and alone:
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
            load_libraries()

    set_queues()
    threading.Thread(target=work, name="CUDA", daemon=True).start()
