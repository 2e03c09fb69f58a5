"""How busy the CPUs are, and how much memory is in use."""

from __future__ import annotations

import os

import psutil

from llmq.runtime.host_memory import host_memory

UNSUPPORTED = -1
_TIMES = ("user", "nice", "system", "irq", "softirq", "steal", "idle", "iowait")
_IDLE = ("idle", "iowait")


class HostUsage:
    """The CPUs that this process may use, and the memory of the machine."""

    def __init__(self) -> None:
        self._before = self._times()

    def read(self) -> dict[str, int]:
        """cpus: how many this process may use. util: percent of their time since the last reading,
        UNSUPPORTED where it is not told; memory_used, memory_total: bytes.
        """
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
        """Seconds that these CPUs were busy, and in all."""
        allowed, busy, total = allowed_cpus(), 0.0, 0.0
        try:
            cpus = psutil.cpu_times(percpu=True)
        except OSError:  # a sandbox may hide it
            cpus = []
        for number, times in enumerate(cpus):
            if number in allowed:
                seconds = {name: getattr(times, name, 0.0) for name in _TIMES}
                total += sum(seconds.values())
                busy += sum(s for name, s in seconds.items() if name not in _IDLE)
        return busy, total


def allowed_cpus() -> set[int]:
    """Numbers of the CPUs that this process may run on."""
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # no Linux
        return set(range(os.cpu_count() or 1))
