"""Options of transfers between GPUs, and pinned memory for them: staging buffers and flags.

Streams of different GPUs wait for each other by flags. A flag cannot count, because a graph replays
the same values forever. A flag belongs to one source, one reader and one buffer, which the source
fills and the reader empties. The flag alternates between two states: each side waits for one state
and writes the other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmq.base.dtypes import I32, U8
from llmq.base.tensor import Tensor
from llmq.runtime.device import Device

STAGING_CHUNK = 16 << 20  # most bytes of a buffer, which take 0.3 ms on PCIe 5 x16
STAGING_CHUNKS = 4  # buffers of a ring: one is written, one is read, two wait in between


@dataclass(frozen=True, slots=True, kw_only=True)
class CommOptions:
    """Options of transfers between GPUs; without effect on other devices. memcpy_all_gather: True:
    the copy engines do all_gather; False: NCCL. all_to_all_reduce: True: all_to_all reduces
    gradients; False: reduce_scatter. memcpy_send_recv: True: the copy engines do all_to_all; False:
    NCCL. p2p: direct access to the memory of other GPUs: "on", "off" or "auto". gathers_from_host:
    True if the weights of blocks are gathered from pinned memory. matrices: True if ranks exchange
    changes of whole matrices, with all_to_all. memcpy_send_recv also decides how ranks that divide
    sequences exchange parts."""

    memcpy_all_gather: bool = False
    memcpy_send_recv: bool = False
    all_to_all_reduce: bool = False
    p2p: str = "auto"
    gathers_from_host: bool = False
    matrices: bool = False

    @property
    def copies(self) -> bool:
        """True if any operation uses the copy engines."""
        return self.memcpy_all_gather or (self.all_to_all_reduce and self.memcpy_send_recv)

    @property
    def exchange_stream(self) -> str:
        """The name of the stream on which gradients are reduced: "comm", the stream of gathers, or
        "exchange". Gathers from host memory share neither flags nor buffers with exchanges by
        copies. Gathers from host memory use one direction of the bus; exchanges use both
        directions."""
        apart = self.gathers_from_host and self.memcpy_all_gather and not self.nccl
        return "exchange" if apart else "comm"

    @property
    def nccl(self) -> bool:
        """True if any operation uses NCCL."""
        return not (self.memcpy_all_gather and self.all_to_all_reduce and self.memcpy_send_recv)


class CommMemory(NamedTuple):
    """Pinned memory of one rank; a tensor is None if the options need none. flags: I32 (KINDS *
    W,), by which the rank waits for peers; W is the number of shards. staging: U8, the rank's ring
    of STAGING_CHUNKS equal buffers, for data to peers whose GPUs this rank cannot write to."""

    flags: Tensor | None = None
    staging: Tensor | None = None


def allocate(dev: Device, options: CommOptions) -> dict[str, CommMemory]:
    """Allocate and return a rank's flags and staging rings, by axis; a plan allocates the same
    bytes. With --p2p auto there is a ring even if the probe of links finds no use for it."""
    copied = {"shard": options.copies, "context": options.memcpy_send_recv}
    found = {}
    for axis, by_copies in copied.items():
        flags = staging = None
        if dev.mesh.size(axis) > 1 and by_copies:
            count = KINDS * dev.mesh.size("shard")
            flags = dev.alloc(f"comm.{axis}_flags", (count,), I32, "Activations", place="pinned")
            if options.p2p != "on":
                name, size = f"comm.{axis}_staging", STAGING_CHUNKS * STAGING_CHUNK
                staging = dev.alloc(name, (size,), U8, "Activations", place="pinned")
        found[axis] = CommMemory(flags, staging)
    return found


# Each state of a flag is one bit, because streams wait for a bit. RELEASED has both bits, and
# therefore ends every wait.
EMPTY, FULL, RELEASED = 1, 2, 3
# Kinds of flags, by their buffers: the reader's target in a gather (TARGET) or in an exchange
# (EXCHANGED), the source's pinned tensor (PINNED), buffer i of the source's ring (RING + i).
TARGET, EXCHANGED, PINNED, RING = 0, 1, 2, 3
KINDS = 8  # number of kinds of flags; kinds from RING on are buffers of the ring


class Flags:
    """The flags of all ranks; all threads use one object."""

    def __init__(self, tensors: Sequence[Tensor]):
        """tensors: I32 (KINDS * W,) of each rank, in pinned memory."""
        self._tensors = tensors
        self._world_size = len(tensors)
        self._bases = [t.ptr for t in tensors]
        for tensor in tensors:
            states = tensor.numpy().reshape(KINDS, self._world_size)
            states[:] = EMPTY
            states[[TARGET, EXCHANGED]] = FULL  # until the reader permits a write

    def address(self, kind: int, source: int, reader: int) -> int:
        """Return the address of the flag of this kind, source and reader, in the reader's
        memory."""
        return self._bases[reader] + 4 * (kind * self._world_size + source)

    def release(self, ranks: Iterable[int]) -> None:
        """End waits for flags in the memory of these ranks, until the flags change again."""
        for rank in ranks:
            self._tensors[rank].numpy().fill(RELEASED)
