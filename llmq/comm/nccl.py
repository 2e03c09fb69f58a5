"""NCCL: a communicator per rank and group, all of a process made by one thread."""

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
# Thread blocks of a call, each on a multiprocessor that spins while it waits. Measured: see
# docs/decisions/collectives.md, "four H200".
CHANNELS = 8


def load() -> Any:
    """CuPy's binding of NCCL. Raises LlmqError where the library is missing."""
    from cupy.cuda import nccl

    if not nccl.available:
        raise LlmqError(
            "NCCL cannot be loaded: install nvidia-nccl-cu12 (or -cu13, as CuPy), or use "
            "--memcpy-all-gather --all-to-all-reduce --memcpy-send-recv, which do without"
        )
    return nccl


def set_environment(peer_access: bool, *, several: bool) -> None:
    """Before the first communicator: NCCL reads this once in the life of a process. peer_access
    False: it goes through host memory only. several: there are ranks of other processes. To these
    it may choose another algorithm by the size of what it sends, and would connect each at its
    first use, see `establish`: it shall connect all at once."""
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
    """Each device's end of a communicator of the ranks along an axis. world: whose processes, which
    all call this, have ranks of these groups; None: the groups have this process's ranks only."""
    # From one thread: a rank that made its own would hold the interpreter lock, waiting for all.
    if world is None:
        made = nccl.NcclCommunicator.initAll([dev.index for dev in devices])
    else:
        firsts = [dev.mesh for dev in devices if dev.mesh.index(axis) == 0]
        begun = {mesh.ranks(axis): nccl.get_unique_id() for mesh in firsts}
        ids = {ranks: id for of_one in world.gather(begun) for ranks, id in of_one.items()}
        made = []
        nccl.groupStart()  # so that none of the calls waits for the others
        for dev in devices:
            dev.api.setDevice(dev.index)
            args = (dev.mesh.size(axis), ids[dev.mesh.ranks(axis)], dev.mesh.index(axis))
            made.append(nccl.NcclCommunicator(*args))
        nccl.groupEnd()
    return [Nccl(dev, nccl, c, axis) for dev, c in zip(devices, made, strict=True)]


def establish(nccl: Any, ends: Sequence[Nccl], calls: Sequence[str]) -> None:
    """Make all connections that these calls need, by one of each, from one thread. NCCL would make
    them within the first calls: in the ranks' threads, waiting on the host for the other ranks,
    whose streams may be waiting for a flag that this rank has yet to write."""
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
        for end, buffer in zip(ends, buffers, strict=False):  # perhaps not all were allocated
            api.setDevice(end.dev.index)
            api.free(buffer)


class Nccl:
    """One rank's end; the calls mean what they mean in Comm."""

    def __init__(self, dev: CudaDevice, nccl: Any, communicator: Any, axis: str):
        self.dev, self.communicator = dev, communicator
        self.rank, self.size = dev.mesh.index(axis), dev.mesh.size(axis)
        self._nccl = nccl

    def warm_up(self, call: str, buffer: int) -> None:
        """One call of a kind. buffer: address of WARM_UP_BYTES for each rank of the group."""
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
                    at = buffer + peer * WARM_UP_BYTES
                    communicator.send(buffer, WARM_UP_BYTES, BYTES, peer, stream)
                    communicator.recv(at, WARM_UP_BYTES, BYTES, peer, stream)

    def all_gather(self, dst: Tensor, src: Tensor) -> None:
        """Pinned sources go to their place in dst first: peers may read sources directly."""
        if src.on_host:
            own = part(dst, self.rank, self.size)
            self.dev.copy(own, src)
            src = own
        self.communicator.allGather(src.ptr, dst.ptr, src.nbytes, BYTES, self.dev.stream)

    def reduce_scatter(self, buffer: Tensor) -> None:
        """The order of the sum is NCCL's; BF16 is rounded after each addition."""
        own = part(buffer, self.rank, self.size)
        self.communicator.reduceScatter(
            buffer.ptr, own.ptr, own.size, TYPES[buffer.dtype], SUM, self.dev.stream
        )

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum as reduce_scatter does, but all get the sum, with the same bits."""
        args = (buffer.size, TYPES[buffer.dtype], SUM, self.dev.stream)
        self.communicator.allReduce(buffer.ptr, buffer.ptr, *args)

    def all_to_all(self, buffer: Tensor, targets: Sequence[Tensor]) -> None:
        """targets[k]: where round k puts what comes from rank r - k, k from 1 on."""
        for k in range(1, self.size):
            sent = part(buffer, self.rank + k, self.size)
            reader, source = (self.rank + k) % self.size, (self.rank - k) % self.size
            self._nccl.groupStart()
            self.communicator.send(sent.ptr, sent.nbytes, BYTES, reader, self.dev.stream)
            self.communicator.recv(targets[k].ptr, sent.nbytes, BYTES, source, self.dev.stream)
            self._nccl.groupEnd()
