"""Gradients of a step: for each block load, full and notify; then sums over micro-steps and ranks.

After a step each rank has its shard of every slab's gradients, divided by the step's target tokens.
One of three classes computes the sums:

    _Resident   a slab's gradients are resident; ranks reduce them in the last micro-step
    _Streamed   (--shard-gradients) blocks take turns in two slots of device memory; in every
                micro-step ranks reduce a slot, and each rank adds the result to its shard
    _AddToShard blocks of a single rank take turns in two slots; products add to the rank's shard in
    the slot

Each class sums over the ranks that share one replica of the training state. With several replicas,
one per machine, ranks sum the shards over replicas once per step, after the last micro-step.

A shard in host memory is copied to the device before gradients are added to the shard: a kernel
that works in host memory would occupy multiprocessors for as long as the PCIe transfer takes. The
shard of a single rank arrives in the slot, in pieces, during backward of the block before, while
another shard is copied back. With several ranks, the shard arrives in a part of the slot that is
free after the slot's reduction.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple

from llmq.base.dtypes import F64
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.pointwise import reduce
from llmq.ops.update import global_norm
from llmq.runtime.device import Device
from llmq.runtime.lane import Lane
from llmq.state.params import SHARED, Slab
from llmq.state.placement import Placement

SLOTS = 2
# Elements of one copy: 16 MiB of BF16 take 0.3 ms over PCIe 5 x16, much longer than a launch. A
# multiple of 512 elements aligns the scales of 8-bit moments in each piece of an update.
PIECE = 8 << 20


class MicroStep(NamedTuple):
    """Facts about a micro-step that decide which kernels it launches; a part of the key of the
    micro-step's CUDA graph. accumulate: False in the first micro-step of a step, which overwrites
    gradients. last: True in the last micro-step of a step, which completes the sums of
    gradients."""

    accumulate: bool
    last: bool


class _Exchange:
    """Reduction of a slab's gradients: each rank gets the sum over all ranks for its shard. lane:
    the slots of streamed blocks, and one slot that all resident slabs share; ranks reduce a slot as
    it leaves the lane."""

    def __init__(self, dev: Device, scalars: Tensor, spare: Tensor | None):
        """spare: buffer for a shard if our kernels add up the sums; None if NCCL reduces."""
        self.dev, self.scalars, self.spare = dev, scalars, spare
        several = dev.mesh.size() > 1
        self.stream = dev.mesh.group("shard").exchange_stream if several else "comm"
        self.lane = Lane(dev, range(SLOTS), leave=self.stream)
        self.lane.add("resident")

    def parts(self, slab: Slab, buffer: Tensor, slot: Hashable) -> list[Tensor]:
        """Exchange gradients in buffer (slab.size,) between ranks, and return tensors, in buffer
        and spare, whose sum is this rank's shard."""
        if self.spare is None:
            self.dev.mesh.group("shard").reduce_scatter(buffer)
            return [slab.shard(buffer, self.dev.mesh.index("shard"))]
        spare, written = self.spare.rows(0, slab.shard_size), self.lane.used(slot)
        return self.dev.mesh.group("shard").all_to_all(buffer, spare, written)

    def add(self, slab: Slab, target: Tensor, parts: list[Tensor], *, accumulate: bool) -> None:
        """Write the sum of `parts` to target, or add the sum to target if accumulate is True. Each
        parameter has its own launch, so that stochastic rounding draws the same random numbers as
        for resident gradients."""
        start = self.dev.mesh.index("shard") * slab.shard_size
        for param, first, last in slab.pieces(start, start + slab.shard_size):
            acc = Accumulator(
                target.rows(first - start, last - start), accumulate, self.scalars, param.index
            )
            pieces = [part.rows(first - start, last - start) for part in parts]
            reduce.sum_parts(self.dev, acc, pieces, first - param.offset)

    def across(self, sums: Tensor) -> None:
        """Sum a shard over all replicas."""
        if self.dev.mesh.size("replica") > 1:
            self.dev.mesh.group("replica").all_reduce(sums)

    def zero_gaps(self, slab: Slab, tensor: Tensor) -> None:
        """Zero the padding between the slab's parameters, because reductions overwrite the padding
        in other ranks' shards."""
        if self.dev.mesh.size("shard") > 1:
            for start, stop in slab.gaps():
                self.dev.zero(tensor.rows(start, stop))


