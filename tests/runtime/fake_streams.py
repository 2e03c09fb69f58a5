"""A device whose streams are threads: work is done late, in the order of each stream only.

Everything enqueued runs on the CPU with random pauses, so that order which only the program's flags
and events can give is missing as soon as they are. `Races` finds missing order even where the
pauses do not show it.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from llmq.base.dtypes import DType
from llmq.base.tensor import Tensor
from llmq.comm.collectives import storages
from llmq.runtime.device import Event, MemorySizes
from llmq.runtime.host_device import HostDevice
from llmq.runtime.kernel import Kernel
from llmq.runtime.mesh import Mesh
from tests.runtime.races import Races, Span

PATIENCE = 20.0  # seconds of waiting after which a test has hung


def poison(tensor: Tensor) -> None:
    """Make it NaN."""
    tensor.storage.bytes[tensor.offset : tensor.offset + tensor.nbytes].fill(0xFF)


class Mark:
    """One record of an event: when it is reached, and what its queue knew there."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.told: np.ndarray | None = None

    def reach(self, told: np.ndarray) -> None:
        self.told = told
        self.reached.set()


class StreamEvent(Event):
    """mark: of the last record; None before the first, when there is nothing to wait for."""

    def __init__(self) -> None:
        self.mark: Mark | None = None

    def synchronize(self) -> None:
        assert self.mark is None or self.mark.reached.wait(PATIENCE), "event: never reached"


class Work(NamedTuple):
    """prepare() runs when the work is enqueued; what it returns, when the stream gets there."""

    stream: str
    prepare: Callable[[], Callable[[], None]]
    name: str
    reads: Sequence[Span]
    writes: Sequence[Span]


class Capture:
    """The content of a graph that is replayed. streams: side streams it uses. events: those it
    records."""

    def __init__(self) -> None:
        self.work: list[Work] = []
        self.streams: dict[str, None] = {}
        self.events: dict[StreamEvent, None] = {}


