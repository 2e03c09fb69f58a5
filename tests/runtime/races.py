"""Finds accesses to the same memory that nothing orders, even where they happened in good order.

A queue is what does its work in order: a stream of a rank. A queue knows of all queues a vector of
counts: so much of their work is done before its own next. It learns from what it waits for, and
only from that.
"""

from __future__ import annotations

import bisect
import threading
from typing import NamedTuple

import numpy as np

from llmq.base.tensor import Storage, Tensor

GRANULE = 8  # bytes that count as one place
MAX_QUEUES = 24  # six streams of four ranks


class Span(NamedTuple):
    """Bytes [start, stop) of memory, by address."""

    start: int
    stop: int

    @classmethod
    def of(cls, tensor: Tensor) -> Span:
        return cls(tensor.ptr, tensor.ptr + tensor.nbytes)


class _Shadow:
    """When each granule of a storage was written last, by which queue, and when read by each."""

    def __init__(self, base: int, size: int):
        n = -(-size // GRANULE)
        self.base, self.stop = base, base + size
        self.writer = np.zeros(n, np.int8)
        self.written = np.zeros(n, np.int32)
        self.read = np.zeros((MAX_QUEUES, n), np.int32)

    def slice(self, span: Span) -> slice:
        first, last = span.start - self.base, span.stop - self.base
        return slice(first // GRANULE, -(-last // GRANULE))


class Races:
    """The clocks of all queues of all ranks of a run. found: one line for each race."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._knows = np.zeros((MAX_QUEUES, MAX_QUEUES), np.int32)
        self._log: list[list[str]] = []
        self._shadows: list[_Shadow] = []
        self._flags: dict[int, np.ndarray] = {}

    def queue(self, name: str) -> int:
        """A new queue."""
        with self._lock:
            self._names.append(name)
            self._log.append(["start"])
            return len(self._names) - 1

    def watch(self, storage: Storage) -> None:
        """Look at accesses to this memory; others do not count."""
        with self._lock:
            self._shadows.append(_Shadow(storage.base, storage.bytes.size))
            self._shadows.sort(key=lambda shadow: shadow.base)

    def told(self, queue: int) -> np.ndarray:
        """The counts that somebody knows who waits for the work that the queue has done."""
        with self._lock:
            return self._knows[queue].copy()

    def news(self, queue: int, told: np.ndarray) -> bool:
        """Whether the queue would learn of work of another rank."""
        rank = self._names[queue].rpartition(" ")[0]
        with self._lock:
            new = told > self._knows[queue]
            names = enumerate(self._names)
            return any(new[i] and name.rpartition(" ")[0] != rank for i, name in names)

    def learn(self, queue: int, told: np.ndarray) -> None:
        """The queue has waited for somebody."""
        with self._lock:
            np.maximum(self._knows[queue], told, out=self._knows[queue])

    def release(self, queue: int, address: int) -> None:
        """The queue is about to write a flag."""
        with self._lock:
            self._flags[address] = self._knows[queue].copy()

    def acquire(self, queue: int, address: int) -> None:
        """The queue has seen what somebody has written to a flag; nobody has at the start."""
        told = self._flags.get(address)
        if told is not None:
            self.learn(queue, told)

    def access(self, queue: int, name: str, reads: list[Span], writes: list[Span]) -> None:
        """The queue's next piece of work."""
        with self._lock:
            self._log[queue].append(name)
            now = self._knows[queue, queue] = len(self._log[queue]) - 1
            for spans, is_write in ((reads, False), (writes, True)):
                for span in spans:
                    shadow = self._shadow(span)
                    if shadow is not None:
                        self._check(queue, shadow, shadow.slice(span), is_write)
            for span in reads:
                if (shadow := self._shadow(span)) is not None:
                    shadow.read[queue, shadow.slice(span)] = now
            for span in writes:
                if (shadow := self._shadow(span)) is not None:
                    where = shadow.slice(span)
                    shadow.writer[where], shadow.written[where] = queue, now

    def _shadow(self, span: Span) -> _Shadow | None:
        index = bisect.bisect(self._shadows, span.start, key=lambda shadow: shadow.base) - 1
        found = index >= 0 and span.start < self._shadows[index].stop
        return self._shadows[index] if found else None

    def _check(self, queue: int, shadow: _Shadow, where: slice, is_write: bool) -> None:
        knows = self._knows[queue]
        writer = shadow.writer[where]
        unknown = shadow.written[where] > knows[writer]
        if unknown.any():
            i = int(unknown.argmax())
            self._report(queue, is_write, int(writer[i]), int(shadow.written[where][i]), True)
        if is_write:
            count = len(self._names)
            unknown = shadow.read[:count, where] > knows[:count, None]
            if unknown.any():
                reader, i = np.unravel_index(int(unknown.argmax()), unknown.shape)
                time = int(shadow.read[reader, where][i])
                self._report(queue, is_write, int(reader), time, False)

    def _report(self, queue: int, writes: bool, other: int, time: int, wrote: bool) -> None:
        self.found.append(
            f"{self._names[queue]}: {self._log[queue][-1]} {'writes' if writes else 'reads'} what "
            f"{self._names[other]}: {self._log[other][time]} {'writes' if wrote else 'reads'}"
        )
