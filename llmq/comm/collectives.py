"""Collectives between ranks: what the training step calls on `dev.comm`.

There are three groups of ranks. Of a device's `comm` are those that together have one replica of
the state, each its shard of it; of `comm.cross` those with the same shard, one of each replica; of
`comm.world` all. Where there is one replica, `comm` is that of all, and `cross` is None.

Every call is enqueued on the current stream and returns at once; when the stream has done it, its
targets are complete and its sources may be written again. The calls of one rank must be ordered
among themselves (one stream, or events between streams), except that gathers from pinned memory may
run beside exchanges (`exchange_stream`), and all ranks make the same calls in the same order. All
ranks allocate the same tensors in the same order, so a tensor of a peer lies at the same offset in
the peer's memory of the same place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from llmq.base.dtypes import BF16, F32
from llmq.base.tensor import Storage, Tensor
from llmq.runtime.device import Device, Event


def storages(dev: Device) -> dict[str, Storage]:
    """The device's storages by place."""
    return {p: arena.storage for p, arena in dev.arenas.items()} | {"stack": dev.stack.storage}


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one device start at the same byte."""
    return a.storage is b.storage and a.offset == b.offset


class Group(NamedTuple):
    """Some ranks, in the order of their numbers, and which of them this one is."""

    ranks: tuple[int, ...]
    place: int

    @classmethod
    def of_shards(cls, dev: Device) -> Group:
        """Those that together have one replica of the state."""
        first = dev.replica * dev.shards
        return cls(tuple(range(first, first + dev.shards)), dev.shard)

    @classmethod
    def across(cls, dev: Device) -> Group:
        """Those that have the same shard."""
        return cls(tuple(range(dev.shard, dev.world_size, dev.shards)), dev.replica)


class Comm(ABC):
    """One rank's end of the collectives of a group.

    rank: its place in the group; size: of the group. cross: of those with the same shard, None
    where there is one replica. exchange_stream: on which gradients are reduced, "comm" where
    gathers are, or "exchange".
    """

    exchange_stream = "comm"
    cross: Comm | None = None
    _waiting: str | None = None

    def __init__(self, dev: Device, group: Group | None = None):
        """group: None: that of shards."""
        self._dev = dev
        self.group = group or Group.of_shards(dev)
        self.rank, self.size = self.group.place, len(self.group.ranks)

    @property
    def world(self) -> Comm:
        """Of all ranks. It gathers only."""
        return self if self.cross is None else WorldComm(self._dev, self, self.cross)

    @property
    def waits_for(self) -> str | None:
        """Whom the rank's thread is waiting for now, for diagnosis; None: for nobody."""
        return self._waiting or (self.cross and self.cross.waits_for)

    def all_gather(self, dst: Tensor, src: Tensor, mirror: Tensor | None = None) -> None:
        """Part p of dst becomes rank p's src.

        dst (W*n,), src (n,) of the same dtype; src may be dst's own part (in place) or pinned.
        mirror: a pinned tensor with the content of src, given by all ranks or by none, for peers
        to which copies cannot be made directly.
        """
        if dst.dtype != src.dtype:
            raise TypeError(f"all_gather: dst is {dst.dtype.label}, src is {src.dtype.label}")
        if dst.size != self.size * src.size:
            raise ValueError(
                f"all_gather: dst must have {self.size} x {src.size} elements, got {dst!r}"
            )
        self._begin(f"all_gather {dst.name}")
        with self._dev.exposed():
            self._all_gather(dst, src, mirror)

    def reduce_scatter(self, buffer: Tensor) -> None:
        """The rank's own part of buffer becomes the sum over ranks, the other parts undefined.

        buffer (W*n,), F32 or BF16; part p is elements [p*n, (p+1)*n).
        """
        if buffer.dtype not in (F32, BF16):
            raise TypeError(f"reduce_scatter: buffer must be F32 or BF16, got {buffer!r}")
        self._check_parts("reduce_scatter", buffer)
        self._begin(f"reduce_scatter {buffer.name}")
        with self._dev.exposed():
            self._reduce_scatter(buffer)

    def all_reduce(self, buffer: Tensor) -> None:
        """buffer becomes the sum over ranks, F32 or BF16, with the same bits on all of them."""
        if buffer.dtype not in (F32, BF16):
            raise TypeError(f"all_reduce: buffer must be F32 or BF16, got {buffer!r}")
        self._begin(f"all_reduce {buffer.name}")
        with self._dev.exposed():
            self._all_reduce(buffer)

    def all_to_all(
        self, buffer: Tensor, spare: Tensor | None, written: Event | None = None
    ) -> list[Tensor]:
        """Everyone's part for this rank: W tensors (n,) by source rank, inside buffer or spare.

        buffer (W*n,) with part p for rank p, spare (n,) of the same dtype (None with one rank).
        Destroys the other parts of buffer: in round k rank r sends to rank r + k and receives from
        rank r - k, in the first round into spare, later into the part sent in the round before.
        written: after it nothing else changes buffer. What goes through host memory leaves then,
        even if the current stream is still busy with an exchange before.
        """
        self._check_parts("all_to_all", buffer)
        if self.size > 1:
            if spare is None or spare.dtype != buffer.dtype:
                raise TypeError(f"all_to_all: spare must be {buffer.dtype.label}, got {spare!r}")
            if spare.size * self.size != buffer.size:
                raise ValueError(
                    f"all_to_all: spare must have {buffer.size // self.size} elements, "
                    f"got {spare!r}"
                )
        self._begin(f"all_to_all {buffer.name}")
        targets = [part(buffer, self.rank, self.size)]
        for k in range(1, self.size):
            targets.append(spare if k == 1 else part(buffer, self.rank + k - 1, self.size))
        with self._dev.exposed():
            self._all_to_all(buffer, targets, written)
        return [targets[(self.rank - source) % self.size] for source in range(self.size)]

    def free_part(self, buffer: Tensor) -> Tensor:
        """After reduce_scatter or all_to_all: a part (n,) of buffer where no result lies."""
        return part(buffer, self.rank - 1, self.size)

    def close(self) -> None:
        """Release what a library holds; the device does this when it is closed."""
        if self.cross is not None:
            self.cross.close()

    def _begin(self, operation: str) -> None:
        self._dev.last_operation = operation

    def _check_parts(self, op: str, buffer: Tensor) -> None:
        if buffer.size % self.size:
            raise ValueError(f"{op}: buffer must have {self.size} equal parts, got {buffer!r}")

    @abstractmethod
    def _all_gather(self, dst: Tensor, src: Tensor, mirror: Tensor | None) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, buffer: Tensor) -> None: ...

    @abstractmethod
    def _all_reduce(self, buffer: Tensor) -> None: ...

    @abstractmethod
    def _all_to_all(self, buffer: Tensor, targets: list[Tensor], written: Event | None) -> None:
        """targets[k]: where round k puts what comes from rank r - k. targets[0]: own part."""


