"""How busy the CPUs are, and how much memory is in use, as /proc tells it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from llmq.runtime.host_memory import host_memory

UNSUPPORTED = -1
_IDLE = (3, 4)  # places of idle and iowait among the times of a CPU


class HostUsage:
    """The CPUs that this process may use, and the memory of the machine."""

    def __init__(self, stat: Path = Path("/proc/stat")):
        self._stat = stat
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

    def _times(self) -> tuple[int, int]:
        """Ticks that these CPUs were busy, and in all."""
        busy = total = 0
        for times in self._rows():
            total += sum(times)
            busy += sum(times) - sum(times[i] for i in _IDLE if i < len(times))
        return busy, total

    def _rows(self) -> Iterator[list[int]]:
        names = {f"cpu{number}" for number in allowed_cpus()}
        try:
            lines = self._stat.read_text().splitlines()
        except OSError:  # no Linux
            return
        for line in lines:
            name, *times = line.split()
            if name in names:
                yield [int(text) for text in times[:8]]  # the last two are in the first two


def allowed_cpus() -> set[int]:
    """Numbers of the CPUs that this process may run on."""
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # no Linux
        return set(range(os.cpu_count() or 1))
