"""The life cycle of gradients: load(block) -> full(block) -> notify(block), their sums in the end.

Each rank ends up with its shard of every slab: sums over micro-steps and ranks, divided by the
target tokens of the whole step.

    whole      a slab's gradients are resident; reduced on the comm stream in the last micro-step
    streamed   (--shard-gradients) blocks take turns in two slots; in every micro-step a slot is
               reduced and added to the rank's shard

A shard in host memory is on the device while it is added to: it arrives on the copy stream and
leaves on the store stream. A kernel that worked in host memory would keep the multiprocessors from
products for as long as the bus takes. One rank has it in the slot, where products add to it: it
arrives while the block before is computed, in pieces, where another one is still leaving. Several
ranks have it in a part of the slot that is free once the slot is reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmq.base.dtypes import F64
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops import global_norm, reduce
from llmq.runtime.device import Device, Event
from llmq.state.params import Slab
from llmq.state.placement import Placement

SLOTS = 2
# Elements: 16 MiB of BF16 take 0.3 ms over PCIe 5 x16, long beside a launch. A multiple of 512, so
# that the scales of 8-bit moments of each piece of an update are aligned.
PIECE = 8 << 20


@dataclass(slots=True, kw_only=True)
class _Slot:
    """Where a streamed block's gradients are in a micro-step.

    Events: they have been reduced; what they are added to has arrived; each piece of the sums has
    left. used: in this micro-step, by a block before.
    """

    full: Tensor
    reduced: Event
    arrived: Event
    left: list[Event]
    used: bool = False


class Gradients:
    """start_micro_step -> load, full, notify of each block -> end_micro_step, for every micro-step.

    slabs: those that have gradients. shard[name]: this rank's elements of a slab's gradients,
    complete after the last micro-step.
    """

    def __init__(
        self,
        dev: Device,
        table: tuple[Slab, ...],
        placement: Placement,
        scalars: Tensor,
        *,
        all_to_all: bool = False,
    ):
        """all_to_all: ranks exchange parts and sum them here, else the library reduces."""
        self.dev, self.placement, self.scalars = dev, placement, scalars
        self.slabs = {slab.name: slab for slab in table if placement[slab.name].trainable}
        self.shard: dict[str, Tensor] = {}
        self._whole: dict[str, Tensor] = {}
        for slab in self.slabs.values():
            self._alloc_sums(slab)
        streamed = [slab for name, slab in self.slabs.items() if name not in self._whole]
        self._on_host = any(self.shard[slab.name].on_host for slab in streamed)
        self._in_place = self._on_host and dev.world_size == 1
        self._slots = [self._alloc_slot(i, streamed) for i in range(SLOTS if streamed else 0)]
        self._computed, self._asked, self._done = dev.event(), dev.event(), dev.event()
        self._spare: Tensor | None = None
        if all_to_all and dev.world_size > 1:
            longest = max(self.slabs.values(), key=lambda slab: slab.shard_size)
            self._spare = self._alloc("grad.spare", longest.shard_size, longest)
        self._squares = self._alloc_squares()
        self._open = False

    def _alloc_sums(self, slab: Slab) -> None:
        name, store = slab.name, self.placement[slab.name].gradient
        if store.streamed:
            shard = self._alloc(f"{name}.grad", slab.shard_size, slab, store.memory)
        else:
            self._whole[name] = self._alloc(f"{name}.grad", slab.size, slab, store.memory)
            shard = slab.shard(self._whole[name], self.dev.rank)
        self.shard[name] = shard

    def _alloc(self, name: str, size: int, slab: Slab, place: str = "device") -> Tensor:
        """Zeros in the slab's format: the gaps between parameters count in the norm."""
        dtype = self.placement[slab.name].gradient.dtype
        tensor = self.dev.alloc(name, (size,), dtype, "Gradients", place)
        self.dev.zero(tensor)
        return tensor

    def _alloc_slot(self, index: int, slabs: list[Slab]) -> _Slot:
        longest = max(slabs, key=lambda slab: slab.size)
        return _Slot(
            full=self._alloc(f"grad.slot.{index}", longest.size, longest),
            reduced=self.dev.event(),
            arrived=self.dev.event(),
            left=[self.dev.event() for _ in _pieces(longest.shard_size)] if self._on_host else [],
        )

    def _alloc_squares(self) -> dict[str, Tensor]:
        """Of each shard the sums of squares that its blocks of threads make."""
        shards = list(self.shard.values())
        count = sum(global_norm.num_partials(self.dev, x) for x in shards)
        self._all_squares = self.dev.alloc("grad.squares", (count,), F64, "Activations")
        squares = global_norm.split(self.dev, self._all_squares, shards)
        return dict(zip(self.shard, squares, strict=True))

    @property
    def slots(self) -> list[Tensor]:
        """What nobody needs between micro-steps."""
        return [slot.full for slot in self._slots]

    @property
    def has_last(self) -> bool:
        """Whether a step's last micro-step does more than the others."""
        return self.dev.world_size > 1 or self._on_host

    def start_micro_step(self, accumulate: bool, last: bool) -> None:
        """accumulate False: the first of a step, gradients are overwritten. last: they get reduced.

        Both are a part of the graph's key.
        """
        if self._open:
            raise AssertionError("grads: start_micro_step inside a micro-step")
        self._open, self._accumulate, self._last = True, accumulate, last
        self._adds_in_slots = self._in_place and accumulate  # the products do
        self._turn, self._slot_of = 0, {}
        for slot in self._slots:
            slot.used = False
        if not accumulate:
            for name, whole in self._whole.items():
                self._zero_gaps(self.slabs[name], whole)

    def load(self, block: str) -> None:
        """Give the block a slot, and start bringing what products add to. One block ahead."""
        if not self._open:
            raise AssertionError(f"grads: load({block!r}) outside of a micro-step")
        if block not in self.slabs or block in self._whole:
            return
        slot, self._turn = self._slots[self._turn], (self._turn + 1) % SLOTS
        self._slot_of = {name: s for name, s in self._slot_of.items() if s is not slot}
        self._slot_of[block] = slot
        if self._adds_in_slots:
            self._bring(self.slabs[block], slot, slot.full)

    def full(self, block: str) -> dict[str, Accumulator]:
        """Where the gradients of a block's parameters go in this micro-step, by key."""
        if not self._open:
            raise AssertionError(f"grads: full({block!r}) outside of a micro-step")
        where: dict[str, Accumulator] = {}
        for name in ("vectors", block):
            if name in self._whole:
                where |= self._accumulators(block, name, self._whole[name], self._accumulate)
        if block in self.slabs and block not in self._whole:
            where |= self._streamed(self.slabs[block])
        return where

    def _streamed(self, slab: Slab) -> dict[str, Accumulator]:
        """In its slot; products wait until they may write there."""
        if slab.name not in self._slot_of:
            raise AssertionError(f"grads: full({slab.name!r}) without load")
        slot = self._slot_of[slab.name]
        full = slot.full.rows(0, slab.size)
        if self._adds_in_slots:
            self.dev.wait(slot.arrived)
        elif slot.used:
            if self.dev.world_size > 1:
                self.dev.wait(slot.reduced)
            if self._on_host:
                self.dev.wait(slot.left[-1])
        self._zero_gaps(slab, full)
        return self._accumulators(slab.name, slab.name, full, self._adds_in_slots)

    def _accumulators(
        self, block: str, name: str, tensor: Tensor, accumulate: bool
    ) -> dict[str, Accumulator]:
        slab = self.slabs[name]
        return {
            p.key: Accumulator(slab.view(tensor, p), accumulate, self.scalars, p.index)
            for p in slab.params
            if p.block == block
        }

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
            slot = self._slot_of[block]
            if self.dev.world_size > 1:
                self._on_comm(block, self._add_to_shard)
            else:
                self._leave(self.slabs[block], slot, slot.full)
            slot.used = True
        elif block in self._whole and self._last and self.dev.world_size > 1:
            self._on_comm(block, self._reduce_whole)

    def _on_comm(self, block: str, work: Callable[[Slab], None]) -> None:
        self.dev.record(self._computed)
        with self.dev.on(self.dev.comm.exchange_stream):
            self.dev.wait(self._computed)
            work(self.slabs[block])

    def _exchange(self, slab: Slab, buffer: Tensor) -> list[Tensor]:
        """What all ranks have for this one's shard; data may leave once they are computed."""
        spare = self._spare.rows(0, slab.shard_size)
        return self.dev.comm.all_to_all(buffer, spare, self._computed)

    def _reduce_whole(self, slab: Slab) -> None:
        whole = self._whole[slab.name]
        if self._spare is None:
            self.dev.comm.reduce_scatter(whole)
        else:
            parts = self._exchange(slab, whole)
            self._add(slab, self.shard[slab.name], parts, accumulate=False)

    def _add_to_shard(self, slab: Slab) -> None:
        slot = self._slot_of[slab.name]
        full, target = slot.full.rows(0, slab.size), self.shard[slab.name]
        if self._spare is not None:
            parts = self._exchange(slab, full)
        else:
            self.dev.comm.reduce_scatter(full)
            parts = [slab.shard(full, self.dev.rank)]
        if self._on_host:
            target = self.dev.comm.free_part(full)
            if self._accumulate:
                self._bring(slab, slot, target)
                self.dev.wait(slot.arrived)
        self._add(slab, target, parts, accumulate=self._accumulate)
        self.dev.record(slot.reduced)
        if self._on_host:
            self._leave(slab, slot, target)

    def _add(self, slab: Slab, target: Tensor, parts: list[Tensor], *, accumulate: bool) -> None:
        """target = or += the sum of parts, parameter by parameter.

        So its random numbers are those of gradients that are not streamed.
        """
        start = self.dev.rank * slab.shard_size
        for param, first, last in slab.pieces(start, start + slab.shard_size):
            acc = Accumulator(
                target.rows(first - start, last - start), accumulate, self.scalars, param.index
            )
            pieces = [part.rows(first - start, last - start) for part in parts]
            reduce.sum_parts(self.dev, acc, pieces, first - param.offset)

    def _bring(self, slab: Slab, slot: _Slot, place: Tensor) -> None:
        """The shard comes to its place on the device, when the current stream has got here."""
        shard = self.shard[slab.name]
        self.dev.record(self._asked)
        with self.dev.on("copy"):
            self.dev.wait(self._asked)
            for left, (start, stop) in zip(slot.left, _pieces(shard.size), strict=True):
                if slot.used:
                    self.dev.wait(left)
                self.dev.copy(place.rows(start, stop), shard.rows(start, stop))
            self.dev.record(slot.arrived)

    def _leave(self, slab: Slab, slot: _Slot, place: Tensor) -> None:
        """What the current stream has added up goes to host memory; the last sums, squared."""
        shard = self.shard[slab.name]
        if self._last:
            sums = place.rows(0, shard.size)
            global_norm.partials(self.dev, self._squares[slab.name], sums)
        self.dev.record(self._computed)
        with self.dev.on("store"):
            self.dev.wait(self._computed)
            for left, (start, stop) in zip(slot.left, _pieces(shard.size), strict=True):
                self.dev.copy(shard.rows(start, stop), place.rows(start, stop))
                self.dev.record(left)

    def end_micro_step(self) -> None:
        """Close the micro-step: what follows on the main stream comes after all reductions."""
        if not self._open:
            raise AssertionError("grads: end_micro_step without start_micro_step")
        self._open = False
        if self.dev.world_size > 1:
            if self._last and "vectors" in self._whole:
                self._on_comm("vectors", self._reduce_whole)
            if self._slots or self._last:
                with self.dev.on(self.dev.comm.exchange_stream):
                    self.dev.record(self._done)
                self.dev.wait(self._done)
        for slot in self._slots if self._on_host else ():
            if slot.used:
                self.dev.wait(slot.left[-1])

    def norm_squared(self, stats: Tensor) -> None:
        """stats[norm_squared] += the squares of all shards, after the last micro-step.

        stats: F64 (10,). Those in host memory were squared when they left.
        """
        for name, shard in self.shard.items():
            if not shard.on_host:
                global_norm.partials(self.dev, self._squares[name], shard)
        global_norm.total(self.dev, stats, self._all_squares)


def _pieces(size: int) -> list[tuple[int, int]]:
    """The elements that are copied at a time."""
    return [(start, min(start + PIECE, size)) for start in range(0, size, PIECE)]
