"""A device whose streams are threads: work is done late, in the order of each stream only.

What is enqueued runs on the CPU with random pauses, so that order which only the program's flags
and events can give is missing as soon as they are. `Races` finds missing order even where the
pauses do not show it.
"""

from __future__ import annotations

import ctypes
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from llmq.dtypes import DType
from llmq.runtime import comm
from llmq.runtime.comm import CommOptions, part, storages
from llmq.runtime.copies import Copies, Memories
from llmq.runtime.cuda_comm import CudaComm, Watch
from llmq.runtime.device import Event, MemorySizes
from llmq.runtime.flags import Flags
from llmq.runtime.host_device import HostDevice
from llmq.runtime.kernel import Kernel
from llmq.runtime.staged import Rings
from llmq.runtime.tensor import Storage, Tensor
from llmq.runtime.workers import Workers
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
    """What a graph replays. streams: side streams it uses. events: those it records."""

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
        rank: int = 0,
        world_size: int = 1,
        poison: bool = True,
        pause: float = 0.0,
        seed: int = 0,
        races: Races | None = None,
        graphs: bool = True,
    ):
        super().__init__(sizes, rank=rank, world_size=world_size, poison=poison)
        self._pause = pause
        self._random = random.Random(seed * 100 + rank)
        self._stream = "main"
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
        work = Work(self._stream, prepare, name, reads, writes)
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
            self._ids[stream] = self.races.queue(f"rank {self.rank} {stream}")
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
        if self._pause and self._random.random() < 0.3:
            time.sleep(self._random.random() * self._pause)

    def _wait(self, ready: Callable[[], Any], what: str) -> None:
        """ready() is asked again and again; it is what takes time in between."""
        deadline = time.monotonic() + PATIENCE
        while not ready():
            if self._closed.is_set() or time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank}: {what}")

    # -- Queue of llmq.runtime.staged --

    def copy_bytes(self, dst: int, src: int, nbytes: int) -> None:
        def work() -> None:
            half = nbytes // 2
            ctypes.memmove(dst, src, half)
            self.sleep()
            ctypes.memmove(dst + half, src + half, nbytes - half)

        self.call(work, "copy", [Span(src, src + nbytes)], [Span(dst, dst + nbytes)])

    def wait_word(self, address: int, value: int) -> None:
        word, index = ctypes.c_uint32.from_address(address), self.queue_id(self._stream)

        def work() -> None:
            self._wait(
                lambda: word.value & value or time.sleep(1e-5), f"flag {address:#x} & {value}"
            )
            self.races.acquire(index, address)

        self.call(work)

    def write_word(self, address: int, value: int) -> None:
        word, index = ctypes.c_uint32.from_address(address), self.queue_id(self._stream)

        def work() -> None:
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

    @contextmanager
    def on(self, stream: str):
        before, self._stream = self._stream, stream
        if self._capture is not None and stream != "main":
            self._capture.streams[stream] = None
        try:
            yield
        finally:
            self._stream = before

    def event(self, name: str) -> StreamEvent:
        return StreamEvent()

    def record(self, event: StreamEvent) -> None:
        index = self.queue_id(self._stream)

        def prepare() -> Callable[[], None]:
            mark = event.mark = Mark()
            return lambda: mark.reach(self.races.told(index))

        if self._capture is not None:
            self._capture.events[event] = None
        self.enqueue(prepare)

    def wait(self, event: StreamEvent) -> None:
        index = self.queue_id(self._stream)

        def prepare() -> Callable[[], None]:
            mark = event.mark

            def work() -> None:
                if mark is not None:
                    self._wait(lambda: mark.reached.wait(0.02), "an event was never reached")
                    self.races.learn(index, mark.told)

            return work

        self.enqueue(prepare)

    def graph(self, key: tuple, fn: Callable[[], Any]) -> None:
        assert self._stream == "main", f"graph {key}: graphs run on the main stream only"
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
        assert self._capture is None, "the host may not wait while a graph is captured"
        for stream in list(self._queues):
            done = threading.Event()
            self._queues[stream].put(done.set)
            deadline = time.monotonic() + PATIENCE
            while not done.wait(0.01) and self.failure is None and time.monotonic() < deadline:
                pass
            if self.failure is not None:
                raise self.failure
            if not done.is_set():
                raise TimeoutError(f"rank {self.rank}: stream {stream} hangs")

    def close(self) -> None:
        self._closed.set()
        for work in self._queues.values():
            work.put(lambda: None)
        self.comm.close()


# -- collectives ------------------------------------------------------------------------------------


class StreamQueue:
    """The copies and flags of a device's current stream. deaf: waits for no flag."""

    def __init__(self, dev: StreamDevice, deaf: bool = False):
        self.copy = dev.copy_bytes
        self.wait = (lambda address, value: None) if deaf else dev.wait_word
        self.write = dev.write_word


