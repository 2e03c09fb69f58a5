"""How much host memory there is, and how much of it this process may still take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil


def host_memory() -> tuple[int, int]:
    """Bytes of host memory that are free or can be freed, and bytes in all."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def available_host_memory() -> int:
    """Bytes that this process may still take: free memory, or less under a cgroup's limit."""
    return min([host_memory()[0], *_cgroup_headrooms()])


def _cgroup_headrooms(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """The bytes that each memory limit above this process leaves; file caches count as free."""
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
