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

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from llmq.base.dtypes import F64, DType
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops import global_norm, reduce
from llmq.runtime.device import Device, Event
from llmq.runtime.lane import Lane
from llmq.state.params import Slab

SLOTS = 2
# Elements: 16 MiB of BF16 take 0.3 ms over PCIe 5 x16, long beside a launch. A multiple of 512, so
# that the scales of 8-bit moments of each piece of an update are aligned.
PIECE = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientOptions:
    """dtype: F32 or BF16. shard: blocks are streamed. place: of their shards.

    all_to_all: ranks exchange parts and sum them here, else the library reduces.
    """

    dtype: DType
    shard: bool = False
    place: str = "device"
    all_to_all: bool = False


class MicroStep(NamedTuple):
    """What a micro-step does with gradients; a part of its graph's key.

    accumulate: add to them, else overwrite; False in the first of a step. last: they get reduced.
    """

    accumulate: bool
    last: bool


class _Exchange:
    """How what all ranks have of a slab becomes sums on the rank that owns them."""

    def __init__(self, dev: Device, scalars: Tensor, spare: Tensor | None):
        """spare: room for a shard, where the sums are made here and not by the library."""
        self.dev, self.scalars, self.spare = dev, scalars, spare
        self.stream = dev.comm.exchange_stream if dev.world_size > 1 else "comm"

    def parts(self, slab: Slab, buffer: Tensor, written: Event) -> list[Tensor]:
        """What this rank's shard is the sum of, in buffer (slab.size,) and in the spare.

        written: recorded when all of buffer was; data may leave from then on.
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
    """Resident slabs, which several ranks reduce in the last micro-step."""

    def __init__(self, exchange: _Exchange, whole: dict[str, Tensor], shard: dict[str, Tensor]):
        self._exchange, self._whole, self._shard = exchange, whole, shard
        self._lane = Lane(exchange.dev, ["whole"], leave=exchange.stream)

    def start(self) -> None:
        """Before a micro-step."""
        self._lane.forget()

    def full(self, slab: Slab, step: MicroStep) -> tuple[Tensor, bool]:
        """Where products put a slab's gradients (slab.size,), and whether they add to them."""
        return self._whole[slab.name], step.accumulate

    def notify(self, slab: Slab, step: MicroStep) -> None:
        """The slab's gradients of this micro-step are enqueued."""
        if step.last and self._exchange.dev.world_size > 1:
            self._lane.leave("whole", partial(self._reduce, slab))

    def _reduce(self, slab: Slab) -> None:
        whole, shard = self._whole[slab.name], self._shard[slab.name]
        parts = self._exchange.parts(slab, whole, self._lane.used("whole"))
        if self._exchange.spare is not None:
            self._exchange.add(slab, shard, parts, accumulate=False)

    def end(self, step: MicroStep) -> None:
        """Let the current stream wait for what was started."""
        self._lane.join()


class _HostShards:
    """Shards in host memory: what is in a slot of the lane arrives from them and leaves to them.

    squares[name]: sums of squares of a shard's last sums, made before they leave.
    """

    def __init__(self, dev: Device, shard: dict[str, Tensor], squares: dict[str, Tensor]):
        self.dev, self._shard, self._squares = dev, shard, squares
        self.lane = Lane(dev, range(SLOTS))

    def arrive(self, slab: Slab, slot: Hashable, place: Tensor) -> None:
        """The shard comes to `place` on the device, when the current stream has got here."""
        self.lane.follow()
        self.lane.arrive(slot, *self._copies(slab, place, self._shard[slab.name]))

    def leave(self, slab: Slab, slot: Hashable, place: Tensor, *, last: bool) -> None:
        """What the current stream has added up goes back."""
        if last:
            sums = place.rows(0, slab.shard_size)
            global_norm.partials(self.dev, self._squares[slab.name], sums)
        self.lane.leave(slot, *self._copies(slab, self._shard[slab.name], place))

    def _copies(self, slab: Slab, dst: Tensor, src: Tensor) -> list[Callable[[], None]]:
        starts = range(0, slab.shard_size, PIECE)
        ends = [(start, min(start + PIECE, slab.shard_size)) for start in starts]
        return [partial(self.dev.copy, dst.rows(*piece), src.rows(*piece)) for piece in ends]


class _InPlace:
    """Blocks of one rank, with shards in host memory: products add to them in a slot."""

    def __init__(self, slots: list[Tensor], host: _HostShards):
        self._slots, self._host, self._lane = slots, host, host.lane

    def start(self) -> None:
        self._lane.forget()

    def load(self, slab: Slab, step: MicroStep) -> None:
        """Give the slab a slot, and start bringing what products add to."""
        slot = self._lane.take(slab.name)
        if step.accumulate:
            self._host.arrive(slab, slot, self._slots[slot])

    def full(self, slab: Slab, step: MicroStep) -> tuple[Tensor, bool]:
        slot = self._lane.slot_of(slab.name)
        wait = self._lane.use if step.accumulate else self._lane.free
        wait(slot)
        return self._slots[slot].rows(0, slab.size), step.accumulate

    def notify(self, slab: Slab, step: MicroStep) -> None:
        slot = self._lane.slot_of(slab.name)
        self._host.leave(slab, slot, self._slots[slot], last=step.last)

    def end(self, step: MicroStep) -> None:
        self._lane.join()