def part(buffer: Tensor, index: int, count: int) -> Tensor:
    """Part `index` modulo W of a buffer (W*n,), which has `count` = W of them."""
    n = buffer.size // count
    first = index % count * n
    return buffer.rows(first, first + n)


class SilentComm(Comm):
    """Collectives that move nothing: what they would bring keeps its last content."""

    def _nothing(self, *_: object) -> None:
        pass

    _all_gather = _reduce_scatter = _all_reduce = _all_to_all = _nothing


class SingleComm(SilentComm):
    """One rank: nothing to do, except to copy the source of an all_gather that is not in place."""

    def _all_gather(self, dst: Tensor, src: Tensor, mirror: Tensor | None) -> None:
        if not same_memory(dst, src):
            self._dev.copy(dst, src)


class WorldComm(SilentComm):
    """All ranks: what those of a replica have gathered goes across."""

    def __init__(self, dev: Device, inner: Comm, cross: Comm):
        super().__init__(dev, Group(tuple(range(dev.world_size)), dev.rank))
        self._inner, self._across = inner, cross

    def all_gather(self, dst: Tensor, src: Tensor, mirror: Tensor | None = None) -> None:
        own = part(dst, self._across.rank, self._across.size)
        self._inner.all_gather(own, src)
        self._across.all_gather(dst, own)


@contextmanager
def silenced(dev: Device) -> Iterator[None]:
    """Within the block the device's collectives move nothing and wait for nobody."""
    comm, dev.comm = dev.comm, SilentComm(dev)
    if dev.replicas > 1:
        dev.comm.cross = SilentComm(dev, Group.across(dev))
    try:
        yield
    finally:
        dev.comm = comm
