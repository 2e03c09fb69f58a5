"""Collectives between ranks; the training step calls them on the groups of `dev.mesh`.

A group is the set of ranks along an axis of the mesh. The ranks along "shard" hold one replica of
the state together, each rank its shard. The ranks along "replica" hold the same shard of different
replicas. The ranks along "context", a subset of the ranks along "shard", exchange parts of
sequences. Part p of a buffer (W*n,) is its n elements from p*n on, with W ranks in the group.

Every call is enqueued on the current stream and returns at once. When the stream has executed the
call, its targets are complete and its sources may be overwritten. The calls of one rank must run
one after another (on one stream, or with events between streams); only gathers from pinned memory
may run beside exchanges (`exchange_stream`). All ranks make the same calls in the same order. All
ranks allocate the same tensors in the same order, so that a peer's tensor lies at the same offset
of the peer's memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations

from llmq.base.dtypes import BF16, F32
from llmq.base.tensor import Storage, Tensor
from llmq.runtime.device import Device, Event
from llmq.runtime.mesh import SHARD, Mesh


def storages(dev: Device) -> dict[str, Storage]:
    """Return the device's memory that peers may reach, by place ("gpu", "pinned" or the like)."""
    places = {p: arena.storage for p, arena in dev.arenas.items() if arena.storage.tier.direct}
    return places | {"stack": dev.stack.storage}


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors of one device start at the same byte."""
    return a.storage is b.storage and a.offset == b.offset


class Comm(ABC):
    """One rank's end of the collectives of a group. ranks: the numbers of the group's `size` ranks,
    in order. rank: this rank's place in `ranks`. waits_for: name of the ranks for which this rank's
    thread waits now, for diagnosis; None if the thread does not wait. exchange_stream: name of the
    stream on which gradients are reduced, either "comm", the stream of gathers, or "exchange"."""

    exchange_stream = "comm"
    waits_for: str | None = None

    def __init__(self, dev: Device, *axes: str):
        """axes: axes of the device's mesh along which the group's ranks lie."""
        self._dev = dev
        self.ranks = dev.mesh.ranks(*axes)
        self.rank, self.size = dev.mesh.index(*axes), len(self.ranks)

    def all_gather(self, dst: Tensor, src: Tensor, mirror: Tensor | None = None) -> None:
        """Write rank p's src to part p of dst. dst: (W*n,). src: (n,) of dst's dtype, either this
        rank's part of dst or another tensor, which may be in pinned memory or in files. mirror: a
        copy of src in pinned memory, for peers that direct copies cannot reach; either all ranks
        give a mirror, or no rank does."""
        if dst.dtype != src.dtype:
            raise TypeError(f"all_gather: dst is {dst.dtype.label}, src is {src.dtype.label}")
        if dst.size != self.size * src.size:
            raise ValueError(
                f"all_gather: dst must have {self.size} x {src.size} elements, got {dst!r}"
            )
        self._begin(f"all_gather {dst.name}")
        if not src.direct:  # no peer can read src
            own = part(dst, self.rank, self.size)
            self._dev.copy(own, src)
            src = own
        with self._dev.exposed():
            self._all_gather(dst, src, mirror)

    def reduce_scatter(self, buffer: Tensor) -> None:
        """Write the sum over ranks to this rank's part of buffer; the other parts become undefined.
        buffer: (W*n,), F32 or BF16; rank p's part is elements [p*n, (p+1)*n)."""
        if buffer.dtype not in (F32, BF16):
            raise TypeError(f"reduce_scatter: buffer must be F32 or BF16, got {buffer!r}")
        self._check_parts("reduce_scatter", buffer)
        self._begin(f"reduce_scatter {buffer.name}")
        with self._dev.exposed():
            self._reduce_scatter(buffer)

    def all_reduce(self, buffer: Tensor) -> None:
        """Write the sum over ranks to buffer, F32 or BF16, with the same bits on all ranks."""
        if buffer.dtype not in (F32, BF16):
            raise TypeError(f"all_reduce: buffer must be F32 or BF16, got {buffer!r}")
        self._begin(f"all_reduce {buffer.name}")
        with self._dev.exposed():
            self._all_reduce(buffer)

    def all_to_all(
        self, buffer: Tensor, spare: Tensor | None, written: Event | None = None
    ) -> list[Tensor]:
        """Send part p of buffer to rank p; return the W tensors (n,) that this rank receives, by
        source rank. buffer: (W*n,). spare: (n,) of buffer's dtype; None with one rank. The results
        lie inside buffer or spare; all other parts of buffer are overwritten. In round k rank r
        sends to rank r + k and receives from rank r - k. The first round receives into spare; each
        later round receives into the part that the round before has sent. written: event after
        which no other kernel changes buffer. Data that pass through host memory are sent after this
        event, even if the current stream is still busy with an earlier exchange."""
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
            self._all_to_all(buffer, targets, written, None)
        return [targets[(self.rank - source) % self.size] for source in range(self.size)]

    def exchange(self, out: Tensor, x: Tensor) -> None:
        """Write rank p's part of x for this rank to part p of out. out, x: (W*n,) of one dtype, in
        different memory; part r of x is for rank r."""
        if (out.dtype, out.size) != (x.dtype, x.size):
            raise TypeError(f"exchange: out and x must be alike, got {out!r} and {x!r}")
        self._check_parts("exchange", x)
        self._begin(f"exchange {x.name}")
        targets = [part(out, self.rank - k, self.size) for k in range(self.size)]
        self._dev.copy(targets[0], part(x, self.rank, self.size))
        with self._dev.exposed():
            self._all_to_all(x, targets, None, out)

    def free_part(self, buffer: Tensor) -> Tensor:
        """Return a part (n,) of buffer that has no result after reduce_scatter or all_to_all."""
        return part(buffer, self.rank - 1, self.size)

    def close(self) -> None:  # noqa: B027 - most subclasses hold no resources
        """Release a library's resources; the device calls this method when the device is closed."""

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
    def _all_to_all(
        self, buffer: Tensor, targets: list[Tensor], written: Event | None, out: Tensor | None
    ) -> None:
        """Send part p of buffer to rank p. targets[k]: tensor to which round k writes the part from
        rank r - k; targets[0] is this rank's own part. out: the tensor whose parts, by source rank,
        are the targets; None if the targets lie as `all_to_all` says."""


