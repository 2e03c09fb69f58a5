"""The memory and the disk space that a run needs, and the memory that it may take;
[Allocator State]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import F32, MIB, parse_dtype
from llmq.base.errors import ConfigError, LlmqError
from llmq.base.tensor import TIERS
from llmq.checkpoint.checkpoint import stored_values
from llmq.checkpoint.states import PROVEN, Keep, left_at_end
from llmq.options.cards import is_data_center
from llmq.options.options import TrainConfig
from llmq.plan.plan import Plan, Usage
from llmq.runtime.device import HOST_SPEC, DeviceSpec
from llmq.runtime.host_usage import available_host_memory
from llmq.runtime.machine import Machine
from llmq.state.params import parameter_count
from llmq.state.placement import Placement, table_of, trained_count
from llmq.state.rules import kept, rule_class
from llmq.state.rules.rule import SCALES


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


# ------------------------------------------------------------------------------------------------
# The disk


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """Bytes on the disk, of tensors: what is beside them are some KiB and the tokenizer's files.
    checkpoint: of one. kept: checkpoints that are there in the end. every: None, or that kept grows
    by one after so many steps, the number of which only the data tells. deletes: whether older ones
    are deleted, each of which is there until the next one is complete. model: of the exported one.
    at_most: with --keep-best, where the numbers decide how often there is a better one."""

    checkpoint: int
    kept: int
    every: int | None
    deletes: bool
    model: int
    at_most: bool

    @property
    def total(self) -> int | None:
        """The size of all that stays; None if it grows with the number of steps."""
        return self.kept * self.checkpoint + self.model if self.every is None else None

    def record(self) -> dict[str, int | None]:
        """For programs."""
        return {
            "checkpoint_bytes": self.checkpoint,
            "checkpoints_kept": None if self.every else self.kept,
            "model_bytes": self.model,
            "disk_bytes": self.total,
        }

    def facts(self) -> dict[str, str]:
        """For people."""
        most = "at most " if self.at_most else ""
        kept = [f"{most}{self.kept} checkpoint{'s' * (self.kept != 1)}"] if self.kept else []
        grows = [f"{most}one checkpoint every {self.every} steps"] if self.every else []
        parts = ", ".join([*kept, *grows, f"the model ({mib(self.model)})"])
        total = "" if self.total is None else f"{mib(self.total)}: "
        peak = "; one more checkpoint while it is written" if self.deletes else ""
        return {"Checkpoint": mib(self.checkpoint), "On disk": f"{total}{parts}{peak}"}


def disk_use(config: TrainConfig, model: ModelConfig, placement: Placement) -> DiskUse:
    """The disk use of a run with these options, whatever the number of its ranks."""
    kept, every, deletes = _checkpoints(config)
    exported = parameter_count(model) * parse_dtype(config.model_dtype).itemsize
    if config.has_adapters:
        exported = trained_count(config, model) * parse_dtype(config.master_dtype).itemsize
    return DiskUse(
        checkpoint=checkpoint_bytes(config, model, placement),
        kept=kept,
        every=every,
        deletes=deletes,
        model=exported,
        at_most=config.keep_best is not None,
    )


def checkpoint_bytes(config: TrainConfig, model: ModelConfig, placement: Placement) -> int:
    """Bytes of the tensors of one checkpoint: master weights, all in the widest of their formats,
    moments of trained parameters, scales of 8-bit moments, and numbers of rows. With adapters, only
    tensors of the adapters and of other trained parameters."""
    table, masters = table_of(config, model), []
    if config.has_adapters:
        table = tuple(slab for slab in table if placement[slab.name].trainable)
    for slab in table:
        stores = placement[slab.name]
        masters.append((stores.master or stores.part or stores.work).dtype.itemsize)
    total = max(masters) * sum(stored_values("weights", p) for slab in table for p in slab.params)
    for slab in table:
        stores = placement[slab.name]
        for moment in kept(config):
            store = stores.moments.get(moment.name)
            for param in slab.params if store else ():
                total += store.dtype.itemsize * stored_values(moment.group, param)
                if store.is_scaled:
                    total += F32.itemsize * stored_values(f"{moment.group}{SCALES}", param)
        if stores.by_matrix and rule_class(config.optimizer).keeps_rows:
            total += F32.itemsize * sum(param.rows for param in slab.params)
    return total


def _checkpoints(config: TrainConfig) -> tuple[int, int | None, bool]:
    """How many stay, DiskUse.every, and whether older ones go; at most, where the best is kept.
    They are written at multiples of the interval before the last step, where what --keep-best names
    is measured, and (training state) at the last step."""
    keep, best = config.ckpt_keep_n, config.keep_best
    periods = [config.ckpt_interval]
    if best is not None:
        periods.append(config.eval_every_n_steps if best.endswith("loss") else config.task_every)
    periods = [period for period in periods if period > 0]
    major = config.ckpt_major if config.ckpt_major > 0 else 0
    of_majors = [math.lcm(period, major) for period in periods] if major else []
    rule = Keep.of(config)
    stay = keep + (best is not None)
    if config.steps < 0 and periods:
        if keep <= 0:
            return 0, math.gcd(*periods), False
        end = max(periods) * (keep + PROVEN) + 1
        spared = _spared(rule, periods, end, last=1)
        return stay + spared, math.gcd(*of_majors) if major else None, True
    steps = max(config.steps, 1)
    last = int(config.save_training_state or best is not None)
    written = last + _multiples(steps - 1, periods) + (best is not None and config.eval_at_start)
    majors = last * (major > 0 and steps % major == 0) + _multiples(steps - 1, of_majors)
    gone = max(written - majors - stay, 0) if keep > 0 else 0
    if gone > 0:
        gone = max(gone - _spared(rule, periods, steps, last), 0)
    return written - gone, None, gone > 0


def _spared(keep: Keep, periods: list[int], steps: int, last: int) -> int:
    """How many stay beside the newest ones and majors, at the end of so many steps."""
    count, found = 2 * (keep.newest + PROVEN), {steps} if last else set()
    for period in periods:
        newest = (steps - 1) // period
        found |= {period * i for i in range(max(newest - count, 0) + 1, newest + 1)}
    written = sorted(found)[-count:]
    minors = len(keep.minors(written))
    return max(len(left_at_end(written, keep)) - min(keep.newest, minors), 0)


def _multiples(last: int, periods: list[int]) -> int:
    """How many of the steps 1 to last are multiples of one or two periods."""
    both = last // math.lcm(*periods) if len(periods) == 2 else 0
    return sum(last // period for period in periods) - both