class _Streamed:
    """Blocks of several ranks: in every micro-step a slot is reduced and added to the shard.

    host: where shards are in host memory; one is then added to in the slot, in a part of it that
    is free once it is reduced.
    """

    def __init__(
        self,
        exchange: _Exchange,
        slots: list[Tensor],
        shard: dict[str, Tensor],
        host: _HostShards | None,
    ):
        self._exchange, self._slots, self._shard, self._host = exchange, slots, shard, host
        self._reduced = Lane(exchange.dev, range(SLOTS), leave=exchange.stream)
        self._lanes = [self._reduced, *([host.lane] if host else [])]

    def start(self) -> None:
        for lane in self._lanes:
            lane.forget()

    def load(self, slab: Slab, step: MicroStep) -> None:
        self._reduced.take(slab.name)

    def full(self, slab: Slab, step: MicroStep) -> tuple[Tensor, bool]:
        slot = self._reduced.slot_of(slab.name)
        for lane in self._lanes:
            lane.free(slot)
        full = self._slots[slot].rows(0, slab.size)
        self._exchange.zero_gaps(slab, full)
        return full, False

    def notify(self, slab: Slab, step: MicroStep) -> None:
        dev, host, slot = self._exchange.dev, self._host, self._reduced.slot_of(slab.name)
        full, target = self._slots[slot].rows(0, slab.size), self._shard[slab.name]
        if host is not None:
            target = dev.comm.free_part(full)

        def add() -> None:
            parts = self._exchange.parts(slab, full, self._reduced.used(slot))
            if host is not None and step.accumulate:
                host.arrive(slab, slot, target)
                host.lane.use(slot)
            self._exchange.add(slab, target, parts, accumulate=step.accumulate)

        self._reduced.leave(slot, add)
        if host is not None:
            with dev.on(self._exchange.stream):
                host.leave(slab, slot, target, last=step.last)

    def end(self, step: MicroStep) -> None:
        # In the last micro-step whole slabs are reduced behind these, on the same stream.
        for lane in self._lanes[step.last :]:
            lane.join()


class Gradients:
    """start_micro_step -> load, full, notify of each block -> end_micro_step, for every micro-step.

    shard[name]: this rank's elements of a slab's gradients, complete after the last micro-step.
    slots: of streamed blocks; what nobody needs between micro-steps.
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
        streamed = [slab for slab in table if slab.name not in self._whole]
        self._on_host = bool(streamed) and options.place != "device"
        longest = max((slab.size for slab in streamed), default=0)
        self.slots = [
            self._alloc(f"grad.slot.{i}", longest) for i in range(SLOTS if streamed else 0)
        ]
        spare = max(slab.shard_size for slab in table)
        exchange = _Exchange(
            dev,
            scalars,
            self._alloc("grad.spare", spare) if options.all_to_all and dev.world_size > 1 else None,
        )
        self._squares = self._alloc_squares()
        self._zero_gaps = exchange.zero_gaps
        host = _HostShards(dev, self.shard, self._squares) if self._on_host else None
        self._homes: list[_Whole | _InPlace | _Streamed]
        self._homes = [_Whole(exchange, self._whole, self.shard)]
        if streamed and dev.world_size > 1:
            self._homes.append(_Streamed(exchange, self.slots, self.shard, host))
        elif streamed:
            self._homes.append(_InPlace(self.slots, host))
        self._step: MicroStep | None = None  # that is being enqueued: of capture time

    def _alloc(self, name: str, size: int, place: str = "device") -> Tensor:
        """Zeros: the gaps between parameters count in the norm."""
        tensor = self.dev.alloc(name, (size,), self.options.dtype, "Gradients", place)
        self.dev.zero(tensor)
        return tensor

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
        """Begin a micro-step; accumulate, last: as MicroStep's."""
        if self._step is not None:
            raise AssertionError("grads: start_micro_step inside a micro-step")
        self._step = MicroStep(accumulate, last)
        for home in self._homes:
            home.start()
        for name, whole in {} if accumulate else self._whole.items():
            self._zero_gaps(self.slabs[name], whole)

    def _now(self, call: str) -> MicroStep:
        if self._step is None:
            raise AssertionError(f"grads: {call} outside of a micro-step")
        return self._step

    def _home(self, name: str) -> _Whole | _InPlace | _Streamed:
        return self._homes[name not in self._whole]

    def load(self, block: str) -> None:
        """Give the block a slot, and start bringing what products add to. One block ahead."""
        step = self._now(f"load({block!r})")
        if block in self.slabs and block not in self._whole:
            self._home(block).load(self.slabs[block], step)

    def full(self, block: str) -> dict[str, Accumulator]:
        """Where the gradients of a block's parameters go in this micro-step, by key."""
        step, where = self._now(f"full({block!r})"), {}
        for slab in [self.slabs[name] for name in ("vectors", block) if name in self.slabs]:
            tensor, accumulate = self._home(slab.name).full(slab, step)
            where |= {
                p.key: Accumulator(slab.view(tensor, p), accumulate, self.scalars, p.index)
                for p in slab.params
                if p.block == block
            }
        return where

    def notify(self, block: str) -> None:
        """Say that the block's gradients of this micro-step are enqueued; reduction may start."""
        step = self._now(f"notify({block!r})")
        if block in self.slabs:
            self._home(block).notify(self.slabs[block], step)

    def end_micro_step(self) -> None:
        """Close the micro-step: what follows on the main stream comes after all reductions."""
        step = self._now("end_micro_step")
        self.notify("vectors")
        for home in self._homes:
            home.end(step)
        self._step = None

    def norm_squared(self, stats: Tensor) -> None:
        """stats[norm_squared] += the squares of all shards, after the last micro-step.

        stats: F64 (10,). Those in host memory were squared when they left.
        """
        for name, shard in self.shard.items():
            if not shard.on_host:
                global_norm.partials(self.dev, self._squares[name], shard)
        global_norm.total(self.dev, stats, self._all_squares)
