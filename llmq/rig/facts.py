"""Facts that a machine tells of itself: its GPUs' slots, limits and memory, its driver, CPUs and
buses.

Nothing is loaded and nothing is changed: NVML is asked, and files of /sys and /proc are read.
Beside them stands how fast the host is: its memory, its products, and the disk of a folder.
"""

import fcntl
import mmap
import os
import platform
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from llmq import __version__
from llmq.base.dtypes import MIB
from llmq.base.errors import LlmqError
from llmq.rig.child import Job
from llmq.runtime.gpu_info import bus_id, gpu_count, library_versions
from llmq.runtime.host_usage import allowed_cpus, available_host_memory, host_memory
from llmq.runtime.machine import choose_machine, parse_cpus
from llmq.runtime.nvml import find_nvml, told

# A fact of a GPU, by NVML: what it is called here, and how it is asked.
_READINGS: dict[str, Callable[[Any, Any], Any]] = {
    "pcie_generation": lambda n, h: n.nvmlDeviceGetCurrPcieLinkGeneration(h),
    "pcie_generation_most": lambda n, h: n.nvmlDeviceGetMaxPcieLinkGeneration(h),
    "pcie_width": lambda n, h: n.nvmlDeviceGetCurrPcieLinkWidth(h),
    "pcie_width_most": lambda n, h: n.nvmlDeviceGetMaxPcieLinkWidth(h),
    "persistence": lambda n, h: bool(n.nvmlDeviceGetPersistenceMode(h)),
    "power_limit": lambda n, h: n.nvmlDeviceGetEnforcedPowerLimit(h) / 1000,
    "power_default": lambda n, h: n.nvmlDeviceGetPowerManagementDefaultLimit(h) / 1000,
    "clock_most": lambda n, h: n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_SM),
    "ecc": lambda n, h: bool(n.nvmlDeviceGetEccMode(h)[0]),
    "ecc_errors": lambda n, h: n.nvmlDeviceGetTotalEccErrors(
        h, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC
    ),
    "rows_remapped": lambda n, h: n.nvmlDeviceGetRemappedRows(h)[1],
    "rows_failed": lambda n, h: bool(n.nvmlDeviceGetRemappedRows(h)[3]),
    "others": lambda n, h: sum(
        process.pid != os.getpid() for process in n.nvmlDeviceGetComputeRunningProcesses(h)
    ),
    "display": lambda n, h: bool(n.nvmlDeviceGetDisplayActive(h)),
}


def measure(job: Job, **_: Any) -> None:
    """The part: `host`, `gpus` (one record each), `problem` where no GPU can be used."""
    facts: dict[str, Any] = {"host": host_facts(), "gpus": [], "problem": None}
    try:
        machine = choose_machine("cuda", 0)
    except LlmqError as error:
        # The rest of the advice is for runs.
        job.note(facts | {"problem": str(error).removesuffix(", or use --device cpu")})
        return
    spec = machine.spec
    facts["spec"] = {
        "device": spec.name,
        "capability": spec.capability,
        "num_sms": spec.num_sms,
        "memory": spec.memory,
    }
    facts["versions"] = {"llmq": __version__} | library_versions()
    nvml = find_nvml()
    facts["driver"] = "" if nvml is None else nvml.nvmlSystemGetDriverVersion()
    for index in range(gpu_count()):
        place = bus_id(index)
        facts["gpus"].append({"index": index, "bus_id": place} | gpu_facts(nvml, place))
        job.note(facts)


def gpu_facts(nvml: Any, place: str, devices: Path = Path("/sys/bus/pci/devices")) -> dict:
    """The facts of one GPU, by its place such as 0000:19:00.0; what nobody tells is left out."""
    facts: dict[str, Any] = {}
    if nvml is not None:
        try:
            handle = nvml.nvmlDeviceGetHandleByPciBusId(place)
        except nvml.NVMLError as error:
            return {"nvml": str(error)}
        facts |= {"name": nvml.nvmlDeviceGetName(handle)} | told(nvml, handle, _READINGS)
    folder = devices / place.lower()
    for name, file in (("numa", "numa_node"), ("pcie_width_slot", "max_link_width")):
        if (text := _text(folder / file)).lstrip("-").isdigit():
            facts[name] = int(text)
    if cpus := _text(folder / "local_cpulist"):
        facts["cpus_near"] = len(parse_cpus(cpus))
    return facts