class _HostShards:
    """Shards in host memory, which are copied into a slot of the lane and back. squares: by slab,
    sums of squares of a shard's final gradients, computed before the gradients are copied back."""

    def __init__(self, dev: Device, shard: dict[str, Tensor], squares: dict[str, Tensor]):
        self.dev, self._shard, self._squares = dev, shard, squares
        self.lane = Lane(dev, range(SLOTS))

    def arrive(self, slab: Slab, slot: Hashable, place: Tensor) -> None:
        """Copy the shard to `place` on the device, after the current stream's work so far."""
        self.lane.follow()
        self.lane.arrive(slot, *self._copies(slab, place, self._shard[slab.name]))

    def leave(self, slab: Slab, slot: Hashable, place: Tensor, *, last: bool) -> None:
        """Copy the sums in `place`, computed on the current stream, back to host memory. last: True
        if the sums are the step's final gradients."""
        if last:
            sums = place.rows(0, slab.shard_size)
            global_norm.partials(self.dev, self._squares[slab.name], sums)
        self.lane.leave(slot, *self._copies(slab, self._shard[slab.name], place))

    def _copies(self, slab: Slab, dst: Tensor, src: Tensor) -> list[Callable[[], None]]:
        starts = range(0, slab.shard_size, PIECE)
        pieces = [(start, min(start + PIECE, slab.shard_size)) for start in starts]
        return [partial(self.dev.copy, dst.rows(*piece), src.rows(*piece)) for piece in pieces]


class _Resident:
    """Resident slabs, which several ranks reduce in the last micro-step."""

    def __init__(self, exchange: _Exchange, whole: dict[str, Tensor], shard: dict[str, Tensor]):
        self._exchange, self._whole, self._shard = exchange, whole, shard

    def load(self, slab: Slab, step: MicroStep) -> None:
        """Do nothing: a resident slab needs no preparation for `full`."""

    def full(self, slab: Slab, step: MicroStep) -> tuple[Tensor, bool]:
        """Return memory for a slab's gradients (slab.size,), and True if products add to this
        memory."""
        return self._whole[slab.name], step.accumulate

    def notify(self, slab: Slab, step: MicroStep) -> None:
        """Record that the slab's gradients of this micro-step are enqueued."""
        if step.last and self._exchange.dev.mesh.size() > 1:
            self._exchange.lane.leave("resident", partial(self._reduce, slab))

    def _reduce(self, slab: Slab) -> None:
        parts = self._exchange.parts(slab, self._whole[slab.name], "resident")
        if self._exchange.spare is not None:
            self._exchange.add(slab, self._shard[slab.name], parts, accumulate=False)
        self._exchange.across(self._shard[slab.name])


class _AddToShard:
    """Blocks of a single rank whose shards are in host memory: products add to a shard in a
    slot."""

    def __init__(self, exchange: _Exchange, slots: list[Tensor], host: _HostShards):
        self._exchange, self._slots, self._host, self._lane = exchange, slots, host, host.lane

    def load(self, slab: Slab, step: MicroStep) -> None:
        slot = self._lane.take(slab.name)
        if step.accumulate:
            self._host.arrive(slab, slot, self._slots[slot])

    def full(self, slab: Slab, step: MicroStep) -> tuple[Tensor, bool]:
        slot = self._lane.slot_of(slab.name)
        if step.accumulate:
            self._lane.use(slot)
        else:
            self._lane.free(slot)
        return self._slots[slot].rows(0, slab.size), step.accumulate

    def notify(self, slab: Slab, step: MicroStep) -> None:
        slot, exchange = self._lane.slot_of(slab.name), self._exchange
        sums = self._slots[slot].rows(0, slab.size)
        if not step.last or exchange.dev.mesh.size("replica") == 1:
            self._host.leave(slab, slot, sums, last=step.last)
            return
        # The next block uses the other slot; the allocator hands this slot out again only after the
        # whole slab has left.
        exchange.lane.leave(slot, partial(exchange.across, sums))
        with exchange.dev.on(exchange.stream):
            self._host.leave(slab, slot, sums, last=True)


