"""Gradients: summed over the micro-steps of an optimizer step, and over the ranks into shards.

They hold the gradient of the SUM of token losses; global_norm divides once, by the number of
target tokens of the whole step.

    whole      a slab's gradients are resident; reduced on the comm stream in the last micro-step
    streamed   (--shard-gradients) blocks take turns in two slots; in every micro-step a slot is
               reduced and added to the rank's shard, which may be in host memory
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmq.dtypes import DType
from llmq.ops import reduce
from llmq.params import Slab
from llmq.runtime.device import Device
from llmq.runtime.tensor import Accumulator, Tensor

SLOTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientOptions:
    """dtype: F32 or BF16. shard: blocks are streamed. place: of their shards.

    all_to_all: ranks exchange parts and sum them here, else the library reduces.
    """

    dtype: DType
    shard: bool = False
    place: str = "device"
    all_to_all: bool = False


class Gradients:
    """start_micro_step -> full(block) … notify(block) -> end_micro_step, for every micro-step.

    shard[name]: this rank's elements of a slab's gradients, complete after the last micro-step.
    """

    def __init__(
        self, dev: Device, table: tuple[Slab, ...], options: GradientOptions, scalars: Tensor
    ):
        self.dev, self.options, self.scalars = dev, options, scalars
        self.slabs = {slab.name: slab for slab in table}
        self.shard: dict[str, Tensor] = {}
        self._whole: dict[str, Tensor] = {}
        streams = options.shard and (dev.world_size > 1 or options.place != "device")
        for slab in table:
            if not (slab.is_block and streams):
                self._whole[slab.name] = self._alloc(f"{slab.name}.grad", slab.size)
                self.shard[slab.name] = slab.shard(self._whole[slab.name], dev.rank)
            else:
                args = (f"{slab.name}.grad", slab.shard_size)
                self.shard[slab.name] = self._alloc(*args, place=options.place)
        streamed = max((s.size for s in table if s.name not in self._whole), default=0)
        count = SLOTS if streamed else 0
        self._slots = [self._alloc(f"grad.slot.{i}", streamed) for i in range(count)]
        self._computed = dev.event()
        self._reduced = [dev.event() for _ in range(count)]
        spare = max(slab.shard_size for slab in table)
        self._spare = (
            self._alloc("grad.spare", spare) if options.all_to_all and dev.world_size > 1 else None
        )
        self._done = dev.event()
        self._open = False

    def _alloc(self, name: str, size: int, place: str = "device") -> Tensor:
        """Zeros: the gaps between parameters count in the norm."""
        tensor = self.dev.alloc(name, (size,), self.options.dtype, "Gradients", place)
        self.dev.zero(tensor)
        return tensor

    def start_micro_step(self, accumulate: bool, last: bool) -> None:
        """accumulate False: the first of a step, gradients are overwritten. last: they get reduced.

        Both are a part of the graph's key.
        """
        if self._open:
            raise AssertionError("grads: start_micro_step inside a micro-step")
        self._open, self._accumulate, self._last = True, accumulate, last
        self._turn = 0
        self._slot_of: dict[str, int] = {}
        if not accumulate:
            for name, whole in self._whole.items():
                self._zero_gaps(self.slabs[name], whole)

    def full(self, block: str) -> dict[str, Accumulator]:
        """Where the gradients of a block's parameters go in this micro-step, by key."""
        if not self._open:
            raise AssertionError(f"grads: full({block!r}) outside of a micro-step")
        where: dict[str, Accumulator] = {}
        for name in ("vectors", block):
            if name in self._whole:
                where |= self._accumulators(block, name, self._whole[name], self._accumulate)
        if block in self.slabs and block not in self._whole:
            index = self._take_slot(block)
            slot = self._slots[index].rows(0, self.slabs[block].size)
            self._zero_gaps(self.slabs[block], slot)
            where |= self._accumulators(block, block, slot, False)
        return where

    def _accumulators(
        self, block: str, name: str, tensor: Tensor, accumulate: bool
    ) -> dict[str, Accumulator]:
        slab = self.slabs[name]
        return {
            p.key: Accumulator(slab.view(tensor, p), accumulate, self.scalars, p.index)
            for p in slab.params
            if p.block == block
        }

    def _take_slot(self, block: str) -> int:
        """The slot of a block; before another block gets it, its last one must be reduced."""
        if block not in self._slot_of:
            index, self._turn = self._turn, (self._turn + 1) % SLOTS
            if index in self._slot_of.values():
                self.dev.wait(self._reduced[index])
                self._slot_of = {b: i for b, i in self._slot_of.items() if i != index}
            self._slot_of[block] = index
        return self._slot_of[block]

    def _zero_gaps(self, slab: Slab, tensor: Tensor) -> None:
        """Reductions leave anything in the parts of a slab that are not the rank's own."""
        if self.dev.world_size > 1:
            for start, stop in slab.gaps():
                self.dev.zero(tensor.rows(start, stop))

    def notify(self, block: str) -> None:
        """Say that the block's gradients of this micro-step are enqueued; reduction may start."""
        if not self._open:
            raise AssertionError(f"grads: notify({block!r}) outside of a micro-step")
        if block in self._slot_of:
            self._on_comm(block, self._add_to_shard)
        elif block in self._whole and self._last and self.dev.world_size > 1:
            self._on_comm(block, self._reduce_whole)

    def _on_comm(self, block: str, work: Callable[[Slab], None]) -> None:
        self.dev.record(self._computed)
        with self.dev.on("comm"):
            self.dev.wait(self._computed)
            work(self.slabs[block])

    def _reduce_whole(self, slab: Slab) -> None:
        whole = self._whole[slab.name]
        if self._spare is None:
            self.dev.comm.reduce_scatter(whole)
        else:
            self._sum(slab, whole, accumulate=False)

    def _add_to_shard(self, slab: Slab) -> None:
        index = self._slot_of[slab.name]
        slot = self._slots[index].rows(0, slab.size)
        if self._spare is not None:
            self._sum(slab, slot, accumulate=self._accumulate)
        else:
            if self.dev.world_size > 1:
                self.dev.comm.reduce_scatter(slot)
            self._add(slab, [slab.shard(slot, self.dev.rank)], self._accumulate)
        self.dev.record(self._reduced[index])

    def _sum(self, slab: Slab, tensor: Tensor, *, accumulate: bool) -> None:
        """The rank's part of `tensor`, summed over all ranks, goes to or onto its shard."""
        parts = self.dev.comm.all_to_all(tensor, self._spare.rows(0, slab.shard_size))
        self._add(slab, parts, accumulate)

    def _add(self, slab: Slab, parts: list[Tensor], accumulate: bool) -> None:
        """shard = or += the sum of parts, parameter by parameter.

        So its random numbers are those of gradients that are not streamed.
        """
        shard, start = self.shard[slab.name], self.dev.rank * slab.shard_size
        for param, first, last in slab.pieces(start, start + slab.shard_size):
            target = shard.rows(first - start, last - start)
            pieces = [part.rows(first - start, last - start) for part in parts]
            acc = Accumulator(target, accumulate, self.scalars, param.index)
            reduce.sum_parts(self.dev, acc, pieces, first - param.offset)

    def end_micro_step(self) -> None:
        """Close the micro-step: what follows on the main stream comes after all reductions."""
        if not self._open:
            raise AssertionError("grads: end_micro_step without start_micro_step")
        self._open = False
        if self._last and self.dev.world_size > 1:
            self._on_comm("vectors", self._reduce_whole)
        if self._slots or (self._last and self.dev.world_size > 1):
            with self.dev.on("comm"):
                self.dev.record(self._done)
            self.dev.wait(self._done)
