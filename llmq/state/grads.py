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
from functools import partial

from llmq.base.dtypes import F64
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops import global_norm, reduce
from llmq.runtime.device import Device, Event
from llmq.runtime.lane import Lane
from llmq.state.params import Slab
from llmq.state.placement import Placement

SLOTS = 2
# Elements: 16 MiB of BF16 take 0.3 ms over PCIe 5 x16, long beside a launch. A multiple of 512, so
# that the scales of 8-bit moments of each piece of an update are aligned.
PIECE = 8 << 20


class _Exchange:
    """How parts of a slab's gradients on all ranks become sums on the rank that owns them."""

    def __init__(self, dev: Device, scalars: Tensor, spare: Tensor | None):
        """spare: room for a shard, where the sums are made here and not by the library."""
        self.dev, self.scalars, self.spare = dev, scalars, spare
        self.stream = dev.comm.exchange_stream if dev.world_size > 1 else "comm"

    def parts(self, slab: Slab, buffer: Tensor, written: Event) -> list[Tensor]:
        """What makes this rank's shard when it is summed; a part of buffer if it is one alone.

        written: recorded when all of buffer (slab.size,) was; data may leave from then on.
        """
        if self.spare is None:
            self.dev.comm.reduce_scatter(buffer)
            return [slab.shard(buffer, self.dev.rank)]
        return self.dev.comm.all_to_all(buffer, self.spare.rows(0, slab.shard_size), written)

    def add(self, slab: Slab, target: Tensor, parts: list[Tensor], *, accumulate: bool) -> None:
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

    def zero_gaps(self, slab: Slab, tensor: Tensor) -> None:
        """Reductions leave anything in the parts of a slab that are not the rank's own."""
        if self.dev.world_size > 1:
            for start, stop in slab.gaps():
                self.dev.zero(tensor.rows(start, stop))


class _Whole:
    """Slabs whose gradients are resident. Several ranks reduce them in the last micro-step.

    accumulate, last: of the micro-step that is enqueued now, here and below; of capture time.
    """

    def __init__(self, exchange: _Exchange, whole: dict[str, Tensor], shard: dict[str, Tensor]):
        self._exchange, self._whole, self._shard = exchange, whole, shard
        self._lane = Lane(exchange.dev, ["whole"], leave=exchange.stream)

    def start(self, slabs: dict[str, Slab], *, accumulate: bool, last: bool) -> None:
        """Begin a micro-step."""
        self._lane.forget()
        self._accumulate, self._reduces = accumulate, last and self._exchange.dev.world_size > 1
        for name, whole in {} if accumulate else self._whole.items():
            self._exchange.zero_gaps(slabs[name], whole)

    def load(self, slab: Slab) -> None:
        """Nothing arrives."""

    def full(self, slab: Slab) -> tuple[Tensor, bool]:
        """Where products write a slab's gradients (slab.size,), and whether they add to them."""
        return self._whole[slab.name], self._accumulate

    def notify(self, slab: Slab) -> None:
        """The slab's gradients of this micro-step are enqueued."""
        if self._reduces:
            self._lane.leave("whole", partial(self._reduce, slab))

    def _reduce(self, slab: Slab) -> None:
        whole, shard = self._whole[slab.name], self._shard[slab.name]
        parts = self._exchange.parts(slab, whole, self._lane.used("whole"))
        if self._exchange.spare is not None:
            self._exchange.add(slab, shard, parts, accumulate=False)

    def end(self) -> None:
        """The current stream goes on once all sums are complete."""
        self._lane.join()


