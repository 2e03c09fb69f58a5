"""The memory that a run needs of a machine, and the memory that it may take; [Allocator State]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmq.base.dtypes import MIB
from llmq.base.errors import ConfigError, LlmqError
from llmq.base.tensor import TIERS
from llmq.options.cards import is_data_center
from llmq.options.options import TrainConfig
from llmq.plan.plan import Plan, Usage
from llmq.runtime.device import HOST_SPEC, DeviceSpec
from llmq.runtime.host_usage import available_host_memory
from llmq.runtime.machine import Machine


class OutOfMemory(LlmqError):
    """A plan that does not fit; the details are what would make it fit, with a whole command."""


# CUDA takes this beside the arena: context, kernels, cuBLASLt and cuDNN. Measured on an H100 with
# driver 580: 537 MiB in a run of the 0.5B preset.
CONTEXT_BYTES = 540 * MIB
# NCCL 2.28 takes this on each of four H200, with the channels of comm/nccl.py. A communicator
# across machines is taken to need as much, which was not measured.
NCCL_BYTES = 930 * MIB


def mib(size: int) -> str:
    """Bytes that are needed, for people: rounded up, so that never less seems to be needed."""
    return f"{-(-size // MIB)} MiB"


def room(size: int) -> str:
    """Bytes that are there, for people: rounded down."""
    return f"{size // MIB} MiB"


def needed_bytes(plan: Plan, spec: DeviceSpec) -> int:
    """The bytes that must fit into the device's memory. On the CPU pinned memory is the same
    memory."""
    if spec == HOST_SPEC:
        return plan.usage.device_bytes + plan.usage.sizes.host
    beside = CONTEXT_BYTES + plan.communicators * NCCL_BYTES
    return plan.usage.device_bytes + beside + page_tables(plan.host_bytes, spec)


def page_tables(pinned: int, spec: DeviceSpec) -> int:
    """Bytes in which each GPU keeps where the pinned memory of its machine lies: 8 per 4 KiB."""
    return 0 if spec == HOST_SPEC else pinned // 512


# A desktop wants this of a card's memory: windows, and a browser that is opened later.
DESKTOP_BYTES = 512 * MIB


def kept_free(name: str, available: int, asked: int | None, *, drives_display: bool = False) -> int:
    """Bytes that a search leaves free of what is available on a card of this name: --reserve.
    asked: the option's value. None: room for a desktop, unless the card is made for servers and
    drives no display. ConfigError if what is asked for leaves nothing."""
    if asked is None:
        needs_room = drives_display or not is_data_center(name)
        return min(DESKTOP_BYTES, available) if needs_room else 0
    if asked >= available:
        raise ConfigError(
            f"--reserve: {asked // MIB} MiB leave nothing of the {available // MIB} MiB that are "
            "available"
        )
    return asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes that a run may take: of each rank's device memory, and of a machine's host memory.
    None: there is nothing to compare with. On the CPU device holds everything."""

    device: int | None = None
    host: int | None = None

    def excess(self, device: int, host: int) -> int:
        """Bytes too many, of both kinds together; 0: it fits."""
        pairs = ((device, self.device), (host, self.host))
        return sum(max(n - limit, 0) for n, limit in pairs if limit is not None)

    def less(self, size: int) -> Limits:
        """With so many bytes less of both kinds."""
        kinds = (self.device, self.host)
        device, host = (None if limit is None else max(limit - size, 0) for limit in kinds)
        return Limits(device=device, host=host)


# Host memory of a run beside what is pinned, an estimate: interpreter and CUDA's libraries, and the
# driver's of each GPU.
PROCESS_BYTES, DRIVER_BYTES = 2 << 30, 512 * MIB


def memory_limit(config: TrainConfig, machine: Machine) -> Limits:
    """The memory that a run may take on this machine."""
    if machine.kind == "host":
        available, host = available_host_memory() // machine.world.ranks_here, None
    else:
        available = machine.spec.memory
        others = PROCESS_BYTES + DRIVER_BYTES * machine.world.ranks_here
        host = max(available_host_memory() - others, 0)
    return Limits(device=min(available, config.memory_limit or available), host=host)


def allocator_rows(usage: Usage, others: dict[str, int] | None = None) -> list[dict[str, Any]]:
    """[Allocator State] for programs: bytes of each category by kind of memory. others: rows that
    are not the trainer's, such as "Free", and their device memory."""
    rows = []
    for name in dict.fromkeys(name for place in TIERS for name in usage.categories[place]):
        device, *host = (usage.categories[place].get(name, 0) for place in TIERS)
        rows.append(_row(name, device, sum(host)))
    return rows + [_row(name, size, 0) for name, size in (others or {}).items()]


def _row(name: str, device: int, pinned: int) -> dict[str, Any]:
    """In llm.q's columns, two of which are never used here."""
    return {"name": name, "device": device, "managed": 0, "pinned": pinned, "pageable": 0}


def allocator_table(usage: Usage, others: dict[str, int] | None = None) -> list[str]:
    """The lines of [Allocator State], in MiB: rows as above, then the stack at its highest."""
    lines = [f" {'in MiB':>17}  Device | Managed | Pinned "]
    for row in allocator_rows(usage, others):
        device, managed, pinned = (row[kind] // MIB for kind in ("device", "managed", "pinned"))
        lines.append(f"  {row['name']:>16}: {device:6d} | {managed:7d} | {pinned:6d} ")
    stack = [(name, size // MIB) for name, size in usage.stack if size >= MIB]
    if stack:
        lines.append("")
    return lines + [f"  {'stack.' + name:>16}: {size:6d} " for name, size in stack]
