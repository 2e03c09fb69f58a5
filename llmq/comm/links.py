"""Links between GPUs: a probe of each pair decides whether copies are direct or go through host
memory.

The probe first checks that data arrive, then measures the speed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmq.base.errors import LlmqError
from llmq.runtime.cuda_device import NON_BLOCKING
from llmq.runtime.pinned import PinnedMemory

# Staging through host memory is chosen if direct copies reach less than this share of the measured
# speed of staging. In a run, staging is slower than measured, because its two copies wait for each
# other and share the host memory.
SLOWER = 0.8
# A direct copy that is this many times as fast as a copy to or from the host does not use the bus.
BESIDE_BUS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of one ordered pair of GPUs, in which source writes to reader. GB/s are 10^9
    bytes per second. access: True if the driver gives the source access to the reader's memory.
    correct: True if a copied pattern arrived unchanged; None if no pattern was copied. direct: GB/s
    of a direct copy. staged: GB/s from source to pinned memory, or from pinned memory to reader,
    whichever is slower."""

    access: bool
    correct: bool | None
    direct: float | None
    staged: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The connection of one pair. kind: "peer" (direct copies) or "staged". speed: GB/s. reason:
    the reason why kind is "staged"; None if kind is "peer". beside_bus: True if direct copies leave
    the GPUs' bus free for the host, as over NVLink."""

    kind: str
    speed: float
    reason: str | None
    beside_bus: bool = False