def host_facts(root: Path = Path("/")) -> dict[str, Any]:
    """The facts of the machine: its CPU, memory, NUMA nodes, and what stands between its GPUs."""
    about = _text(root / "proc/cpuinfo")
    cpu = re.search(r"model name\s*:\s*(.+)", about)
    kernel = _text(root / "proc/cmdline").split()
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    groups = root / "sys/kernel/iommu_groups"
    return {
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpu": cpu[1].strip() if cpu else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "cores_allowed": len(allowed_cpus()),
        "memory": host_memory()[1],
        "memory_available": available_host_memory(),
        "numa_nodes": max(len(nodes), 1),
        "iommu": groups.is_dir() and any(groups.iterdir()),
        "iommu_options": [word for word in kernel if "iommu" in word or "acs" in word.lower()],
        "virtual": "hypervisor" in about,
    }


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


PIECE = 16 * MIB  # of what is written to the disk at a time
PRODUCT = 1024  # rows and columns
SHARE = 0.3  # of the time for each measurement


def measure_host(
    job: Job, *, disk: str, disk_mib: int = 2048, memory_mib: int = 256, **_: Any
) -> None:
    """The part: `memory` GB/s read and written by all threads, `product` GFLOP/s in F32, and of the
    disk `write` and `read` GB/s. disk: a folder; nothing stays there."""
    found: dict[str, Any] = {}
    seconds = job.left
    found["memory"] = memory_rate(SHARE / 2 * seconds, memory_mib)
    found["product"] = product_rate(SHARE / 2 * seconds)
    job.note(found)
    found["disk"] = disk_rates(Path(disk), disk_mib, SHARE * seconds)
    job.note(found)


def memory_rate(seconds: float, mib: int, threads: int | None = None) -> float:
    """GB/s of copies by as many threads as there are CPUs, at most 16, read and written."""
    threads = threads or min(os.cpu_count() or 1, 16)
    size = max(mib * MIB // threads, MIB)
    start = threading.Barrier(threads)

    def rate(_: int) -> float:
        source, target, copied = np.ones(size, np.uint8), np.zeros(size, np.uint8), 0
        start.wait()
        begin = time.perf_counter()
        while copied == 0 or time.perf_counter() - begin < seconds:
            np.copyto(target, source)
            copied += 2 * size
        return copied / (time.perf_counter() - begin)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(rate, range(threads))) / 1e9


def product_rate(seconds: float, size: int = PRODUCT) -> float:
    """GFLOP/s of NumPy's matrix products."""
    a = np.random.default_rng(0).standard_normal((size, size), np.float32)
    out = np.empty_like(a)
    np.matmul(a, a, out=out)
    begin, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - begin < seconds:
        np.matmul(a, a, out=out)
        count += 1
    return 2 * size**3 * count / (time.perf_counter() - begin) / 1e9


def disk_rates(folder: Path, mib: int, seconds: float) -> dict[str, float]:
    """GB/s written, with all of it on the disk at the end, and read without the system's cache as
    far as it can be had. Writes as much as the time and a tenth of the free space allow."""
    size = min(mib * MIB, shutil.disk_usage(folder).free // 10) // PIECE * PIECE
    if size == 0:
        return {}
    piece = mmap.mmap(-1, PIECE)  # at the start of a page, as direct reads want it
    piece.write(np.random.default_rng(0).bytes(PIECE))
    with tempfile.TemporaryFile(dir=folder) as file:  # it has no name to stay by if we are killed
        begin, written = time.perf_counter(), 0
        while written == 0 or (written < size and time.perf_counter() - begin < seconds):
            written += os.write(file.fileno(), piece)
            os.fdatasync(file.fileno())
        write = written / (time.perf_counter() - begin) / 1e9
        read = _read_rate(file.fileno(), piece, seconds)
    return {"write": write, "read": read, "bytes": written}


def _read_rate(descriptor: int, piece: mmap.mmap, seconds: float) -> float:
    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) | getattr(os, "O_DIRECT", 0)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    except OSError:  # a file system that has no direct reads
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, 0, os.SEEK_SET)
    begin, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - begin < seconds:
        if (got := os.readv(descriptor, [piece])) == 0:
            break
        count += got
    return count / (time.perf_counter() - begin) / 1e9