class StreamComm(CudaComm):
    """Finds calls of one rank that nothing orders, as if each wrote to the same place."""

    def __init__(self, dev: StreamDevice, *args: Any):
        super().__init__(dev, *args)
        self._dev = dev
        self._place = np.empty(16, np.uint8)
        dev.races.watch(Storage("comm", self._place.ctypes.data, self._place))

    def _begin(self, operation: str) -> None:
        super()._begin(operation)
        start = self._place.ctypes.data
        self._dev.call(lambda: None, operation, writes=[Span(start, start + 16)])


class StreamNccl:
    """Like llmq.runtime.nccl.Nccl: a call waits for the peers that it gets something from, and ends
    when its sources have been read."""

    def __init__(self, dev: StreamDevice, ranks: list[StreamNccl], barrier: threading.Barrier):
        """ranks: of all ranks, to which this one is added in the order of ranks."""
        self._dev, self._ranks, self._barrier = dev, ranks, barrier
        self._told: np.ndarray | None = None
        ranks.append(self)

    def _peer(self, index: int, tensor: Tensor) -> np.ndarray:
        """A peer's tensor: its bytes, in place."""
        place = storages(self._ranks[index % len(self._ranks)]._dev)[tensor.storage.place]
        return place.bytes[tensor.offset : tensor.offset + tensor.nbytes]

    def _part(self, buffer: Tensor, index: int) -> Tensor:
        return part(buffer, index, len(self._ranks))

    def _enqueue(
        self, name: str, src: list[Tensor], dst: list[Tensor], sources: list[int], work: Callable
    ) -> None:
        """work() between two meetings of all ranks; this one gets something from `sources`."""
        dev, index = self._dev, self._dev.queue_id(self._dev._stream)

        def run() -> None:
            self._told = dev.races.told(index)
            self._barrier.wait(PATIENCE)
            for source in sources:
                dev.races.learn(index, self._ranks[source % len(self._ranks)]._told)
            work()
            self._barrier.wait(PATIENCE)

        dev.call(run, f"NCCL {name}", [Span.of(t) for t in src], [Span.of(t) for t in dst])

    def all_gather(self, dst: Tensor, src: Tensor) -> None:
        def work() -> None:
            for rank in range(len(self._ranks)):
                target = self._part(dst, rank)
                source = self._part(dst, rank) if in_place else src
                self._peer(self._dev.rank, target)[:] = self._peer(rank, source)

        in_place = comm.same_memory(self._part(dst, self._dev.rank), src)
        self._enqueue(f"all_gather {dst.name}", [src], [dst], self._all, work)

    def reduce_scatter(self, buffer: Tensor) -> None:
        own, numpy = self._part(buffer, self._dev.rank), buffer.dtype.numpy

        def work() -> None:
            parts = [self._peer(r, own).view(numpy) for r in range(len(self._ranks))]
            total = sum(p.astype(np.float32) for p in parts)
            self._barrier.wait(PATIENCE)
            self._peer(self._dev.rank, buffer).fill(0xFF)  # undefined: NaN
            own.numpy()[:] = total.astype(numpy)

        self._enqueue(f"reduce_scatter {buffer.name}", [buffer], [buffer], self._all, work)

    @property
    def _all(self) -> list[int]:
        return list(range(len(self._ranks)))

    def all_to_all(self, buffer: Tensor, targets: Sequence[Tensor]) -> None:
        rank = self._dev.rank
        for k in range(1, len(self._ranks)):

            def work(k: int = k) -> None:
                self._peer(rank, targets[k])[:] = self._peer(rank - k, targets[0])

            args = ([self._part(buffer, rank + k)], [targets[k]], [rank - k])
            self._enqueue(f"all_to_all {buffer.name} {k}", *args, work)


def direct_links(world: int, kind: str) -> list[list[bool]]:
    """direct[reader][source] of "peer": all pairs, "staged": none, or "mixed": half of them."""
    half = np.random.default_rng(world).random((world, world)) < 0.5
    return {"peer": half | True, "staged": half & False, "mixed": half}[kind].tolist()


def connect_streams(
    devices: Sequence[StreamDevice],
    options: CommOptions,
    workers: Workers,
    *,
    direct: list[list[bool]],
    deaf: bool = False,
) -> Flags | None:
    """As connect_cuda does it; returns the flags of copies."""
    if len(devices) == 1:
        return None
    memory = [comm.allocate(dev, options) for dev in devices]
    memories = flags = None
    if options.copies:
        chunk = memory[0].staging.nbytes // comm.STAGING_CHUNKS
        rings = Rings([m.staging.ptr for m in memory], chunk, comm.STAGING_CHUNKS)
        flags = Flags([m.flags for m in memory])
        memories = Memories([storages(dev) for dev in devices], flags, direct, rings)
    watch = Watch(workers, len(devices), flags, [])
    ranks, barrier = [], threading.Barrier(len(devices))
    for dev in devices:
        copies = Copies(dev, StreamQueue(dev, deaf), memories) if options.copies else None
        nccl = StreamNccl(dev, ranks, barrier) if options.nccl else None
        dev.comm = StreamComm(dev, options, copies, nccl, watch)
    return flags
