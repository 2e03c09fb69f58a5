"""Facts about a machine from NVML, /sys and /proc: PCIe slots, limits and memory of GPUs, driver,
CPU and IOMMU. This module loads no CUDA and changes no setting."""

import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmq import __version__
from llmq.base.errors import LlmqError
from llmq.bench.child import Job
from llmq.runtime.gpu_info import bus_id, gpu_count, library_versions
from llmq.runtime.host_usage import allowed_cpus, host_memory
from llmq.runtime.machine import choose_machine
from llmq.runtime.nvml import find_nvml, told

# By name of a fact about a GPU, the function that reads the fact from NVML.
_READINGS: dict[str, Callable[[Any, Any], Any]] = {
    "pcie_generation": lambda n, h: n.nvmlDeviceGetCurrPcieLinkGeneration(h),
    "pcie_generation_most": lambda n, h: n.nvmlDeviceGetMaxPcieLinkGeneration(h),
    "pcie_width": lambda n, h: n.nvmlDeviceGetCurrPcieLinkWidth(h),
    "pcie_width_most": lambda n, h: n.nvmlDeviceGetMaxPcieLinkWidth(h),
    "persistence": lambda n, h: bool(n.nvmlDeviceGetPersistenceMode(h)),
    "power_limit": lambda n, h: n.nvmlDeviceGetEnforcedPowerLimit(h) / 1000,
    "power_default": lambda n, h: n.nvmlDeviceGetPowerManagementDefaultLimit(h) / 1000,
    "ecc_errors": lambda n, h: n.nvmlDeviceGetTotalEccErrors(
        h, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC
    ),
    "rows_failed": lambda n, h: bool(n.nvmlDeviceGetRemappedRows(h)[3]),
    "others": lambda n, h: sum(
        process.pid != os.getpid() for process in n.nvmlDeviceGetComputeRunningProcesses(h)
    ),
}


def measure(job: Job, **_: Any) -> None:
    """Collect facts, the part `facts` of `llmq rig`. The result has `host`, `gpus` (a record for
    each GPU), and `problem`, the reason why no GPU can be used."""
    facts: dict[str, Any] = {"host": host_facts(), "gpus": [], "problem": None}
    try:
        machine = choose_machine("cuda", 0)
    except LlmqError as error:
        # The advice `--device cpu` is only for training.
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
    """Return facts about a GPU by its PCI address, such as 0000:19:00.0; unknown facts are left
    out."""
    facts: dict[str, Any] = {}
    if nvml is not None:
        try:
            handle = nvml.nvmlDeviceGetHandleByPciBusId(place)
        except nvml.NVMLError as error:
            return {"nvml": str(error)}
        facts |= {"name": nvml.nvmlDeviceGetName(handle)} | told(nvml, handle, _READINGS)
    if (text := _text(devices / place.lower() / "max_link_width")).isdigit():
        facts["pcie_width_slot"] = int(text)
    return facts


def host_facts(root: Path = Path("/")) -> dict[str, Any]:
    """Return facts about the machine: system, CPU, memory, IOMMU, and whether the machine is
    virtual."""
    about = _text(root / "proc/cpuinfo")
    cpu = re.search(r"model name\s*:\s*(.+)", about)
    kernel = _text(root / "proc/cmdline").split()
    groups = root / "sys/kernel/iommu_groups"
    return {
        "system": f"{platform.system()} {platform.release()}",
        "cpu": cpu[1].strip() if cpu else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "cores_allowed": len(allowed_cpus()),
        "memory": host_memory()[1],
        "iommu": groups.is_dir() and any(groups.iterdir()),
        "iommu_options": [word for word in kernel if "iommu" in word or "acs" in word.lower()],
        "virtual": "hypervisor" in about,
    }


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
