"""Bump arenas and the named LIFO stack: every byte the trainer uses, counted by category."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

from llmq.dtypes import DType
from llmq.runtime.tensor import Storage, Tensor

ALIGN = 256  # bytes; cuBLASLt, cuDNN and 16-byte vector accesses are all satisfied


def align_up(n: int, multiple: int = ALIGN) -> int:
    """The smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


class Arena:
    """Allocates once, at start, never frees. capacity None (plan device): counts only."""

    def __init__(self, storage: Storage, capacity: int | None = None):
        self.storage = storage
        self.capacity = capacity
        self.used = 0
        self.categories: dict[str, int] = defaultdict(int)
        self.tensors: list[tuple[str, Tensor]] = []

    def take(self, name: str, shape: tuple[int, ...], dtype: DType, category: str) -> Tensor:
        """A new tensor of this shape, counted under the category."""
        tensor = Tensor(name, shape, dtype, self.storage, self.used)
        padded = align_up(tensor.nbytes)
        if self.capacity is not None and self.used + padded > self.capacity:
            raise MemoryError(
                f"arena: {tensor!r} needs {padded} bytes, {self.capacity - self.used} are left; "
                "the plan that sized this arena did not see this allocation"
            )
        self.used += padded
        self.categories[category] += padded
        self.tensors.append((category, tensor))
        return tensor


class Stack:
    """Step-local memory: named, last in first out, with a high-water mark and what made it."""

    def __init__(self, storage: Storage, capacity: int | None = None):
        self.storage = storage
        self.capacity = capacity
        self.live: list[Tensor] = []
        self.used = 0
        self.high_water_mark = 0
        self.high_water_tensors: list[tuple[str, int]] = []

    @contextmanager
    def scratch(self, name: str, shape: tuple[int, ...], dtype: DType) -> Iterator[Tensor]:
        """A tensor that lives until the end of the `with` block. Its content is undefined."""
        start = self.used
        end = start + align_up(prod(shape) * dtype.itemsize)
        if self.capacity is not None and end > self.capacity:
            raise MemoryError(
                f"stack: {name} {list(shape)} needs {end - start} bytes, "
                f"{self.capacity - start} are left; the plan did not see this allocation"
            )
        tensor = Tensor(name, shape, dtype, self.storage, start)
        self.live.append(tensor)
        self.used = end
        if end > self.high_water_mark:
            self.high_water_mark = end
            self.high_water_tensors = [(t.name, align_up(t.nbytes)) for t in self.live]
        try:
            yield tensor
        finally:
            if self.live.pop() is not tensor:
                raise AssertionError(f"stack: {name} was not the last tensor taken")
            self.used = start
