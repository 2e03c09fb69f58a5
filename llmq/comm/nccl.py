"""NCCL: each rank has a communicator for each of its groups; one thread makes all communicators."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from llmq.base.dtypes import BF16, F32
from llmq.base.errors import LlmqError
from llmq.base.tensor import Tensor
from llmq.comm.collectives import part
from llmq.runtime.cuda_device import CudaDevice
from llmq.runtime.world import World

BYTES = 0  # ncclInt8
TYPES = {F32: 7, BF16: 9}  # ncclFloat32, ncclBfloat16
SUM = 0  # ncclSum
WARM_UP_BYTES = 4096
# Number of thread blocks of a call; each thread block occupies a multiprocessor while the block
# waits. For measurements see docs/decisions/collectives.md, "four H200".
CHANNELS = 8


def load() -> Any:
    """Return CuPy's binding of NCCL. Raises LlmqError if the library is missing."""
    from cupy.cuda import nccl

    if not nccl.available:
        raise LlmqError(
            "NCCL cannot be loaded: install nvidia-nccl-cu12 (or -cu13, as CuPy), or use "
            "--memcpy-all-gather --all-to-all-reduce --memcpy-send-recv, which do without"
        )
    return nccl


def set_environment(peer_access: bool, *, several: bool) -> None:
    """Set NCCL's environment variables before the first communicator, because NCCL reads the
    variables once. peer_access: False restricts NCCL to host memory. several: True if other
    processes have ranks, too. Between processes, NCCL chooses algorithms by message size and
    connects each algorithm at its first use; a variable makes NCCL connect all algorithms at once
    (see `establish`)."""
    if several:
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    if not peer_access:
        os.environ["NCCL_P2P_DISABLE"] = "1"
        os.environ["NCCL_NVLS_ENABLE"] = "0"
    else:
        os.environ.setdefault("NCCL_MAX_CTAS", str(CHANNELS))


def open_communicators(
    nccl: Any, devices: Sequence[CudaDevice], axis: str, world: World | None
) -> list[Nccl]:
    """Return, for each device, its end of a communicator of the ranks along an axis. world: the
    processes over which the groups are spread, which all call this function; None if all ranks of
    the groups are in this process."""
    # One thread makes all communicators, because a rank's thread would hold the interpreter lock
    # while NCCL waits for the other ranks.
    if world is None:
        communicators = nccl.NcclCommunicator.initAll([dev.index for dev in devices])
    else:
        firsts = [dev.mesh for dev in devices if dev.mesh.index(axis) == 0]
        new_ids = {mesh.ranks(axis): nccl.get_unique_id() for mesh in firsts}
        ids = {ranks: id for of_one in world.gather(new_ids) for ranks, id in of_one.items()}
        communicators = []
        nccl.groupStart()  # so that no call waits for another
        for dev in devices:
            dev.api.setDevice(dev.index)
            size, rank = dev.mesh.size(axis), dev.mesh.index(axis)
            unique_id = ids[dev.mesh.ranks(axis)]
            communicators.append(nccl.NcclCommunicator(size, unique_id, rank))
        nccl.groupEnd()
    return [Nccl(dev, nccl, c, axis) for dev, c in zip(devices, communicators, strict=True)]


def establish(nccl: Any, ends: Sequence[Nccl], calls: Sequence[str]) -> None:
    """Make all connections that these calls need, by one call of each kind, from one thread.
    Without this call, NCCL would connect within a rank's first collective, and the rank's thread
    would wait on the host for other ranks. The other ranks' streams may wait for a flag that this
    rank has yet to write, which would be a deadlock."""
    api, buffers = ends[0].dev.api, []
    try:
        for end in ends:
            api.setDevice(end.dev.index)
            buffers.append(api.malloc(end.size * WARM_UP_BYTES))
        for call in calls:
            nccl.groupStart()
            for end, buffer in zip(ends, buffers, strict=True):
                api.setDevice(end.dev.index)
                end.warm_up(call, buffer)
            nccl.groupEnd()
        for end in ends:
            api.setDevice(end.dev.index)
            api.deviceSynchronize()
    finally:
        for end, buffer in zip(ends, buffers, strict=False):  # an allocation may have failed
            api.setDevice(end.dev.index)
            api.free(buffer)


class Nccl:
    """One rank's end of a communicator; Comm documents the methods."""

    def __init__(self, dev: CudaDevice, nccl: Any, communicator: Any, axis: str):
        self.dev, self.communicator = dev, communicator
        self.rank, self.size = dev.mesh.index(axis), dev.mesh.size(axis)
        self._nccl = nccl

    def warm_up(self, call: str, buffer: int) -> None:
        """Make one call of the kind `call`. buffer: address of WARM_UP_BYTES bytes for each rank of
        the group."""
        stream, communicator = self.dev.stream, self.communicator
        own = buffer + self.rank * WARM_UP_BYTES
        sums = (WARM_UP_BYTES // F32.itemsize, TYPES[F32], SUM, stream)
        if call == "all_gather":
            communicator.allGather(own, buffer, WARM_UP_BYTES, BYTES, stream)
        elif call == "reduce_scatter":
            communicator.reduceScatter(buffer, own, *sums)
        elif call == "all_reduce":
            communicator.allReduce(buffer, buffer, *sums)
        else:
            for peer in range(self.size):
                if peer != self.rank:
                    target = buffer + peer * WARM_UP_BYTES
                    communicator.send(buffer, WARM_UP_BYTES, BYTES, peer, stream)
                    communicator.recv(target, WARM_UP_BYTES, BYTES, peer, stream)

    def all_gather(self, dst: Tensor, src: Tensor) -> None:
        """Gather dst from src. A pinned source is copied to its part of dst first, because peers
        may read a source."""
        if src.on_host:
            own = part(dst, self.rank, self.size)
            self.dev.copy(own, src)
            src = own
        self.communicator.allGather(src.ptr, dst.ptr, src.nbytes, BYTES, self.dev.stream)

    def reduce_scatter(self, buffer: Tensor) -> None:
        """Sum over ranks in NCCL's order; BF16 is rounded after each addition."""
        own = part(buffer, self.rank, self.size)
        self.communicator.reduceScatter(
            buffer.ptr, own.ptr, own.size, TYPES[buffer.dtype], SUM, self.dev.stream
        )

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum like reduce_scatter; all ranks get the sum, with the same bits."""
        self.communicator.allReduce(
            buffer.ptr, buffer.ptr, buffer.size, TYPES[buffer.dtype], SUM, self.dev.stream
        )

    def all_to_all(self, buffer: Tensor, targets: Sequence[Tensor]) -> None:
        """Send part p of buffer to rank p. targets[k], for k >= 1: tensor to which round k writes
        the part from rank r - k."""
        for k in range(1, self.size):
            sent = part(buffer, self.rank + k, self.size)
            reader, source = (self.rank + k) % self.size, (self.rank - k) % self.size
            self._nccl.groupStart()
            self.communicator.send(sent.ptr, sent.nbytes, BYTES, reader, self.dev.stream)
            self.communicator.recv(targets[k].ptr, sent.nbytes, BYTES, source, self.dev.stream)
            self._nccl.groupEnd()
