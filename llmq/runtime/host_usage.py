"""The load of the CPUs, the memory of the host, and the memory that a process may still take."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil


def host_memory() -> tuple[int, int]:
    """Return (available, total) bytes of host memory; available memory includes caches that can be
    freed."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def available_host_memory() -> int:
    """Return the bytes that this process may still take: the host's available memory, or less if a
    cgroup limits the process."""
    return min([host_memory()[0], *_cgroup_headrooms()])


def _cgroup_headrooms(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """Yield the bytes left under each cgroup memory limit that applies to this process; file caches
    count as free."""
    for line in _lines(membership):
        _, controllers, group = line.split(":", 2)
        if controllers == "":  # cgroups version 2
            root, limit, used, cache = mount, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, cache = mount / "memory", "total_inactive_file"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # A container may read the host's name of its cgroup, although the cgroup is mounted as the
        # root.
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


UNSUPPORTED = -1
_TIMES = ("user", "nice", "system", "irq", "softirq", "steal", "idle", "iowait")
_IDLE = ("idle", "iowait")


class HostUsage:
    """Readings of the CPUs that this process may use and of the machine's memory."""

    def __init__(self) -> None:
        self._before = self._times()

    def read(self) -> dict[str, int]:
        """Return a reading as a dictionary. cpus: number of CPUs that this process may use. util:
        percent of the CPUs' time in use since the last reading, or UNSUPPORTED. memory_used,
        memory_total: bytes of the machine's memory."""
        times, before = self._times(), self._before
        busy, total = (now - then for now, then in zip(times, before, strict=True))
        available, memory = host_memory()
        if total > 0:
            self._before = times
        return {
            "cpus": len(allowed_cpus()),
            "util": round(100 * busy / total) if total > 0 else UNSUPPORTED,
            "memory_used": memory - available,
            "memory_total": memory,
        }

    def _times(self) -> tuple[float, float]:
        """Return (busy, total) seconds since boot, summed over the CPUs that this process may
        use."""
        allowed, busy, total = allowed_cpus(), 0.0, 0.0
        try:
            cpus = psutil.cpu_times(percpu=True)
        except OSError:  # a sandbox may hide the times
            cpus = []
        for number, times in enumerate(cpus):
            if number in allowed:
                seconds = {name: getattr(times, name, 0.0) for name in _TIMES}
                total += sum(seconds.values())
                busy += sum(s for name, s in seconds.items() if name not in _IDLE)
        return busy, total


def allowed_cpus() -> set[int]:
    """Return the numbers of the CPUs that this process may run on."""
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # only Linux has sched_getaffinity
        return set(range(os.cpu_count() or 1))
