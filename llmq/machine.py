"""Which machine a run gets: the CPU or a GPU, and how much memory it may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmq.errors import ConfigError, LlmqError
from llmq.runtime.device import HOST_SPEC, Device, DeviceSpec, MemorySizes

MIB = 1 << 20

# A card that `llmq plan` assumes where none is named: enough multiprocessors that no real card
# needs larger workspaces (an RTX PRO 6000 has 188), and the largest workspace for the library.
PLAN_SPEC = DeviceSpec(
    name="any GPU", capability=90, num_sms=192, memory=0, library_workspace=32 * MIB
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A chosen kind of device.

    kind: "host" or "cuda". note: one line for the user on why, or None.
    """

    kind: str
    spec: DeviceSpec
    note: str | None

    def open(self, sizes: MemorySizes, *, graphs: bool = True, tune: bool = True) -> Device:
        """The device of a rank with the sizes of a plan; LlmqError if it has too little memory.

        graphs, tune: --use-cuda-graphs and --tune, which mean nothing on the CPU.
        """
        if self.kind == "host":
            return _open_host(sizes)
        from llmq.runtime.cuda_device import CudaDevice

        return CudaDevice(0, sizes, graphs=graphs, tune=tune)


def check_ranks(gpus: int) -> None:
    """ConfigError for a number of ranks (--gpus, 0: all there are) that cannot be had."""
    if gpus > 1:
        raise ConfigError(f"--gpus: {gpus} ranks are not supported yet, use --gpus 1")


def choose_machine(device: str, gpus: int) -> Machine:
    """device: "auto", "cpu" or "cuda". gpus: ranks, 0 for all there are.

    Raises LlmqError when what is asked for is not there; the message says why and what to do.
    """
    check_ranks(gpus)
    if device == "cpu":
        return Machine(kind="host", spec=HOST_SPEC, note=None)
    from llmq.runtime import cuda_device

    if device == "auto":
        reason = cuda_device.unusable_reason(0)
        if reason is not None:
            note = f"Running on the CPU, meant for small models ({reason})."
            return Machine(kind="host", spec=HOST_SPEC, note=note)
    return Machine(kind="cuda", spec=cuda_device.device_spec(0), note=None)


def _open_host(sizes: MemorySizes) -> Device:
    from llmq.runtime.host_device import HostDevice

    needed, available = sizes.device + sizes.stack + sizes.pinned, available_host_memory()
    if needed > available:  # the system would promise more than it has, and kill us later
        raise LlmqError(
            f"out of memory: {needed // MIB} MiB are needed, {available // MIB} MiB of host memory "
            "are available: close other programs, or use a smaller model"
        )
    return HostDevice(sizes)


def host_memory() -> tuple[int, int]:
    """Bytes of host memory that are free or can be freed, and bytes in all."""
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024, _total_host_memory()
    return _total_host_memory(), _total_host_memory()  # no Linux: all of it


def _total_host_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_host_memory() -> int:
    """Bytes that this process may still take: free memory, or less under a cgroup's limit."""
    return min([host_memory()[0], *_cgroup_headrooms()])


def _cgroup_headrooms(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """What each memory limit above this process leaves; file caches count as free."""
    for line in _lines(membership):
        _, controllers, group = line.split(":", 2)
        if controllers == "":  # version 2
            root, limit, used, cache = mount, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, cache = mount / "memory", "total_inactive_file"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # Inside a container the group may be named as the host sees it, but be mounted as the root.
        inner = root / group.lstrip("/")
        for folder in (inner, *inner.parents):
            most, current = _lines(folder / limit), _lines(folder / used)
            if most and current and most[0].isdigit():
                stats = dict(s.split(maxsplit=1) for s in _lines(folder / "memory.stat"))
                yield max(int(most[0]) - int(current[0]) + int(stats.get(cache, 0)), 0)
            if folder == root:
                break


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