def part(buffer: Tensor, index: int, count: int) -> Tensor:
    """Return part `index` (modulo count) of a buffer (count * n,)."""
    n = buffer.size // count
    first = index % count * n
    return buffer.rows(first, first + n)


class SilentComm(Comm):
    """Collectives that move no data, so that targets keep their former content."""

    def _nothing(self, *_: object) -> None:
        pass

    _all_gather = _reduce_scatter = _all_reduce = _all_to_all = _nothing


class SingleComm(SilentComm):
    """The collectives of a single rank; only all_gather copies, if its source lies outside dst."""

    def _all_gather(self, dst: Tensor, src: Tensor, mirror: Tensor | None) -> None:
        if not same_memory(dst, src):
            self._dev.copy(dst, src)


class AxesComm(SilentComm):
    """Gathers along several axes: the first gather is along the innermost axis, and each result is
    gathered along the next outer axis."""

    def __init__(self, dev: Device, axes: Sequence[str], ends: Sequence[Comm]):
        """ends: this rank's end along each axis, outermost first."""
        super().__init__(dev, *axes)
        self._ends = ends

    def all_gather(self, dst: Tensor, src: Tensor, mirror: Tensor | None = None) -> None:
        targets = [dst]
        for end in self._ends[:-1]:
            targets.append(part(targets[-1], end.rank, end.size))
        for end, target in zip(self._ends[::-1], targets[::-1], strict=True):
            end.all_gather(target, src)
            src = target


def join(dev: Device, make: Callable[[str], Comm]) -> None:
    """Set the groups of a device's mesh. make: returns this rank's end of the collectives along an
    axis with more than one rank."""
    mesh = dev.mesh
    whole = dict.fromkeys("shard" if axis in SHARD else axis for axis in mesh.axes)
    ends = {a: make(a) if mesh.size(a) > 1 else SingleComm(dev, a) for a in whole}
    mesh.groups.clear()
    for count in range(len(ends)):
        for axes in combinations(ends, count + 1):
            # The innermost end copies the source to its place, even for a single rank.
            *outer, inner = (ends[axis] for axis in axes)
            several = [*(end for end in outer if end.size > 1), inner]
            named = mesh.named(axes)
            mesh.groups[named] = AxesComm(dev, axes, several) if len(several) > 1 else inner
    if "context" in mesh.axes:
        inner = mesh.size("context") > 1
        mesh.groups["context",] = make("context") if inner else SingleComm(dev, "context")


@contextmanager
def silenced(dev: Device) -> Iterator[None]:
    """Within the `with` block, let the device's collectives move no data and wait for no rank."""
    mesh, dev.mesh = dev.mesh, Mesh(dev.mesh.axes, dev.mesh.rank)
    join(dev, lambda axis: SilentComm(dev, axis))
    try:
        yield
    finally:
        dev.mesh = mesh
