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