class _Streamed:
    """Blocks of several ranks in two slots: ranks reduce a slot, and each rank adds the sums to its
    shard. host: the shards in host memory; None if shards are on the device."""

    def __init__(
        self,
        exchange: _Exchange,
        slots: list[Tensor],
        shard: dict[str, Tensor],
        host: _HostShards | None,
    ):
        self._exchange, self._slots, self._shard, self._host = exchange, slots, shard, host
        self._lane = exchange.lane

    def load(self, slab: Slab, step: MicroStep) -> None:
        self._lane.take(slab.name)

    def full(self, slab: Slab, step: MicroStep) -> tuple[Tensor, bool]:
        slot = self._lane.slot_of(slab.name)
        self._lane.free(slot)
        if self._host is not None:
            self._host.lane.free(slot)
        full = self._slots[slot].rows(0, slab.size)
        self._exchange.zero_gaps(slab, full)
        return full, False

    def notify(self, slab: Slab, step: MicroStep) -> None:
        dev, host, slot = self._exchange.dev, self._host, self._lane.slot_of(slab.name)
        full, target = self._slots[slot].rows(0, slab.size), self._shard[slab.name]
        if host is not None:
            target = dev.mesh.group("shard").free_part(full)

        def add() -> None:
            parts = self._exchange.parts(slab, full, slot)
            if host is not None and step.accumulate:
                host.arrive(slab, slot, target)
                host.lane.use(slot)
            self._exchange.add(slab, target, parts, accumulate=step.accumulate)
            if step.last:
                self._exchange.across(target)

        self._lane.leave(slot, add)
        if host is not None:
            with dev.on(self._exchange.stream):
                host.leave(slab, slot, target, last=step.last)


