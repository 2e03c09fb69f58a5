"""Collectives of a plan: nothing moves, and what would is counted."""

from __future__ import annotations

from llmq.base.tensor import Tensor
from llmq.comm.collectives import Comm, part, same_memory
from llmq.comm.options import CommOptions, allocate
from llmq.runtime.device import HOST_SPEC, Event
from llmq.runtime.plan_device import PlanDevice


class PlanComm(Comm):
    """Counts. As memory traffic: what is received is written, as much is read."""

    _dev: PlanDevice

    def __init__(self, dev: PlanDevice, options: CommOptions):
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
        copies = self._options.memcpy_all_gather
        from_host = copies and (src.on_host or mirror is not None)
        self._dev.collective(
            "all_gather",
            device_bytes,
            loaded=loaded,
            received=0 if from_host else received,
            shared=received if from_host else 0,
            # A copy in host memory serves all others; NCCL sends from one to the next.
            sent=0 if from_host else src.nbytes if copies else received,
        )

    def _reduce_scatter(self, buffer: Tensor) -> None:
        self._exchange("reduce_scatter", self._others(buffer))

    def _all_to_all(self, buffer: Tensor, targets: list[Tensor], written: Event | None) -> None:
        self._exchange("all_to_all", self._others(buffer))

    def _exchange(self, kind: str, received: int) -> None:
        """Every rank sends as much as it receives."""
        self._dev.collective(
            kind, 2 * received, loaded=0, received=received, shared=0, sent=received
        )
