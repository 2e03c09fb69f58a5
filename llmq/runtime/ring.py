"""Pinned buffers on their way to the device, or back."""

from __future__ import annotations

from llmq.base.dtypes import DType
from llmq.runtime.device import Device, Event


class Ring:
    """Pinned buffers that are used in turn, each with the event of its last use."""

    def __init__(self, dev: Device, name: str, slots: int, words: int, dtype: DType):
        self.slots = [
            dev.alloc(f"{name}.{i}", (words,), dtype, "Activations", "pinned") for i in range(slots)
        ]
        self.events: list[Event] = [dev.event() for _ in range(slots)]
        self.used = 0

    def advance(self) -> int:
        """Index of the next slot; recording its event is the caller's part."""
        index = self.used % len(self.slots)
        self.used += 1
        return index