class _Streamed:
    """Blocks of several ranks: in every micro-step a slot is reduced and added to the shard.

    A shard in host memory is, meanwhile, in a part of the slot that is free once that is reduced.
    """

    def __init__(
        self,
        exchange: _Exchange,
        slots: list[Tensor],
        shard: dict[str, Tensor],
        host: _Host | None,
        *,
        followed: bool,
    ):
        """followed: in the last micro-step a resident slab is reduced after all blocks."""
        self.dev, self._exchange, self._followed = exchange.dev, exchange, followed
        self._slots, self._shard, self._host = slots, shard, host
        self._lane = Lane(self.dev, range(len(slots)), leave=exchange.stream)

    def start(self, slabs: dict[str, Slab], *, accumulate: bool, last: bool) -> None:
        self._lane.forget()
        self._accumulate, self._last = accumulate, last
        if self._host is not None:
            self._host.start(last)

    def load(self, slab: Slab) -> None:
        self._lane.take(slab.name)

    def full(self, slab: Slab) -> tuple[Tensor, bool]:
        slot = self._lane.slot_of(slab.name)
        self._lane.free(slot)
        if self._host is not None:
            self._host.lane.free(slot)
        full = self._slots[slot].rows(0, slab.size)
        self._exchange.zero_gaps(slab, full)
        return full, False

    def notify(self, slab: Slab) -> None:
        slot = self._lane.slot_of(slab.name)
        full = self._slots[slot].rows(0, slab.size)
        target = self._shard[slab.name] if self._host is None else self.dev.comm.free_part(full)
        self._lane.leave(slot, partial(self._add, slab, slot, full, target))
        if self._host is not None:
            with self.dev.on(self._exchange.stream):
                self._host.leave(slab, slot, target)

    def _add(self, slab: Slab, slot: int, full: Tensor, target: Tensor) -> None:
        parts = self._exchange.parts(slab, full, self._lane.used(slot))
        if self._host is not None and self._accumulate:
            self._host.arrive(slab, slot, target)
            self._host.lane.use(slot)
        self._exchange.add(slab, target, parts, accumulate=self._accumulate)

    def end(self) -> None:
        if not (self._last and self._followed):  # on the same stream, which is waited for once
            self._lane.join()
        if self._host is not None:
            self._host.lane.join()


class _InPlace:
    """Blocks of one rank whose sums are in host memory: products add to them in the slot."""

    def __init__(self, slots: list[Tensor], host: _Host):
        self._slots, self._host, self._lane = slots, host, host.lane

    def start(self, slabs: dict[str, Slab], *, accumulate: bool, last: bool) -> None:
        self._accumulate = accumulate
        self._host.start(last)

    def load(self, slab: Slab) -> None:
        slot = self._lane.take(slab.name)
        if self._accumulate:
            self._host.arrive(slab, slot, self._slots[slot])

    def full(self, slab: Slab) -> tuple[Tensor, bool]:
        slot = self._lane.slot_of(slab.name)
        if self._accumulate:
            self._lane.use(slot)
        else:
            self._lane.free(slot)
        return self._slots[slot].rows(0, slab.size), self._accumulate

    def notify(self, slab: Slab) -> None:
        slot = self._lane.slot_of(slab.name)
        self._host.leave(slab, slot, self._slots[slot])

    def end(self) -> None:
        self._lane.join()


