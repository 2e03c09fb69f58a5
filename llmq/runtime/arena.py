"""Bump arenas, and a stack of named tensors freed in reverse order; together they hold all memory
of the trainer and count its bytes by category."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llmq.base.dtypes import DType
from llmq.base.tensor import DEVICE, Storage, Tensor

ALIGN = DEVICE.align


def align_up(n: int, multiple: int = ALIGN) -> int:
    """Return the smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


class Arena:
    """An arena hands out consecutive tensors of one allocation. capacity: most bytes; None: the
    arena only counts, for a plan. used: bytes in use. high_water_mark: the most bytes that were
    ever in use."""

    def __init__(self, storage: Storage, capacity: int | None = None):
        self.storage = storage
        self.capacity = capacity
        self.used = self.high_water_mark = 0
        self.categories: dict[str, int] = defaultdict(int)
        self.tensors: list[tuple[str, Tensor]] = []

    def take(self, name: str, shape: tuple[int, ...], dtype: DType, category: str) -> Tensor:
        """Return a new tensor of this shape; its bytes count under the category."""
        tensor = Tensor(name, shape, dtype, self.storage, self.used)
        padded = self._padded(tensor)
        if self.capacity is not None and self.used + padded > self.capacity:
            raise MemoryError(
                f"arena: {tensor!r} needs {padded} bytes, {self.capacity - self.used} are left; "
                "the plan that sized this arena did not see this allocation"
            )
        self.used += padded
        self.high_water_mark = max(self.high_water_mark, self.used)
        self.categories[category] += padded
        self.tensors.append((category, tensor))
        return tensor

    def _padded(self, tensor: Tensor) -> int:
        return align_up(tensor.nbytes, self.storage.tier.align)

    @contextmanager
    def over(self, start: int) -> Iterator[None]:
        """Within the `with` block, take tensors from byte `start` on, although that memory is in
        use. After the block, old and new tensors share this memory and must be used by turns."""
        before, peak, capacity = self.used, self.high_water_mark, self.capacity
        tensors, categories = self.tensors, self.categories
        self.tensors, self.categories = [], defaultdict(int)
        self.used = start
        self.capacity = None if capacity is None else before
        try:
            yield
        finally:
            self.used, self.high_water_mark, self.capacity = before, peak, capacity
            self.tensors, self.categories = tensors, categories

    def free_from(self, used: int) -> None:
        """Free the tensors that were taken since `used` bytes were in use."""
        while self.tensors and self.tensors[-1][1].offset >= used:
            category, tensor = self.tensors.pop()
            self.categories[category] -= self._padded(tensor)
        self.used = used


class Stack:
    """A stack holds named tensors that live within a step and are freed in reverse order.
    high_water_tensors: (name, bytes) of each tensor that was live when the most bytes were in
    use."""

    def __init__(self, storage: Storage, capacity: int | None = None):
        self.storage = storage
        self.capacity = capacity
        self.live: list[Tensor] = []
        self.used = 0
        self.high_water_mark = 0
        self.high_water_tensors: list[tuple[str, int]] = []

    def scratch(self, name: str, shape: tuple[int, ...], dtype: DType) -> Scratch:
        """Return a tensor that lives as long as its `with` block. The tensor's content is
        undefined."""
        return Scratch(self, name, shape, dtype)

    def push(self, name: str, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Return a tensor that lives until `pop`."""
        start = self.used
        tensor = Tensor(name, shape, dtype, self.storage, start)
        end = start + align_up(tensor.nbytes)
        if self.capacity is not None and end > self.capacity:
            raise MemoryError(
                f"stack: {name} {list(shape)} needs {end - start} bytes, "
                f"{self.capacity - start} are left; the plan did not see this allocation"
            )
        self.live.append(tensor)
        self.used = end
        if end > self.high_water_mark:
            self.high_water_mark = end
            self.high_water_tensors = [(t.name, align_up(t.nbytes)) for t in self.live]
        return tensor

    def pop(self, tensor: Tensor) -> None:
        """Free the tensor that was pushed last."""
        if self.live.pop() is not tensor:
            raise AssertionError(f"stack: {tensor.name} was not the last tensor taken")
        self.used = tensor.offset


class Scratch:
    """A context manager of a tensor on a stack. The class replaces a generator, because plans enter
    hundreds of thousands of these blocks and generators are slower."""

    __slots__ = ("_args", "_stack", "_tensor")

    def __init__(self, stack: Stack, *args: Any):
        self._stack, self._args = stack, args

    def __enter__(self) -> Tensor:
        self._tensor = self._stack.push(*self._args)
        return self._tensor

    def __exit__(self, *exception: object) -> None:
        self._stack.pop(self._tensor)
