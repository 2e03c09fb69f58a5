"""NCCL: one communicator per rank, all of a process made by one thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from llmq.base.dtypes import BF16, F32
from llmq.base.errors import LlmqError
from llmq.base.tensor import Tensor
from llmq.comm.collectives import part
from llmq.runtime.cuda_device import CudaDevice
from llmq.runtime.processes import processes
from llmq.runtime.world import World

BYTES = 0  # ncclInt8
TYPES = {F32: 7, BF16: 9}  # ncclFloat32, ncclBfloat16
SUM = 0  # ncclSum
WARM_UP_BYTES = 4096
# Thread blocks of a call, each on a multiprocessor that spins while it waits. Measured: see
# docs/decisions.md, "four H200".
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


def open_communicators(
    nccl: Any, api: Any, indices: Sequence[int], peer_access: bool, world: World | None = None
) -> list[Any]:
    """Communicators of these GPUs, by rank.

    api: CuPy's CUDA runtime module. peer_access False: through host memory only. NCCL reads this
    and the number of channels from the environment, once in the life of a process. world: where the
    ranks are, if they are of several processes, which all call this.
    """
    if not peer_access:
        os.environ["NCCL_P2P_DISABLE"] = "1"
        os.environ["NCCL_NVLS_ENABLE"] = "0"
    else:
        os.environ.setdefault("NCCL_MAX_CTAS", str(CHANNELS))
    # From one thread: a rank that made its own would hold the interpreter lock, waiting for all.
    if world is None or len(world.counts) == 1:
        return nccl.NcclCommunicator.initAll(list(indices))
    them = processes()
    unique = them.share(nccl.get_unique_id() if them.first else None)
    made = []
    nccl.groupStart()  # so that none of the calls waits for the others
    for rank, index in zip(world.local, indices, strict=True):
        api.setDevice(index)
        made.append(nccl.NcclCommunicator(world.size, unique, rank))
    nccl.groupEnd()
    return made


def establish(
    nccl: Any, communicators: Sequence[Any], devices: Sequence[CudaDevice], *, pairs: bool = True
) -> None:
    """Make all connections between the ranks, by one call of each kind, from one thread.

    pairs: also those of each rank to each other one, which all_to_all needs.
    NCCL would make them within the first calls: in the ranks' threads, waiting on the host for the
    other ranks, whose streams may be waiting for a flag that this rank has yet to write.
    """
    api, count = devices[0].api, devices[0].world_size
    buffers: list[int] = []

    def together(call: Callable[[int, Any, int], None]) -> None:
        nccl.groupStart()
        for dev, communicator in zip(devices, communicators, strict=True):
            api.setDevice(dev.index)
            call(dev.rank, communicator, dev.stream)
        nccl.groupEnd()

    def exchange(rank: int, communicator: Any, stream: int) -> None:
        buffer = buffers[rank - devices[0].rank]
        for peer in range(count):
            if peer != rank:
                at = buffer + peer * WARM_UP_BYTES
                communicator.send(buffer, WARM_UP_BYTES, BYTES, peer, stream)
                communicator.recv(at, WARM_UP_BYTES, BYTES, peer, stream)

    def gather(rank: int, communicator: Any, stream: int) -> None:
        buffer = buffers[rank - devices[0].rank]
        at = buffer + rank * WARM_UP_BYTES
        communicator.allGather(at, buffer, WARM_UP_BYTES, BYTES, stream)

    def reduce(rank: int, communicator: Any, stream: int) -> None:
        buffer, words = buffers[rank - devices[0].rank], WARM_UP_BYTES // F32.itemsize
        at = buffer + rank * WARM_UP_BYTES
        communicator.reduceScatter(buffer, at, words, TYPES[F32], SUM, stream)

    try:
        for dev in devices:
            api.setDevice(dev.index)
            buffers.append(api.malloc(count * WARM_UP_BYTES))
        for call in (gather, reduce, exchange) if pairs else (gather, reduce):
            together(call)
        for dev in devices:
            api.setDevice(dev.index)
            api.deviceSynchronize()
    finally:
        for dev, buffer in zip(devices, buffers, strict=False):  # perhaps not all were allocated
            api.setDevice(dev.index)
            api.free(buffer)


class Nccl:
    """One rank's end; the calls mean what they mean in Comm."""

    def __init__(self, dev: CudaDevice, nccl: Any, communicator: Any):
        self._dev = dev
        self._nccl = nccl
        self._communicator = communicator

    def all_gather(self, dst: Tensor, src: Tensor) -> None:
        """Pinned sources go to their place in dst first: peers may read sources directly."""
        if src.on_host:
            own = part(dst, self._dev.rank, self._dev.world_size)
            self._dev.copy(own, src)
            src = own
        self._communicator.allGather(src.ptr, dst.ptr, src.nbytes, BYTES, self._dev.stream)

    def reduce_scatter(self, buffer: Tensor) -> None:
        """The order of the sum is NCCL's; BF16 is rounded after each addition."""
        own = part(buffer, self._dev.rank, self._dev.world_size)
        self._communicator.reduceScatter(
            buffer.ptr, own.ptr, own.size, TYPES[buffer.dtype], SUM, self._dev.stream
        )

    def all_to_all(self, buffer: Tensor, targets: Sequence[Tensor]) -> None:
        """targets[k]: where round k puts what comes from rank r - k, k from 1 on."""
        rank, world_size = self._dev.rank, self._dev.world_size
        for k in range(1, world_size):
            sent = part(buffer, rank + k, world_size)
            reader, source = (rank + k) % world_size, (rank - k) % world_size
            self._nccl.groupStart()
            self._communicator.send(sent.ptr, sent.nbytes, BYTES, reader, self._dev.stream)
            self._communicator.recv(targets[k].ptr, sent.nbytes, BYTES, source, self._dev.stream)
            self._nccl.groupEnd()
