"""PlanDevice runs nothing: it checks arguments, assigns memory offsets, counts bytes and FLOPs, and
traces the work."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from llmq.base.tensor import SSD, TIERS, Storage, Tensor
from llmq.runtime.cost import MOVES, Cost, Kind
from llmq.runtime.device import Device, DeviceSpec, Event, Launch, T
from llmq.runtime.kernel import KernelSource
from llmq.runtime.mesh import Mesh


class Work(NamedTuple):
    """One launch, copy, fill or collective that a device would run.

    part: name of the outermost `range` around the work, or "". file, entry: file and entry point of
    the kernel; for work without a kernel, "" and the work's name. kind, cost: see runtime.cost. All
    other fields count bytes. device_bytes: bytes read and written in the GPU's own memory. loaded,
    stored: bytes that the GPU reads from and writes to host memory over its bus. received: bytes
    that arrive from other GPUs. shared: bytes of other ranks' host memory that this GPU reads over
    its bus, or receives over a link between GPUs. sent: bytes sent to other ranks; bytes for all
    ranks count once if they go through host memory. network: bytes that the GPU's machine receives
    from other machines during the work. read, written: bytes of scratch files, which also count as
    loaded or stored.
    """

    stream: str
    part: str
    file: str
    entry: str
    kind: Kind
    cost: Cost
    device_bytes: int
    loaded: int = 0
    stored: int = 0
    received: int = 0
    shared: int = 0
    sent: int = 0
    network: int = 0
    read: int = 0
    written: int = 0


class Mark(NamedTuple):
    """A record of an event on a stream; or, if `wait` is True, the stream's wait for the event's
    last record."""

    stream: str
    event: Event
    wait: bool


Trace = list[Work | Mark]


class PlanDevice(Device):
    """A device that only counts, and whose memory is unlimited. A run leaves these results:
    `sizes()`; the categories of the arenas; the stack's high-water mark; `launches`, `bytes`
    (memory traffic) and `flops` by entry point; `sources`, all kernels that the run would compile;
    `graphs`, key and trace of every graph in order."""

    kind = "plan"

    def __init__(self, spec: DeviceSpec, mesh: Mesh | None = None):
        """mesh: the rank's mesh, see Device."""
        storages = {place: Storage(place) for place in ("stack", *TIERS)}
        super().__init__(spec, storages, None, mesh=mesh)
        self.launches: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()
        self.sources: set[KernelSource] = set()
        self.graphs: list[tuple[tuple, Trace]] = []
        self._trace: Trace | None = None  # trace of the running graph
        self._part = ""
        self._counts = True  # False while memory counts but launches do not
        # pairs (work, used stack bytes) that `choose` has planned
        self._chosen: set[tuple[str, int]] = set()

    def choose(
        self, work: str, ways: dict[str, Callable[[], None]], kept: tuple[Tensor, ...] = ()
    ) -> None:
        """Plan memory and code of all ways, but count only the launches of the first way."""
        first, *others = ways.values()
        first()
        key = work, self.stack.used
        if key in self._chosen:  # memory and code are already planned
            return
        self._chosen.add(key)
        before, self._counts = self._counts, False
        for way in others:
            way()
        self._counts = before

    def alike(self, items: Sequence[T]) -> Iterator[T]:
        yield from items[:1]
        counters, trace = (self.launches, self.bytes, self.flops), self._trace or []
        before, start = [Counter(each) for each in counters], len(trace)
        yield from items[1:2]
        for each, earlier in zip(counters, before, strict=True):
            for entry, count in each.items():
                each[entry] += max(len(items) - 2, 0) * (count - earlier[entry])
        trace += trace[start:] * max(len(items) - 2, 0)

    def _launch(self, launch: Launch) -> None:
        kernel, args = launch.kernel, launch.args
        if kernel.file.endswith(".cu"):
            self.sources.add(KernelSource.of(kernel, launch.types, launch.consts))
        device, *host = kernel.traffic(args)
        kind = Kind.of(kernel, args, launch.cost, device)
        self._note(kernel.file, kernel.entry, kind, launch.cost, device, *host)

    def copy(self, dst: Tensor, src: Tensor) -> None:
        if dst.nbytes != src.nbytes:
            raise ValueError(f"copy: {dst!r} and {src!r} differ in size")
        loaded, stored = src.nbytes * src.on_host, dst.nbytes * dst.on_host
        files = (t.nbytes * (t.storage.tier is SSD) for t in (src, dst))
        self._move("copy", 2 * dst.nbytes - loaded - stored, loaded, stored, 0, 0, 0, 0, *files)

    def zero(self, tensor: Tensor) -> None:
        stored = tensor.nbytes * tensor.on_host
        self._move("zero", tensor.nbytes - stored, 0, stored)

    def compute(self, fn: Callable[..., None], *tensors: Tensor) -> None:
        """Count one read or one write of each tensor."""
        self._move("arrays", sum(tensor.nbytes for tensor in tensors), 0, 0)

    def collective(self, kind: str, device_bytes: int, **sizes: int) -> None:
        """Count a data exchange with other GPUs. kind: name of the exchange. sizes: bytes by name
        of `Work`'s field; missing fields are 0."""
        names = ("loaded", "stored", "received", "shared", "sent", "network")
        self._move(kind, device_bytes, *(sizes.get(name, 0) for name in names))

    def _move(self, name: str, *sizes: int) -> None:
        """Count work that runs no kernel. sizes: bytes as in `_note`."""
        self._note("", name, Kind.moving(name, sizes[0]), MOVES, *sizes)

    def _note(self, file: str, entry: str, kind: Kind, cost: Cost, *sizes: int) -> None:
        """Count one launch or other work. sizes: bytes in the order of `Work`'s fields from
        device_bytes on; missing fields are 0."""
        if not self._counts:
            return
        self.launches[entry] += 1
        self.bytes[entry] += sum(sizes[:3])  # bytes of device and host memory
        self.flops[entry] += cost.flops
        if self._trace is not None:
            stream, part = self.stream_name, self._part
            self._trace.append(Work(stream, part, file, entry, kind, cost, *sizes))

    def upload(self, dst: Tensor, array: np.ndarray) -> None:
        if array.shape != dst.shape or array.dtype != dst.dtype.numpy:
            raise ValueError(f"upload: {dst!r} given {array.dtype} {list(array.shape)}")

    def download(self, src: Tensor) -> np.ndarray:
        raise RuntimeError(f"download: {src!r} has no content on the plan device")

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        before = self._part
        self._part = before or name
        try:
            yield
        finally:
            self._part = before

    def _record(self, event: Event) -> None:
        self._mark(event, wait=False)

    def _wait(self, event: Event) -> None:
        self._mark(event, wait=True)

    def _mark(self, event: Event, *, wait: bool) -> None:
        if self._trace is not None:
            self._trace.append(Mark(self.stream_name, event, wait))

    def graph(self, key: tuple, fn: Callable[[], Any]) -> None:
        self._trace = []
        self.graphs.append((key, self._trace))
        try:
            fn()
        finally:
            self._trace = None
