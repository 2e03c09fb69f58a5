"""Keep a thread, and with it the memory that it touches first, near a GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

DEVICES = Path("/sys/bus/pci/devices")


def parse_cpus(text: str) -> set[int]:
    """The CPUs that the kernel's lists name, such as 0-3,8,10-11."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def use_all_cpus(environment: Mapping[str, str] = os.environ) -> None:
    """Let a process that Open MPI's mpirun has started, and what it starts, run on all CPUs.

    mpirun lets a process run on a single core, if nobody says otherwise, where all ranks' threads
    and the readers of data would have to share it. A limit of the system itself stays.
    """
    if "OMPI_COMM_WORLD_SIZE" in environment:
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))


def stay_near(bus_id: str, devices: Path = DEVICES) -> None:
    """Let the calling thread, and those that it starts, run only on the CPUs next to a GPU.

    bus_id: the GPU's place, such as 0000:19:00.0. Where the system does not tell or does not
    permit it, or none of those CPUs is ours, nothing changes: it is only about speed.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no Linux: no sched_…
        near = parse_cpus((devices / bus_id.lower() / "local_cpulist").read_text())
        ours = near & os.sched_getaffinity(0)
        if ours:
            os.sched_setaffinity(0, ours)