class _Host:
    """Shards in host memory on their way to a slot and back, in pieces.

    squares[name]: of each block of threads, of a shard's last sums, made when they leave.
    """

    def __init__(
        self, dev: Device, shard: dict[str, Tensor], squares: dict[str, Tensor], slots: int
    ):
        self.dev, self._shard, self._squares = dev, shard, squares
        self.lane = Lane(dev, range(slots))

    def start(self, last: bool) -> None:
        self.lane.forget()
        self._last = last

    def arrive(self, slab: Slab, slot: int, place: Tensor) -> None:
        """The shard comes to its place on the device, when the current stream has got here."""
        self.lane.follow()
        self.lane.arrive(slot, *self._copies(place, self._shard[slab.name]))

    def leave(self, slab: Slab, slot: int, place: Tensor) -> None:
        """What the current stream has added up goes to host memory; the last sums, squared."""
        shard = self._shard[slab.name]
        if self._last:
            sums = place.rows(0, shard.size)
            global_norm.partials(self.dev, self._squares[slab.name], sums)
        self.lane.leave(slot, *self._copies(shard, place))

    def _copies(self, dst: Tensor, src: Tensor) -> list[Callable[[], None]]:
        size = min(dst.size, src.size)
        ends = [(start, min(start + PIECE, size)) for start in range(0, size, PIECE)]
        return [partial(self.dev.copy, dst.rows(*piece), src.rows(*piece)) for piece in ends]


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
        # What nobody needs between micro-steps.
        self.slots = [self._alloc_slot(i, streamed) for i in range(SLOTS if streamed else 0)]
        room: Tensor | None = None
        if all_to_all and dev.world_size > 1:
            longest = max(self.slabs.values(), key=lambda slab: slab.shard_size)
            room = self._alloc("grad.spare", longest.shard_size, longest)
        self._squares = self._alloc_squares()
        exchange = _Exchange(dev, scalars, room)
        self._homes: list[_Whole | _Streamed | _InPlace] = [
            _Whole(exchange, self._whole, self.shard)
        ]
        if streamed:
            host = _Host(dev, self.shard, self._squares, SLOTS) if self._on_host else None
            followed = "vectors" in self._whole
            self._homes.append(
                _InPlace(self.slots, host)
                if dev.world_size == 1
                else _Streamed(exchange, self.slots, self.shard, host, followed=followed)
            )
        self._open = False  # of capture time: within a micro-step

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

    def _alloc_slot(self, index: int, slabs: list[Slab]) -> Tensor:
        longest = max(slabs, key=lambda slab: slab.size)
        return self._alloc(f"grad.slot.{index}", longest.size, longest)

    def _alloc_squares(self) -> dict[str, Tensor]:
        """Of each shard the sums of squares that its blocks of threads make."""
        shards = list(self.shard.values())
        count = sum(global_norm.num_partials(self.dev, x) for x in shards)
        self._all_squares = self.dev.alloc("grad.squares", (count,), F64, "Activations")
        squares = global_norm.split(self.dev, self._all_squares, shards)
        return dict(zip(self.shard, squares, strict=True))

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
        self._open = True
        for home in self._homes:
            home.start(self.slabs, accumulate=accumulate, last=last)

    def _home(self, name: str) -> _Whole | _Streamed | _InPlace:
        return self._homes[0 if name in self._whole else 1]

    def load(self, block: str) -> None:
        """Give the block a slot, and start bringing what products add to. One block ahead."""
        if not self._open:
            raise AssertionError(f"grads: load({block!r}) outside of a micro-step")
        if block in self.slabs:
            self._home(block).load(self.slabs[block])

    def full(self, block: str) -> dict[str, Accumulator]:
        """Where the gradients of a block's parameters go in this micro-step, by key."""
        if not self._open:
            raise AssertionError(f"grads: full({block!r}) outside of a micro-step")
        where: dict[str, Accumulator] = {}
        for name in ("vectors", block):
            if slab := self.slabs.get(name):
                tensor, accumulate = self._home(name).full(slab)
                where |= {
                    p.key: Accumulator(slab.view(tensor, p), accumulate, self.scalars, p.index)
                    for p in slab.params
                    if p.block == block
                }
        return where

    def notify(self, block: str) -> None:
        """Say that the block's gradients of this micro-step are enqueued; reduction may start."""
        if not self._open:
            raise AssertionError(f"grads: notify({block!r}) outside of a micro-step")
        if block in self.slabs:
            self._home(block).notify(self.slabs[block])

    def end_micro_step(self) -> None:
        """Close the micro-step: what follows on the main stream comes after all reductions."""
        if not self._open:
            raise AssertionError("grads: end_micro_step without start_micro_step")
        self._open = False
        if slab := self.slabs.get("vectors"):
            self._home("vectors").notify(slab)
        for home in self._homes:
            home.end()

    def norm_squared(self, stats: Tensor) -> None:
        """stats[norm_squared] += the squares of all shards, after the last micro-step.

        stats: F64 (10,). Those in host memory were squared when they left.
        """
        for name, shard in self.shard.items():
            if not shard.on_host:
                global_norm.partials(self.dev, self._squares[name], shard)
        global_norm.total(self.dev, stats, self._all_squares)