class StreamDevice(HostDevice):
    """A HostDevice with asynchronous streams. Close it, or its threads stay.

    pause: the longest pause before and within an operation, in seconds. races: shared by all ranks.
    graphs: graph() captures the second run of a function and replays it later, as a CudaDevice
    does: side streams wait for a graph and are waited for as a whole.
    """

    def __init__(
        self,
        sizes: MemorySizes,
        *,
        mesh: Mesh | None = None,
        poison: bool = True,
        pause: float = 0.0,
        seed: int = 0,
        races: Races | None = None,
        graphs: bool = True,
    ):
        super().__init__(sizes, mesh=mesh, poison=poison)
        self._pause = pause
        self._random = random.Random(seed * 100 + self.mesh.rank)
        self._queues: dict[str, queue.SimpleQueue] = {}
        self._ids: dict[str, int] = {}
        self.races = races or Races()
        for storage in storages(self).values():
            self.races.watch(storage)
        self._use_graphs = graphs
        self.graphs: dict[tuple, Capture | None] = {}
        self._capture: Capture | None = None
        self._closed = threading.Event()
        self.failure: BaseException | None = None

    # -- enqueueing --

    def enqueue(
        self,
        prepare: Callable[[], Callable[[], None]],
        name: str = "",
        reads: Sequence[Span] = (),
        writes: Sequence[Span] = (),
    ) -> None:
        """prepare() runs now, and at every replay; what it returns, when the stream gets there."""
        work = Work(self.stream_name, prepare, name, reads, writes)
        if self._capture is not None:
            self._capture.work.append(work)
        else:
            self._put(work)

    def call(
        self,
        work: Callable[[], None],
        name: str = "",
        reads: Sequence[Span] = (),
        writes: Sequence[Span] = (),
    ) -> None:
        """Enqueue a function."""
        self.enqueue(lambda: work, name, reads, writes)

    def queue_id(self, stream: str) -> int:
        """A stream among the queues of the races."""
        if stream not in self._queues:
            self._ids[stream] = self.races.queue(f"rank {self.mesh.rank} {stream}")
            self._queues[stream] = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self._queues[stream],), daemon=True).start()
        return self._ids[stream]

    def _put(self, work: Work) -> None:
        index, action = self.queue_id(work.stream), work.prepare()

        def run() -> None:
            if work.reads or work.writes:
                self.races.access(index, work.name, work.reads, work.writes)
            action()

        self._queues[work.stream].put(run)

    def _run(self, work: queue.SimpleQueue) -> None:
        while not self._closed.is_set():
            action = work.get()
            try:
                self.sleep()
                action()
            except BaseException as error:
                self.failure = self.failure or error
                return

    def sleep(self) -> None:
        """A random pause, or none."""
        if self._pause and self._random.random() < 0.15:
            time.sleep(self._random.random() * self._pause)

    def _poll(self, ready: Callable[[], Any], what: str) -> None:
        """ready() is asked again and again; it is what takes time in between."""
        deadline = time.monotonic() + PATIENCE
        while not ready():
            if self._closed.is_set() or time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.mesh.rank}: {what}")

    # -- Queue of llmq.comm.staged --

    def copy_bytes(self, dst: int, src: int, nbytes: int) -> None:
        def work() -> None:
            half = nbytes // 2
            ctypes.memmove(dst, src, half)
            self.sleep()
            ctypes.memmove(dst + half, src + half, nbytes - half)

        self.call(work, "copy", [Span(src, src + nbytes)], [Span(dst, dst + nbytes)])

    def wait_word(self, address: int, value: int) -> None:
        word, index = ctypes.c_uint32.from_address(address), self.queue_id(self.stream_name)

        def work() -> None:
            pauses = itertools.chain([1e-5] * 4, itertools.repeat(2e-4))  # others want the core
            self._poll(
                lambda: word.value & value or time.sleep(next(pauses)),
                f"flag {address:#x} & {value}",
            )
            self.races.acquire(index, address)

        self.call(work)

    def write_word(self, address: int, value: int, *, flips: bool = True) -> None:
        """flips: the word has another value so far. One writer waits for the other's."""
        word, index = ctypes.c_uint32.from_address(address), self.queue_id(self.stream_name)

        def work() -> None:
            assert not flips or word.value != value, f"flag {address:#x} is {value} already"
            self.races.release(index, address)
            word.value = value

        self.call(work)

    # -- Device --

    def launch(self, kernel: Kernel, grid, block, args: tuple, **options) -> None:
        pairs = zip(kernel.declared, args, strict=True)
        tensors = [(a, t) for a, t in pairs if isinstance(t, Tensor)]
        self.call(
            lambda: super(StreamDevice, self).launch(kernel, grid, block, args, **options),
            kernel.entry,
            [Span.of(t) for a, t in tensors if a.reads],
            [Span.of(t) for a, t in tensors if a.writes],
        )

    @contextmanager
    def scratch(self, name: str, shape: tuple[int, ...], dtype: DType) -> Iterator[Tensor]:
        with self.stack.scratch(name, shape, dtype) as tensor:
            self.call(lambda: poison(tensor), f"scratch {name}", writes=[Span.of(tensor)])
            yield tensor

    def copy(self, dst: Tensor, src: Tensor) -> None:
        assert dst.nbytes == src.nbytes
        self.copy_bytes(dst.ptr, src.ptr, dst.nbytes)

    def zero(self, tensor: Tensor) -> None:
        zero = super().zero
        self.call(lambda: zero(tensor), f"zero {tensor.name}", writes=[Span.of(tensor)])

    def upload(self, dst: Tensor, array: np.ndarray) -> None:
        self.synchronize()
        super().upload(dst, array)

    def download(self, src: Tensor) -> np.ndarray:
        self.synchronize()
        return super().download(src)

    # -- order --

    def _switch(self, stream: str) -> None:
        self.stream_name = stream
        if self._capture is not None and stream != "main":
            self._capture.streams[stream] = None

    def event(self) -> StreamEvent:
        return StreamEvent()

    def _record(self, event: StreamEvent) -> None:
        index = self.queue_id(self.stream_name)

        def prepare() -> Callable[[], None]:
            mark = event.mark = Mark()
            return lambda: mark.reach(self.races.told(index))

        if self._capture is not None:
            self._capture.events[event] = None
        self.enqueue(prepare)

    def _wait(self, event: StreamEvent) -> None:
        index = self.queue_id(self.stream_name)

        def prepare() -> Callable[[], None]:
            mark = event.mark

            def work() -> None:
                if mark is not None:
                    self._poll(lambda: mark.reached.wait(0.02), "an event was never reached")
                    self.races.learn(index, mark.told)

            return work

        self.enqueue(prepare)

    def graph(self, key: tuple, fn: Callable[[], Any]) -> None:
        assert self.stream_name == "main", f"graph {key}: graphs run on the main stream only"
        if not self._use_graphs or key not in self.graphs:
            self.graphs[key] = None
            fn()
            return
        if self.graphs[key] is None:
            self._capture = self.graphs[key] = Capture()
            try:
                fn()
            finally:
                self._capture = None
        self._replay(self.graphs[key])

    def _replay(self, capture: Capture) -> None:
        for stream in capture.streams:  # the graph waits for them, and begins with waiting for it
            self._order(stream, "main")
        for stream in capture.streams:
            self._order("main", stream)
        for work in capture.work:
            self._put(work)
        for stream in capture.streams:
            self._order(stream, "main")
        for stream in capture.streams:
            self._order("main", stream)
        for event in capture.events:
            self.record(event)

    def _order(self, first: str, then: str) -> None:
        """Make the stream `then` wait for all that is in `first`."""
        event = StreamEvent()
        with self.on(first):
            self.record(event)
        with self.on(then):
            self.wait(event)

    def synchronize(self) -> None:
        """Wait until every stream is empty; raises what went wrong in one."""
        for stream in list(self._queues):
            self._drain(stream)

    def synchronize_stream(self) -> None:
        """Wait until the current stream is empty; raises what went wrong in one."""
        self.queue_id(self.stream_name)
        self._drain(self.stream_name)

    def _drain(self, stream: str) -> None:
        assert self._capture is None, "the host may not wait while a graph is captured"
        done = threading.Event()
        self._queues[stream].put(done.set)
        deadline = time.monotonic() + PATIENCE
        while not done.wait(0.01) and self.failure is None and time.monotonic() < deadline:
            pass
        if self.failure is not None:
            raise self.failure
        if not done.is_set():
            raise TimeoutError(f"rank {self.mesh.rank}: stream {stream} hangs")

    def close(self) -> None:
        self._closed.set()
        for work in self._queues.values():
            work.put(lambda: None)
        self.mesh.close()
