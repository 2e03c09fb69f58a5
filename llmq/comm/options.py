"""How data travels between GPUs, and the pinned memory that takes: staging, and flags by which
streams of different GPUs wait for each other.

A graph replays the same values for ever, so a flag cannot count. It belongs to one source, one
reader and one thing that the source fills and the reader empties, and goes back and forth: whoever
waits for one state writes the other one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmq.base.dtypes import I32, U8
from llmq.base.tensor import Tensor
from llmq.runtime.device import Device

STAGING_CHUNK = 16 << 20  # bytes, at most: 0.3 ms of PCIe 5 x16
STAGING_CHUNKS = 4  # of the ring: one is written, one is read, and two keep both sides busy


@dataclass(frozen=True, slots=True, kw_only=True)
class CommOptions:
    """How data travels between GPUs; means nothing to the other devices. memcpy_all_gather:
    all_gather by the copy engines, else by NCCL. all_to_all_reduce: gradients are reduced with
    all_to_all, else with reduce_scatter. memcpy_send_recv: all_to_all by the copy engines, else by
    NCCL. p2p: "on", "off" or "auto", direct access to the memory of other GPUs. gathers_from_host:
    blocks are gathered from pinned memory, sources or mirrors. matrices: ranks exchange what
    becomes of whole matrices, with all_to_all."""

    memcpy_all_gather: bool = False
    memcpy_send_recv: bool = False
    all_to_all_reduce: bool = False
    p2p: str = "auto"
    gathers_from_host: bool = False
    matrices: bool = False

    @property
    def copies(self) -> bool:
        """Whether anything goes by the copy engines."""
        return self.memcpy_all_gather or (self.all_to_all_reduce and self.memcpy_send_recv)

    @property
    def exchange_stream(self) -> str:
        """The stream on which gradients are reduced: that of the gathers, or one beside it. Copies
        from host memory share neither flags nor buffers with exchanges by copies, and use one
        direction of the bus where exchanges use both."""
        apart = self.gathers_from_host and self.memcpy_all_gather and not self.nccl
        return "exchange" if apart else "comm"

    @property
    def nccl(self) -> bool:
        """Whether anything goes by NCCL."""
        return not (self.memcpy_all_gather and self.all_to_all_reduce and self.memcpy_send_recv)


class CommMemory(NamedTuple):
    """Pinned memory of one rank; a tensor is None where the options need none. flags: I32 (KINDS *
    W,), by which it waits for its peers. staging: U8, STAGING_CHUNKS equal buffers through which
    this rank's data go to the peers whose GPUs it cannot write to."""

    flags: Tensor | None
    staging: Tensor | None


def allocate(dev: Device, options: CommOptions) -> CommMemory:
    """Take a GPU's memory for collectives: the same in a plan for it, so that plan = run. With p2p
    "auto" the ring is taken whether or not the probe finds that it is needed."""
    flags = staging = None
    shards = dev.mesh.size("shard")
    if shards > 1 and options.copies:
        count = KINDS * shards
        flags = dev.alloc("comm.flags", (count,), I32, "Activations", place="pinned")
        if options.p2p != "on":
            size = STAGING_CHUNKS * STAGING_CHUNK
            staging = dev.alloc("comm.staging", (size,), U8, "Activations", place="pinned")
    return CommMemory(flags, staging)


# One bit each, because streams wait for a bit: RELEASED ends every wait, whatever it is for.
EMPTY, FULL, RELEASED = 1, 2, 3
# A flag is about one of these: the reader's target in a gather and in an exchange, the source's
# pinned tensor, buffer i of its ring.
TARGET, EXCHANGED, PINNED, RING = 0, 1, 2, 3
KINDS = 8  # of flags; the others are buffers of the ring


class Flags:
    """All ranks' flags. For use by all threads."""

    def __init__(self, tensors: Sequence[Tensor]):
        """tensors: I32 (KINDS * W,) of each rank, in pinned memory."""
        self._tensors = tensors
        self._world_size = len(tensors)
        self._bases = [t.ptr for t in tensors]
        for tensor in tensors:
            states = tensor.numpy().reshape(KINDS, self._world_size)
            states[:] = EMPTY
            states[[TARGET, EXCHANGED]] = FULL  # until the reader grants it

    def address(self, kind: int, source: int, reader: int) -> int:
        """Where the flag of this kind, source and reader is: in the reader's memory."""
        return self._bases[reader] + 4 * (kind * self._world_size + source)

    def release(self, ranks: Iterable[int]) -> None:
        """End the waits for flags in the memory of these ranks, until the flags change again."""
        for rank in ranks:
            self._tensors[rank].numpy().fill(RELEASED)
