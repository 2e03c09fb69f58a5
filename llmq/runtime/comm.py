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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from llmq.dtypes import BF16, F32, I32, U8
from llmq.runtime.flags import KINDS
from llmq.runtime.tensor import Storage, Tensor

if TYPE_CHECKING:
    from llmq.runtime.device import Device, Event
    from llmq.runtime.links import LinkTable
    from llmq.runtime.plan_device import PlanDevice
    from llmq.runtime.workers import Workers

STAGING_CHUNK = 16 << 20  # bytes, at most: 0.3 ms of PCIe 5 x16
STAGING_CHUNKS = 4  # of the ring: one is written, one is read, and two keep both sides busy


@dataclass(frozen=True, slots=True, kw_only=True)
class CommOptions:
    """How data travels between GPUs; means nothing to the other devices.

    memcpy_all_gather: all_gather by the copy engines, else by NCCL. all_to_all_reduce: gradients
    are reduced with all_to_all, else with reduce_scatter. memcpy_send_recv: all_to_all by the copy
    engines, else by NCCL. p2p: "on", "off" or "auto", direct access to the memory of other GPUs.
    gathers_from_host: blocks are gathered from pinned memory, sources or mirrors.
    """

    memcpy_all_gather: bool = False
    memcpy_send_recv: bool = False
    all_to_all_reduce: bool = False
    p2p: str = "auto"
    gathers_from_host: bool = False

    @property
    def copies(self) -> bool:
        """Whether anything goes by the copy engines."""
        return self.memcpy_all_gather or (self.all_to_all_reduce and self.memcpy_send_recv)

    @property
    def exchange_stream(self) -> str:
        """The stream on which gradients are reduced: that of the gathers, or one beside it.

        Copies from host memory share neither flags nor buffers with exchanges by copies, and use
        one direction of the bus where exchanges use both.
        """
        apart = self.gathers_from_host and self.memcpy_all_gather and not self.nccl
        return "exchange" if apart else "comm"

    @property
    def nccl(self) -> bool:
        """Whether anything goes by NCCL."""
        return not (self.memcpy_all_gather and self.all_to_all_reduce and self.memcpy_send_recv)


class CommMemory(NamedTuple):
    """Pinned memory of one rank; a tensor is None where the options need none.

    flags: I32 (KINDS * W,), by which it waits for its peers. staging: U8, STAGING_CHUNKS equal
    buffers through which this rank's data go to the peers whose GPUs it cannot write to.
    """

    flags: Tensor | None
    staging: Tensor | None


def allocate(dev: Device, options: CommOptions) -> CommMemory:
    """Take a GPU's memory for collectives: the same in a plan for it, so that plan = run.

    With p2p "auto" the ring is taken whether or not the probe finds that it is needed.
    """
    flags = staging = None
    if dev.world_size > 1 and options.copies:
        count = KINDS * dev.world_size
        flags = dev.alloc("comm.flags", (count,), I32, "Activations", place="pinned")
        if options.p2p != "on":
            size = STAGING_CHUNKS * STAGING_CHUNK
            staging = dev.alloc("comm.staging", (size,), U8, "Activations", place="pinned")
    return CommMemory(flags, staging)


def connect(
    devices: Sequence[Device], options: CommOptions, workers: Workers | None = None
) -> LinkTable | None:
    """Give each device its `comm`; returns the measured links between GPUs, None without any.

    Called once, in one thread, with the devices of all ranks, directly after they are made: it
    allocates. With rank threads:

        devices[rank] = open_device(rank)         # a list that the ranks share
        workers.barrier()
        if rank == 0:
            links = connect(devices, options, workers)
        workers.barrier()

    workers: of the ranks' threads; needed by more than one rank, except on the plan device. When
    they are stopped, everything that waits for a peer, on the host or on a GPU, stops waiting.
    Close the devices when the threads of all ranks have ended, or after `dev.synchronize()` and a
    barrier: until then peers may use their flags and staging buffers. A plan needs one device, of
    any rank.
    Raises LlmqError where GPUs cannot talk to each other as the options demand.
    """
    if devices[0].world_size == 1:
        return None
    kind = devices[0].kind
    if kind == "plan":
        for dev in devices:
            dev.comm = PlanComm(dev, options)
        return None
    if kind == "host":
        from llmq.runtime.host_comm import connect_host

        connect_host(devices, workers)
        return None
    from llmq.runtime.cuda_comm import connect_cuda

    return connect_cuda(devices, options, workers)


