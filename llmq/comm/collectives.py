"""Collectives between the ranks of one process: what the training step calls on `dev.comm`.

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

from llmq.base.dtypes import BF16, F32
from llmq.base.tensor import Storage, Tensor
from llmq.runtime.device import Device, Event


def storages(dev: Device) -> dict[str, Storage]:
    """The device's storages by place."""
    return {p: arena.storage for p, arena in dev.arenas.items()} | {"stack": dev.stack.storage}


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one device start at the same byte."""
    return a.storage is b.storage and a.offset == b.offset


class Comm(ABC):
    """One rank's end of the collectives.

    exchange_stream: on which gradients are reduced, "comm" where gathers are, or "exchange".
    waits_for: whom the rank's thread is waiting for now, for diagnosis; None: for nobody.
    """

    exchange_stream = "comm"
    waits_for: str | None = None

    def __init__(self, dev: Device):
        self._dev = dev
        self.rank = dev.rank
        self.world_size = dev.world_size

    def all_gather(self, dst: Tensor, src: Tensor, mirror: Tensor | None = None) -> None:
        """Part p of dst becomes rank p's src.

        dst (W*n,), src (n,) of the same dtype; src may be dst's own part (in place) or pinned.
        mirror: a pinned tensor with the content of src, given by all ranks or by none, for peers
        to which copies cannot be made directly.
        """
        if dst.dtype != src.dtype:
            raise TypeError(f"all_gather: dst is {dst.dtype.label}, src is {src.dtype.label}")
        if dst.size != self.world_size * src.size:
            raise ValueError(
                f"all_gather: dst must have {self.world_size} x {src.size} elements, got {dst!r}"
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
        if self.world_size > 1:
            if spare is None or spare.dtype != buffer.dtype:
                raise TypeError(f"all_to_all: spare must be {buffer.dtype.label}, got {spare!r}")
            if spare.size * self.world_size != buffer.size:
                raise ValueError(
                    f"all_to_all: spare must have {buffer.size // self.world_size} elements, "
                    f"got {spare!r}"
                )
        self._begin(f"all_to_all {buffer.name}")
        targets = [part(buffer, self.rank, self.world_size)]
        for k in range(1, self.world_size):
            targets.append(spare if k == 1 else part(buffer, self.rank + k - 1, self.world_size))
        with self._dev.exposed():
            self._all_to_all(buffer, targets, written)
        world_size = self.world_size
        return [targets[(self.rank - source) % world_size] for source in range(world_size)]

    def free_part(self, buffer: Tensor) -> Tensor:
        """After reduce_scatter or all_to_all: a part (n,) of buffer where no result lies."""
        return part(buffer, self.rank - 1, self.world_size)

    def close(self) -> None:  # noqa: B027 - most hold nothing that needs closing
        """Release what a library holds; the device does this when it is closed."""

    def _begin(self, operation: str) -> None:
        self._dev.last_operation = operation

    def _check_parts(self, op: str, buffer: Tensor) -> None:
        if buffer.size % self.world_size:
            raise ValueError(
                f"{op}: buffer must have {self.world_size} equal parts, got {buffer!r}"
            )

    @abstractmethod
    def _all_gather(self, dst: Tensor, src: Tensor, mirror: Tensor | None) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, buffer: Tensor) -> None: ...

    @abstractmethod
    def _all_to_all(self, buffer: Tensor, targets: list[Tensor], written: Event | None) -> None:
        """targets[k]: where round k puts what comes from rank r - k. targets[0]: own part."""


def part(buffer: Tensor, index: int, world_size: int) -> Tensor:
    """Part `index` modulo W of a buffer (W*n,)."""
    n = buffer.size // world_size
    first = index % world_size * n
    return buffer.rows(first, first + n)


class SilentComm(Comm):
    """Collectives that move nothing: what they would bring keeps its last content."""

    def _nothing(self, *_: object) -> None:
        pass

    _all_gather = _reduce_scatter = _all_to_all = _nothing


class SingleComm(SilentComm):
    """One rank: nothing to do, except to copy the source of an all_gather that is not in place."""

    def __init__(self, dev: Device):
        super().__init__(dev)
        self.rank, self.world_size = 0, 1

    def _all_gather(self, dst: Tensor, src: Tensor, mirror: Tensor | None) -> None:
        if not same_memory(dst, src):
            self._dev.copy(dst, src)


@contextmanager
def silenced(dev: Device) -> Iterator[None]:
    """Within the block the device's collectives move nothing and wait for nobody."""
    comm, dev.comm = dev.comm, SilentComm(dev)
    try:
        yield
    finally:
        dev.comm = comm