class Gradients:
    """The gradients of a model. Every micro-step calls start_micro_step, then load, full and notify
    for each block, then end_micro_step. slabs: the slabs that have gradients. shard[name]: this
    rank's elements of a slab's gradients, complete after the last micro-step. slots: buffers of
    streamed blocks, which are free between micro-steps."""

    def __init__(
        self,
        dev: Device,
        table: tuple[Slab, ...],
        placement: Placement,
        scalars: Tensor,
        *,
        all_to_all: bool = False,
    ):
        """all_to_all: True if ranks exchange parts, and our kernels sum the parts; False if NCCL
        reduces."""
        self.dev, self.placement, self.scalars = dev, placement, scalars
        self.slabs = {slab.name: slab for slab in table if placement[slab.name].trainable}
        self.shard: dict[str, Tensor] = {}
        self._whole: dict[str, Tensor] = {}
        for slab in self.slabs.values():
            self._alloc_sums(slab)
        streamed = [slab for name, slab in self.slabs.items() if name not in self._whole]
        self._on_host = any(self.shard[slab.name].on_host for slab in streamed)
        self.slots = [self._alloc_slot(i, streamed) for i in range(SLOTS if streamed else 0)]
        spare: Tensor | None = None
        if all_to_all and dev.mesh.size("shard") > 1:
            longest = max(self.slabs.values(), key=lambda slab: slab.shard_size)
            spare = self._alloc("grad.spare", longest.shard_size, longest)
        self._squares = self._alloc_squares()
        self._exchange = exchange = _Exchange(dev, scalars, spare)
        host = _HostShards(dev, self.shard, self._squares) if self._on_host else None
        self._lanes = [exchange.lane, *([host.lane] if host else [])]
        self._resident = _Resident(exchange, self._whole, self.shard)
        self._streams: _AddToShard | _Streamed = (
            _AddToShard(exchange, self.slots, host)
            if host is not None and dev.mesh.size("shard") == 1
            else _Streamed(exchange, self.slots, self.shard, host)
        )
        # The micro-step whose work is being enqueued; known only while a CUDA graph is captured.
        self._step: MicroStep | None = None

    def _alloc_sums(self, slab: Slab) -> None:
        name, store = slab.name, self.placement[slab.name].gradient
        if store.streamed:
            shard = self._alloc(f"{name}.grad", slab.shard_size, slab, store.memory)
        else:
            self._whole[name] = self._alloc(f"{name}.grad", slab.size, slab, store.memory)
            shard = slab.shard(self._whole[name], self.dev.mesh.index("shard"))
        self.shard[name] = shard

    def _alloc(self, name: str, size: int, slab: Slab, place: str = "device") -> Tensor:
        """Allocate zeros in the slab's gradient dtype. The memory must be zero, because the
        gradient norm includes the padding between parameters."""
        dtype = self.placement[slab.name].gradient.dtype
        tensor = self.dev.alloc(name, (size,), dtype, "Gradients", place)
        self.dev.zero(tensor)
        return tensor

    def _alloc_slot(self, index: int, slabs: list[Slab]) -> Tensor:
        longest = max(slabs, key=lambda slab: slab.size)
        return self._alloc(f"grad.slot.{index}", longest.size, longest)

    def _alloc_squares(self) -> dict[str, Tensor]:
        """Allocate the sums of squares of each shard, one sum per thread block, and return the sums
        by slab."""
        shards = list(self.shard.values())
        count = sum(global_norm.num_partials(self.dev, x) for x in shards)
        self._all_squares = self.dev.alloc("grad.squares", (count,), F64, "Activations")
        squares = global_norm.split(self.dev, self._all_squares, shards)
        return dict(zip(self.shard, squares, strict=True))

    @property
    def has_last(self) -> bool:
        """True if the last micro-step of a step launches more work than the others."""
        return self.dev.mesh.size() > 1 or self._on_host

    def start_micro_step(self, accumulate: bool, last: bool) -> None:
        """Begin a micro-step. accumulate, last: the fields of MicroStep."""
        if self._step is not None:
            raise AssertionError("grads: start_micro_step inside a micro-step")
        self._step = MicroStep(accumulate, last)
        for lane in self._lanes:
            lane.forget()
        for name, whole in {} if accumulate else self._whole.items():
            self._exchange.zero_gaps(self.slabs[name], whole)

    def _current(self, call: str) -> MicroStep:
        if self._step is None:
            raise AssertionError(f"grads: {call} outside of a micro-step")
        return self._step

    def _reducer(self, name: str) -> _Resident | _AddToShard | _Streamed:
        return self._resident if name in self._whole else self._streams

    def wants(self, block: str) -> bool:
        """True if any of a block's parameters has a gradient."""
        return any(p.block == block for slab in self.slabs.values() for p in slab.params)

    def load(self, block: str) -> None:
        """Take a slot for the block, and start to copy the earlier sums to which products add. Call
        this one block ahead of `full`."""
        step = self._current(f"load({block!r})")
        if block in self.slabs:
            self._reducer(block).load(self.slabs[block], step)

    def full(self, block: str) -> dict[str, Accumulator]:
        """Return the accumulators of a block's gradients in this micro-step, by parameter key."""
        step, accumulators = self._current(f"full({block!r})"), {}
        for slab in [self.slabs[name] for name in (*SHARED, block) if name in self.slabs]:
            tensor, accumulate = self._reducer(slab.name).full(slab, step)
            accumulators |= {
                p.key: Accumulator(slab.view(tensor, p), accumulate, self.scalars, p.index)
                for p in slab.params
                if p.block == block
            }
        return accumulators

    def notify(self, block: str) -> None:
        """Record that the block's gradients of this micro-step are enqueued, so that reduction may
        start."""
        step = self._current(f"notify({block!r})")
        if block in self.slabs:
            self._reducer(block).notify(self.slabs[block], step)

    def end_micro_step(self) -> None:
        """End the micro-step: the main stream waits for all reductions."""
        for name in SHARED:
            self.notify(name)
        for lane in self._lanes:
            lane.join()
        self._step = None

    def norm_squared(self, stats: Tensor) -> None:
        """Add the sum of squares of all shards to stats[norm_squared], after the last micro-step.
        stats: F64 (10,). The squares of a shard in host memory were summed before the shard was
        copied back."""
        for name, shard in self.shard.items():
            if not shard.on_host:
                global_norm.partials(self.dev, self._squares[name], shard)
        global_norm.total(self.dev, stats, self._all_squares)
