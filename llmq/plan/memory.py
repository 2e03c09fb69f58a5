"""Memory and disk space that a run needs, memory that it may take, and the table [Allocator
State]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import E4M3, F32, MIB, parse_dtype
from llmq.base.errors import ConfigError, LlmqError
from llmq.base.tensor import host_tiers
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
    """The error for a plan that does not fit; its details advise changes, with a whole command."""


# CUDA's memory beside the arena: context, kernels, cuBLASLt and cuDNN. Measured on an H100 with
# driver 580: 537 MiB in a run of the 0.5B preset.
CONTEXT_BYTES = 540 * MIB
# NCCL 2.28's memory on each of four H200, with the channels of comm/nccl.py. A communicator across
# machines is taken to need as much, which was not measured.
NCCL_BYTES = 930 * MIB


def mib(size: int) -> str:
    """Needed bytes as text in MiB, rounded up so that the need never looks smaller."""
    return f"{-(-size // MIB)} MiB"


def room(size: int) -> str:
    """Available bytes as text in MiB, rounded down."""
    return f"{size // MIB} MiB"


def needed_bytes(plan: Plan, spec: DeviceSpec) -> int:
    """Bytes that must fit into the device's memory. On the CPU pinned memory is the same memory."""
    if spec == HOST_SPEC:
        return plan.usage.device_bytes + plan.usage.sizes.host
    beside = CONTEXT_BYTES + plan.communicators * NCCL_BYTES
    return plan.usage.device_bytes + beside + page_tables(plan.host_bytes, spec)


def page_tables(pinned: int, spec: DeviceSpec) -> int:
    """Bytes of each GPU's page table for its machine's pinned memory: 8 bytes for 4 KiB."""
    return 0 if spec == HOST_SPEC else pinned // 512


# Room for a desktop in a card's memory: windows, and a browser opened later.
DESKTOP_BYTES = 512 * MIB


def kept_free(name: str, available: int, asked: int | None, *, drives_display: bool = False) -> int:
    """Bytes of the `available` memory that a search leaves free on a card of this name (--reserve).
    asked: the option's value; None: room for a desktop, unless the card is made for servers and
    drives no display. ConfigError if nothing would be left."""
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
    """Bytes that a run may take of each rank's device memory, and of a machine's host memory. None:
    no limit is known. On the CPU `device` covers everything."""

    device: int | None = None
    host: int | None = None

    def excess(self, device: int, host: int) -> int:
        """Bytes over the limits, of both memories together; 0 if it fits."""
        pairs = ((device, self.device), (host, self.host))
        return sum(max(n - limit, 0) for n, limit in pairs if limit is not None)

    def less(self, size: int) -> Limits:
        """Return both limits lowered by `size` bytes."""
        kinds = (self.device, self.host)
        device, host = (None if limit is None else max(limit - size, 0) for limit in kinds)
        return Limits(device=device, host=host)


# Estimated host memory of a run beside pinned memory: PROCESS_BYTES for the interpreter and CUDA
# libraries, DRIVER_BYTES for the driver of each GPU.
PROCESS_BYTES, DRIVER_BYTES = 2 << 30, 512 * MIB


def memory_limit(config: TrainConfig, machine: Machine) -> Limits:
    """Return the memory that a run may take on this machine."""
    if machine.kind == "host":
        available, host = available_host_memory() // machine.world.ranks_here, None
    else:
        available = machine.spec.memory
        others = PROCESS_BYTES + DRIVER_BYTES * machine.world.ranks_here
        host = max(available_host_memory() - others, 0)
    return Limits(device=min(available, config.memory_limit or available), host=host)


def allocator_rows(usage: Usage, others: dict[str, int] | None = None) -> list[dict[str, Any]]:
    """[Allocator State] for programs: bytes of each category by kind of memory. others: device
    bytes of rows beyond the trainer's, such as "Free"."""
    rows = []
    places = ("device", *host_tiers())
    for name in dict.fromkeys(name for place in places for name in usage.categories[place]):
        device, *host = (usage.categories[place].get(name, 0) for place in places)
        rows.append(_row(name, device, sum(host)))
    return rows + [_row(name, size, 0) for name, size in (others or {}).items()]


def _row(name: str, device: int, pinned: int) -> dict[str, Any]:
    """A row in llm.q's columns, two of which are always 0 here."""
    return {"name": name, "device": device, "managed": 0, "pinned": pinned, "pageable": 0}