def storages(dev: Device) -> dict[str, Storage]:
    """The device's storages by place."""
    return {p: arena.storage for p, arena in dev.arenas.items()} | {"stack": dev.stack.storage}


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one device start at the same byte."""
    return a.storage is b.storage and a.offset == b.offset


class Comm(ABC):
    """One rank's end of the collectives.

    last_operation: what was enqueued last, for diagnosis; of a graph that is replayed its name.
    exchange_stream: on which gradients are reduced, "comm" where gathers are, or "exchange".
    """

    exchange_stream = "comm"

    def __init__(self, dev: Device):
        self._dev = dev
        self.rank = dev.rank
        self.world_size = dev.world_size
        self.last_operation = "none"

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
        self.last_operation = operation

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

    def _all_gather(self, dst: Tensor, src: Tensor, mirror: Tensor | None) -> None:
        pass

    def _reduce_scatter(self, buffer: Tensor) -> None:
        pass

    def _all_to_all(self, buffer: Tensor, targets: list[Tensor], written: Event | None) -> None:
        pass


class SingleComm(SilentComm):
    """One rank: nothing to do, except to copy the source of an all_gather that is not in place."""

    def __init__(self, dev: Device):
        super().__init__(dev)
        self.rank, self.world_size = 0, 1

    def _all_gather(self, dst: Tensor, src: Tensor, mirror: Tensor | None) -> None:
        if not same_memory(dst, src):
            self._dev.copy(dst, src)


class PlanComm(Comm):
    """Counts. As memory traffic: what is received is written, as much is read."""

    _dev: PlanDevice

    def __init__(self, dev: PlanDevice, options: CommOptions):
        from llmq.runtime.device import HOST_SPEC  # which imports this module

        super().__init__(dev)
        if dev.spec != HOST_SPEC:
            allocate(dev, options)
        self._options = options
        self.exchange_stream = options.exchange_stream

    def _others(self, buffer: Tensor) -> int:
        """Bytes of all parts but one."""
        return buffer.nbytes // self.world_size * (self.world_size - 1)

    def _all_gather(self, dst: Tensor, src: Tensor, mirror: Tensor | None) -> None:
        received = dst.nbytes - src.nbytes
        loaded = src.nbytes if src.on_host else 0
        own = 0 if same_memory(part(dst, self.rank, self.world_size), src) else src.nbytes
        device_bytes = 2 * (received + own) - loaded
        if self._options.memcpy_all_gather and (src.on_host or mirror is not None):
            self._dev.collective("all_gather", device_bytes, loaded, 0, received)
        else:
            self._dev.collective("all_gather", device_bytes, loaded, received)

    def _reduce_scatter(self, buffer: Tensor) -> None:
        received = self._others(buffer)
        self._dev.collective("reduce_scatter", 2 * received, 0, received)

    def _all_to_all(self, buffer: Tensor, targets: list[Tensor], written: Event | None) -> None:
        received = self._others(buffer)
        self._dev.collective("all_to_all", 2 * received, 0, received)


@contextmanager
def silenced(dev: Device) -> Iterator[None]:
    """Within the block the device's collectives move nothing and wait for nobody."""
    comm, dev.comm = dev.comm, SilentComm(dev)
    try:
        yield
    finally:
        dev.comm = comm