def choose(p2p: str, source: int, reader: int, measured: Measured) -> Link:
    """Return the link from GPU `source` to GPU `reader`. p2p: "auto", "on" or "off". Raises
    LlmqError if p2p is "on" and direct copies do not work."""
    reason = None
    if p2p == "off":
        reason = "off"
    elif not measured.access:
        reason = "no access"
    elif not measured.correct:
        reason = "damaged data"
    elif p2p == "auto" and measured.direct < SLOWER * measured.staged:
        reason = f"slow ({measured.direct:.1f} GB/s)"
    if p2p == "on" and reason == "no access":
        raise LlmqError(
            f"--p2p=on: GPU {source} has no access to the memory of GPU {reader}; use --p2p=auto, "
            "which copies through host memory where it must"
        )
    if p2p == "on" and reason is not None:
        raise LlmqError(
            f"--p2p=on: copies from GPU {source} to GPU {reader} arrive damaged, as an IOMMU can "
            "cause; switch it off in the firmware, or use --p2p=auto"
        )
    if reason is None:
        beside_bus = measured.direct > BESIDE_BUS * measured.staged
        return Link(kind="peer", speed=measured.direct, reason=None, beside_bus=beside_bus)
    return Link(kind="staged", speed=measured.staged, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTable:
    """The links of all pairs of ranks. gpus: for each rank, the index of its GPU.
    links[reader][source]: the link between two ranks; None on the diagonal."""

    gpus: list[int]
    links: list[list[Link | None]]

    @property
    def direct(self) -> list[list[bool]]:
        """A table whose entry [reader][source] is True if source writes to reader's memory."""
        return [[link is not None and link.kind == "peer" for link in row] for row in self.links]

    @property
    def has_staged(self) -> bool:
        """Is True if any pair's copies go through host memory."""
        return any(link is not None and link.kind == "staged" for row in self.links for link in row)

    @property
    def beside_bus(self) -> list[list[bool]]:
        """A table whose entry [reader][source] is True if direct copies from source to reader leave
        the host's bus free."""
        return [[link is not None and link.beside_bus for link in row] for row in self.links]

    @property
    def damaged(self) -> bool:
        """Is True if a pair's direct copies arrive damaged; NCCL must not use direct copies on such
        a machine either."""
        return any(link and link.reason == "damaged data" for row in self.links for link in row)

    def lines(self) -> list[str]:
        """Return the table for the console, which has speeds in GB/s, and then staged pairs with
        the reasons."""
        head = "[Links] GB/s to (down) from (across), * through host memory"
        lines = [head, "  GPU" + "".join(f"{gpu:>9}" for gpu in self.gpus)]
        reasons: dict[str, list[str]] = {}
        for reader, row in zip(self.gpus, self.links, strict=True):
            cells = []
            for source, link in zip(self.gpus, row, strict=True):
                mark = " "
                if link is not None and link.kind == "staged":
                    mark = "*"
                    reasons.setdefault(link.reason, []).append(f"{source}->{reader}")
                cells.append(f"{'-' if link is None else f'{link.speed:.1f}':>8}{mark}")
            lines.append(f"{reader:>5}{''.join(cells)}".rstrip())
        lines += [f"  * {reason}: {' '.join(pairs)}" for reason, pairs in reasons.items()]
        return lines

    def records(self) -> list[dict[str, Any]]:
        """Return one record per pair, for the log."""
        return [
            {
                "source": source,
                "reader": reader,
                "kind": link.kind,
                "gb_per_s": round(link.speed, 2),
                "reason": link.reason,
                "beside_bus": link.beside_bus,
            }
            for reader, row in zip(self.gpus, self.links, strict=True)
            for source, link in zip(self.gpus, row, strict=True)
            if link is not None
        ]


SIZE = 16 << 20  # bytes of a timed copy
PATTERN = 1 << 20  # bytes that are copied and compared
COPIES = 2  # number of copies that are timed together
ALREADY_ENABLED = 704  # cudaErrorPeerAccessAlreadyEnabled: NCCL, or an earlier run of this process


@dataclass(frozen=True, slots=True)
class _End:
    """A GPU's buffers (addresses) and stream for the measurement."""

    gpu: int
    source: int
    target: int
    stream: int


def probe(api: Any, gpus: Sequence[int], p2p: str) -> LinkTable:
    """Probe every ordered pair of GPUs in turn. The call changes the thread's current GPU. api:
    CuPy's CUDA runtime module. p2p: "off" gives no GPU access to another GPU. Raises LlmqError if
    p2p is "on" and direct copies of a pair do not work."""
    pinned = PinnedMemory(api, SIZE)
    ends = [_open(api, gpu) for gpu in gpus]
    try:
        out = [_speed(api, e, pinned.storage.base, e.source) for e in ends]
        into = [_speed(api, e, e.target, pinned.storage.base) for e in ends]
        links = []
        for r, reader in enumerate(ends):
            row = []
            for s, source in enumerate(ends):
                if r == s:
                    row.append(None)
                    continue
                measured = _measure(api, source, reader, p2p, min(out[s], into[r]))
                row.append(choose(p2p, source.gpu, reader.gpu, measured))
            links.append(row)
    finally:
        for end in ends:
            api.setDevice(end.gpu)
            api.streamDestroy(end.stream)
            api.free(end.source)
            api.free(end.target)
        pinned.free()
    return LinkTable(gpus=list(gpus), links=links)


def _open(api: Any, gpu: int) -> _End:
    api.setDevice(gpu)
    stream = api.streamCreateWithFlags(NON_BLOCKING)
    return _End(gpu, api.malloc(SIZE), api.malloc(SIZE), stream)


def _measure(api: Any, source: _End, reader: _End, p2p: str, staged: float) -> Measured:
    access = p2p != "off" and _enable(api, source.gpu, reader.gpu)
    if not access:
        return Measured(access=False, correct=None, direct=None, staged=staged)
    correct = _arrives(api, source, reader)
    direct = _speed(api, source, reader.target, source.source)
    return Measured(access=True, correct=correct, direct=direct, staged=staged)


def _enable(api: Any, source: int, reader: int) -> bool:
    """Give the source access to the reader's memory; return False if the driver refuses."""
    if not api.deviceCanAccessPeer(source, reader):
        return False
    api.setDevice(source)
    try:
        api.deviceEnablePeerAccess(reader)
    except api.CUDARuntimeError as error:
        return error.status == ALREADY_ENABLED
    return True


def _arrives(api: Any, source: _End, reader: _End) -> bool:
    """Return True if a pattern unique to this pair is unchanged after a copy."""
    pattern = np.random.default_rng([source.gpu, reader.gpu]).bytes(PATTERN)
    pattern = np.frombuffer(pattern, np.uint8)
    api.setDevice(source.gpu)
    _copy(api, source.stream, source.source, pattern.ctypes.data, PATTERN)
    api.setDevice(reader.gpu)
    arrived = np.zeros(PATTERN, np.uint8)
    _copy(
        api, reader.stream, reader.target, arrived.ctypes.data, PATTERN
    )  # the zeros erase an older pattern
    api.setDevice(source.gpu)
    _copy(api, source.stream, reader.target, source.source, PATTERN)
    api.setDevice(reader.gpu)
    _copy(api, reader.stream, arrived.ctypes.data, reader.target, PATTERN)
    return bool(np.array_equal(arrived, pattern))


def _copy(api: Any, stream: int, dst: int, src: int, nbytes: int) -> None:
    api.memcpyAsync(dst, src, nbytes, api.memcpyDefault, stream)
    api.streamSynchronize(stream)


def _speed(api: Any, end: _End, dst: int, src: int) -> float:
    """Return the GB/s of copies on the GPU's stream."""
    api.setDevice(end.gpu)
    start, stop = api.eventCreate(), api.eventCreate()
    _copy(api, end.stream, dst, src, PATTERN)  # the first copy of a pair has a setup cost
    api.eventRecord(start, end.stream)
    for _ in range(COPIES):
        api.memcpyAsync(dst, src, SIZE, api.memcpyDefault, end.stream)
    api.eventRecord(stop, end.stream)
    api.streamSynchronize(end.stream)
    milliseconds = api.eventElapsedTime(start, stop)
    api.eventDestroy(start)
    api.eventDestroy(stop)
    return COPIES * SIZE / (milliseconds * 1e6)