def allocator_table(usage: Usage, others: dict[str, int] | None = None) -> list[str]:
    """Lines of [Allocator State], in MiB: the rows of allocator_rows, then the stack at its
    peak."""
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
    """Bytes of tensors on the disk. All other files but the tokenizer's take some KiB. checkpoint:
    bytes of one checkpoint. kept: number of checkpoints at the end. every: number of steps after
    which `kept` grows by one, if only the data tell the number of steps; None if `kept` is final.
    deletes: True if older checkpoints are deleted, each after the next one is complete. model:
    bytes of the exported model. at_most: True with --keep-best: `kept` and `every` are limits,
    because evaluations decide which checkpoints stay."""

    checkpoint: int
    kept: int
    every: int | None
    deletes: bool
    model: int
    at_most: bool

    @property
    def total(self) -> int | None:
        """Bytes of everything that stays; None if it grows with the number of steps."""
        return self.kept * self.checkpoint + self.model if self.every is None else None

    def record(self) -> dict[str, int | None]:
        """The facts for programs."""
        return {
            "checkpoint_bytes": self.checkpoint,
            "checkpoints_kept": None if self.every else self.kept,
            "model_bytes": self.model,
            "disk_bytes": self.total,
        }

    def facts(self) -> dict[str, str]:
        """The facts for people."""
        most = "at most " if self.at_most else ""
        kept = [f"{most}{self.kept} checkpoint{'s' * (self.kept != 1)}"] if self.kept else []
        grows = [f"{most}one checkpoint every {self.every} steps"] if self.every else []
        parts = ", ".join([*kept, *grows, f"the model ({mib(self.model)})"])
        total = "" if self.total is None else f"{mib(self.total)}: "
        peak = "; one more checkpoint while it is written" if self.deletes else ""
        return {"Checkpoint": mib(self.checkpoint), "On disk": f"{total}{parts}{peak}"}


RATED = 600e12  # bytes that makers promise of a consumer's disk of 1 TB (TBW)


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdUse:
    """Scratch files of a machine's ranks: bytes of the files, and bytes that a step reads and
    writes."""

    nbytes: int
    read: int
    written: int

    @classmethod
    def of(cls, plan: Plan) -> SsdUse | None:
        """Return the use of a plan; None if nothing lies in files."""
        nbytes = plan.usage.sizes["ssd"] * (plan.gpus or plan.world_size)
        if not nbytes:
            return None
        read, written = plan.ssd_traffic()
        return cls(nbytes=nbytes, read=read, written=written)

    def words(self, seconds: float | None) -> str:
        """The use in words. seconds: duration of a step; None if unknown."""
        size, read, written = (
            f"{n / 2**30:.1f} GiB" for n in (self.nbytes, self.read, self.written)
        )
        told = f"{size} of scratch files; a step reads {read} and writes {written}"
        if seconds is None:
            return told
        daily = self.written / seconds * 86400
        days = f"a disk rated for {RATED / 1e12:.0f} TB lasts {RATED / daily:,.0f} days"
        return f"{told}; writes {daily / 1e12:.1f} TB a day: {days}"


def disk_use(config: TrainConfig, model: ModelConfig, placement: Placement) -> DiskUse:
    """Return the disk use of a run with these options, for any number of ranks."""
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
    """Bytes of one checkpoint's tensors: master weights (all in their widest format), moments of
    trained parameters, scales of 8-bit moments, and states of whole matrices. With adapters only
    tensors of adapters and other trained parameters count."""
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
        for state in rule_class(config.optimizer).matrix_states if stores.by_matrix else ():
            dtype = state.format(config, stores.gradient.dtype)
            for param in state.slab(config, slab).params:
                total += dtype.itemsize * stored_values(state.group, param)
                if dtype == E4M3:
                    total += F32.itemsize * stored_values(state.scales_group, param)
    return total


def _checkpoints(config: TrainConfig) -> tuple[int, int | None, bool]:
    """Number of checkpoints that stay, DiskUse.every and DiskUse.deletes; with --keep-best the
    number is an upper bound. Checkpoints are written at multiples of the interval before the last
    step, at evaluations of --keep-best, and at the last step (training state)."""
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
    before = _multiples(steps - 1, periods) + (best is not None and config.eval_at_start)
    wanted = before > 0 if config.save_training_state is None else config.save_training_state
    last = int(wanted or best is not None)
    written = last + before
    majors = last * (major > 0 and steps % major == 0) + _multiples(steps - 1, of_majors)
    gone = max(written - majors - stay, 0) if keep > 0 else 0
    if gone > 0:
        gone = max(gone - _spared(rule, periods, steps, last), 0)
    return written - gone, None, gone > 0


def _spared(keep: Keep, periods: list[int], steps: int, last: int) -> int:
    """Number of checkpoints that stay beside the newest and the major ones, at the end of `steps`
    steps."""
    count, found = 2 * (keep.newest + PROVEN), {steps} if last else set()
    for period in periods:
        newest = (steps - 1) // period
        found |= {period * i for i in range(max(newest - count, 0) + 1, newest + 1)}
    written = sorted(found)[-count:]
    minors = len(keep.minors(written))
    return max(len(left_at_end(written, keep)) - min(keep.newest, minors), 0)


def _multiples(last: int, periods: list[int]) -> int:
    """Number of steps from 1 to `last` that are multiples of one or two periods."""
    both = last // math.lcm(*periods) if len(periods) == 2 else 0
    return sum(last // period for period in periods) - both
