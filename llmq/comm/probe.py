"""Measure how GPUs reach each other's memory: first whether data arrive, then how fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmq.comm.links import LinkTable, Measured, choose
from llmq.runtime.cuda_device import NON_BLOCKING
from llmq.runtime.pinned import PinnedMemory

SIZE = 16 << 20  # bytes of a timed copy
PATTERN = 1 << 20  # bytes that are compared
COPIES = 2  # timed at once
ALREADY_ENABLED = 704  # cudaErrorPeerAccessAlreadyEnabled: NCCL, or an earlier run of this process


@dataclass(frozen=True, slots=True)
class _End:
    """A GPU's buffers and stream for the measurement."""

    gpu: int
    source: int
    target: int
    stream: int


def probe(api: Any, gpus: Sequence[int], p2p: str) -> LinkTable:
    """Probe every ordered pair, one after the other. Changes the thread's current GPU.

    api: CuPy's CUDA runtime module. p2p "off" gives no GPU access to another.
    Raises LlmqError where p2p is "on" and a pair does not work.
    """
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
    """Give the source access to the reader's memory; False where there is no way."""
    if not api.deviceCanAccessPeer(source, reader):
        return False
    api.setDevice(source)
    try:
        api.deviceEnablePeerAccess(reader)
    except api.CUDARuntimeError as error:
        return error.status == ALREADY_ENABLED
    return True


def _arrives(api: Any, source: _End, reader: _End) -> bool:
    """Whether a pattern of this pair's own is the same after the copy."""
    pattern = np.random.default_rng([source.gpu, reader.gpu]).bytes(PATTERN)
    pattern = np.frombuffer(pattern, np.uint8)
    api.setDevice(source.gpu)
    _copy(api, source.stream, source.source, pattern.ctypes.data, PATTERN)
    api.setDevice(reader.gpu)
    found = np.zeros(PATTERN, np.uint8)
    _copy(api, reader.stream, reader.target, found.ctypes.data, PATTERN)  # not an older pattern
    api.setDevice(source.gpu)
    _copy(api, source.stream, reader.target, source.source, PATTERN)
    api.setDevice(reader.gpu)
    _copy(api, reader.stream, found.ctypes.data, reader.target, PATTERN)
    return bool(np.array_equal(found, pattern))


def _copy(api: Any, stream: int, dst: int, src: int, nbytes: int) -> None:
    api.memcpyAsync(dst, src, nbytes, api.memcpyDefault, stream)
    api.streamSynchronize(stream)


def _speed(api: Any, end: _End, dst: int, src: int) -> float:
    """GB/s of copies on the GPU's stream."""
    api.setDevice(end.gpu)
    start, stop = api.eventCreate(), api.eventCreate()
    _copy(api, end.stream, dst, src, PATTERN)  # the first copy between two places sets things up
    api.eventRecord(start, end.stream)
    for _ in range(COPIES):
        api.memcpyAsync(dst, src, SIZE, api.memcpyDefault, end.stream)
    api.eventRecord(stop, end.stream)
    api.streamSynchronize(end.stream)
    milliseconds = api.eventElapsedTime(start, stop)
    api.eventDestroy(start)
    api.eventDestroy(stop)
    return COPIES * SIZE / (milliseconds * 1e6)
