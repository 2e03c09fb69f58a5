"""The disk space of a run: the size of a checkpoint, and of all that stays."""

import math
from dataclasses import dataclass

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import F32, parse_dtype
from llmq.checkpoint.checkpoint import stored_values
from llmq.checkpoint.store import PROVEN, left_at_end
from llmq.options.options import TrainConfig
from llmq.plan.memory import mib
from llmq.state.params import parameter_count
from llmq.state.placement import Placement, table_of, trained_count
from llmq.state.rules import kept, rule_class
from llmq.state.rules.rule import SCALES


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
    interval = config.ckpt_interval if config.guard == "rollback" else 0
    stay = keep + (best is not None)
    if config.steps < 0 and periods:
        if keep <= 0:
            return 0, math.gcd(*periods), False
        end = max(periods) * (keep + PROVEN) + 1
        spared = _spared(keep, periods, major, interval, end, last=1)
        return stay + spared, math.gcd(*of_majors) if major else None, True
    steps = max(config.steps, 1)
    last = int(config.save_training_state or best is not None)
    written = last + _multiples(steps - 1, periods) + (best is not None and config.eval_at_start)
    majors = last * (major > 0 and steps % major == 0) + _multiples(steps - 1, of_majors)
    gone = max(written - majors - stay, 0) if keep > 0 else 0
    if gone > 0:
        gone = max(gone - _spared(keep, periods, major, interval, steps, last), 0)
    return written - gone, None, gone > 0


def _spared(keep: int, periods: list[int], major: int, interval: int, steps: int, last: int) -> int:
    """How many stay beside the newest ones and majors, at the end of so many steps."""
    count, found = 2 * (keep + PROVEN), {steps} if last else set()
    for period in periods:
        newest = (steps - 1) // period
        found |= {period * i for i in range(max(newest - count, 0) + 1, newest + 1)}
    written = sorted(found)[-count:]
    minors = len([step for step in written if major <= 0 or step % major])
    return max(len(left_at_end(written, keep, major, interval)) - min(keep, minors), 0)


def _multiples(last: int, periods: list[int]) -> int:
    """How many of the steps 1 to last are multiples of one or two periods."""
    both = last // math.lcm(*periods) if len(periods) == 2 else 0
    return sum(last // period for period in periods) - both
