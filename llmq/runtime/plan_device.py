"""The device that runs nothing: it checks arguments, hands out offsets and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from llmq.runtime.device import Device, DeviceSpec, Event, MemorySizes
from llmq.runtime.host_device import HostEvent
from llmq.runtime.kernel import Kernel
from llmq.runtime.tensor import Storage, Tensor


class PlanDevice(Device):
    """Unlimited memory that does not exist.

    After a run: `sizes()`, the arenas' categories, the stack's high-water mark, and per entry
    point `launches`, `bytes` (memory traffic) and `flops`.
    """

    kind = "plan"

    def __init__(self, spec: DeviceSpec, *, rank: int = 0, world_size: int = 1):
        storages = {place: Storage(place) for place in ("device", "stack", "pinned")}
        super().__init__(spec, storages, None, rank=rank, world_size=world_size)
        self.launches: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()

    def sizes(self) -> MemorySizes:
        """What a real device needs to repeat this run."""
        return MemorySizes(
            device=self.arenas["device"].used,
            stack=self.stack.high_water_mark,
            pinned=self.arenas["pinned"].used,
        )

    def launch(
        self,
        kernel: Kernel,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: tuple,
        *,
        consts: dict[str, int] | None = None,
        smem: int = 0,
        flops: int = 0,
    ) -> None:
        kernel.bind(args)
        self.launches[kernel.entry] += 1
        self.bytes[kernel.entry] += kernel.traffic(args)
        self.flops[kernel.entry] += flops

    def copy(self, dst: Tensor, src: Tensor) -> None:
        if dst.nbytes != src.nbytes:
            raise ValueError(f"copy: {dst!r} and {src!r} differ in size")
        self.launches["copy"] += 1
        self.bytes["copy"] += dst.nbytes + src.nbytes

    def zero(self, tensor: Tensor) -> None:
        self.launches["zero"] += 1
        self.bytes["zero"] += tensor.nbytes

    def upload(self, dst: Tensor, array: np.ndarray) -> None:
        if array.shape != dst.shape or array.dtype != dst.dtype.numpy:
            raise ValueError(f"upload: {dst!r} given {array.dtype} {list(array.shape)}")

    def download(self, src: Tensor) -> np.ndarray:
        raise RuntimeError(f"download: {src!r} has no content on the plan device")

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        yield

    def event(self, name: str) -> Event:
        return HostEvent()

    def record(self, event: Event) -> None:
        pass

    def wait(self, event: Event) -> None:
        pass

    def graph(self, key: tuple, fn: Callable[[], Any]) -> None:
        fn()

    def synchronize(self) -> None:
        pass
