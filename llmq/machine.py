"""Which machine a run gets: the CPU or a GPU, and how much memory it may use."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmq.errors import ConfigError
from llmq.runtime.device import HOST_SPEC, Device, DeviceSpec, MemorySizes

MIB = 1 << 20

# A card that `llmq plan` assumes where none is named: enough multiprocessors that no real card
# needs larger workspaces.
PLAN_SPEC = DeviceSpec(
    name="any GPU", capability=90, num_sms=132, memory=0, library_workspace=32 * MIB
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A chosen kind of device.

    kind: "host" or "cuda". note: one line for the user on why, or None. open: makes the device of
    a rank from the plan's sizes.
    """

    kind: str
    spec: DeviceSpec
    note: str | None
    open: Callable[[MemorySizes], Device]


def choose_machine(device: str, gpus: int) -> Machine:
    """device: "auto", "cpu" or "cuda". gpus: ranks, 0 for all there are.

    Raises LlmqError when what is asked for is not there; the message says why and what to do.
    """
    if gpus > 1:
        raise ConfigError(f"--gpus: {gpus} ranks are not supported yet, use --gpus 1")
    if device == "cpu":
        return _host(None)
    from llmq.runtime import cuda_device

    if device == "auto":
        reason = cuda_device.unusable_reason(0)
        if reason is not None:
            return _host(f"Running on the CPU, meant for small models ({reason}).")
    spec = cuda_device.device_spec(0)
    return Machine(
        kind="cuda", spec=spec, note=None, open=lambda sizes: cuda_device.CudaDevice(0, sizes)
    )


def _host(note: str | None) -> Machine:
    from llmq.runtime.host_device import HostDevice

    return Machine(kind="host", spec=HOST_SPEC, note=note, open=lambda sizes: HostDevice(sizes))


def available_host_memory() -> int:
    """Bytes that this process may still take: free memory, or less under a cgroup limit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        most, current = _number(limit), _number(used)
        if most is not None and current is not None:
            available = min(available, max(most - current, 0))
    return available


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _number(path: str) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None
