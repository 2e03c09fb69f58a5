"""Traffic between a GPU's streams and scratch files: nothing is early, and an error is told."""

from __future__ import annotations

import ctypes
import queue
import random
import threading
import time

import numpy as np
import pytest

from llmq.base.dtypes import F32, U8
from llmq.base.errors import MachineError
from llmq.base.tensor import Storage, Tensor
from llmq.runtime import cuda_api, files
from llmq.runtime.cuda_device import CudaDevice
from llmq.runtime.device import MemorySizes
from tests.runtime.fake_cuda import SUCCESS, FakeApi

PATIENCE = 20.0


class LateStreams:
    """Streams as threads, which run late and in no order but their own. current: the number of the
    stream that gets the next calls."""

    def __init__(self, count: int, seed: int = 0):
        self.current, self._random = 0, random.Random(seed)
        self._queues = [queue.SimpleQueue() for _ in range(count)]
        self._threads = [threading.Thread(target=self._run, args=(q,)) for q in self._queues]
        for thread in self._threads:
            thread.start()

    def _run(self, calls: queue.SimpleQueue) -> None:
        while (call := calls.get()) is not None:
            time.sleep(self._random.random() * 2e-3)
            call()

    def call(self, fn) -> None:
        self._queues[self.current].put(fn)

    def copy_bytes(self, dst: int, src: int, nbytes: int) -> None:
        self.call(lambda: ctypes.memmove(dst, src, nbytes))

    def wait_word(self, address: int, value: int) -> None:
        self.call(lambda: wait_word(address, value))

    def write_word(self, address: int, value: int) -> None:
        self.call(lambda: write_word(address, value))

    def close(self) -> None:
        for calls in self._queues:
            calls.put(None)
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a stream hangs"


def wait_word(address: int, value: int) -> None:
    word, end = ctypes.c_uint32.from_address(address), time.monotonic() + PATIENCE
    while (word.value - value) % 2**32 >= 2**31:
        assert time.monotonic() < end, "a flag never comes"
        time.sleep(1e-5)


def write_word(address: int, value: int) -> None:
    ctypes.c_uint32.from_address(address).value = value


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 8192)


def buffers_of() -> Tensor:
    data = np.full(files.BUFFER_BYTES, 0xFF, np.uint8)
    storage = Storage("pinned", data.ctypes.data, data)
    return Tensor("buffers", (data.size,), U8, storage, 0)


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_streams_that_are_late_find_what_was_stored(small, tmp_path):
    """Two streams store and load ranges that begin and end anywhere, also across directories. A
    range is loaded long after it was stored, or at once, in another stream's turn."""
    buffers, streams, rng = buffers_of(), LateStreams(2), random.Random(1)
    folders = [tmp_path / "a", tmp_path / "b"]
    traffic = files.Traffic(files.Files(folders, 1 << 17, buffers.numpy()), buffers, streams)
    traffic.files.flags.fill(2**32 - 4)
    traffic._turns = [2**31 - 2] * len(traffic.files.flags)
    want, found = np.zeros(1 << 17, np.uint8), []
    for number in range(60):
        start = rng.randrange(0, (1 << 17) - 30_000)
        data = np.full(rng.randrange(1, 30_000), 1 + number, np.uint8)
        streams.current = rng.randrange(2)
        if number % 2:
            found.append((np.empty(data.size, np.uint8), want[start : start + data.size].copy()))
            traffic.load(address(found[-1][0]), start, data.size)
            found[-1] += (start,)
        else:
            streams.current = 0  # stores of the same bytes have an order
            want[start : start + data.size] = data
            traffic.store(start, address(data), data.size)
            found.append((data, data.copy(), start))
    streams.close()
    traffic.drain()
    for got, expected, start in found:
        assert (got == expected).all(), start
    whole = np.empty(want.size, np.uint8)
    traffic.files.load(whole, 0)
    assert (whole == want).all()
    traffic.close()
    assert not [*folders[0].iterdir(), *folders[1].iterdir()]


def test_an_error_lets_streams_go_on_and_is_raised(small, tmp_path, monkeypatch):
    buffers, streams = buffers_of(), LateStreams(1)
    traffic = files.Traffic(files.Files([tmp_path], 1 << 16, buffers.numpy()), buffers, streams)
    data = np.ones(40_000, np.uint8)
    monkeypatch.setattr(files.os, "pwritev", lambda *_: 17)  # the disk is full
    traffic.store(0, address(data), data.size)
    streams.close()
    with pytest.raises(MachineError, match="cannot be written"):
        traffic.drain()
    with pytest.raises(MachineError, match="--continue"):
        traffic.load(address(data), 0, 1)
    traffic.close()


def test_a_gpu_copies_without_graphs(tmp_path, monkeypatch):
    """CudaDevice on fake bindings: copies, set-up, and graphs of what moves no files."""
    api = FakeApi()
    monkeypatch.setattr(cuda_api, "load", lambda: api)

    def waits(stream: int, place: int, value: int, how: int) -> tuple:
        wait_word(place, value)
        return (SUCCESS,)

    def writes(stream: int, place: int, value: int, how: int) -> tuple:
        write_word(place, value)
        return (SUCCESS,)

    monkeypatch.setattr(api, "cuStreamWaitValue32", waits)
    monkeypatch.setattr(api, "cuStreamWriteValue32", writes)
    sizes = MemorySizes(device=1 << 17, stack=1 << 10, pinned=80 << 20, ssd=1 << 17)
    dev = CudaDevice(0, sizes, folders=[tmp_path])
    here = dev.alloc("here", (9000,), F32, "Activations")
    there = dev.alloc("there", (9000,), F32, "Adam M", "ssd")
    values = np.arange(9000, dtype=np.float32)
    dev.zero(there)
    assert not dev.download(there).any()
    dev.upload(there, values)

    def swap() -> None:
        dev.copy(here, there)
        dev.copy(there.rows(0, 4500), here.rows(4500, 9000))

    for _ in range(3):
        dev.graph(("swap",), swap)
        dev.graph(("zero",), lambda: dev.zero(here))
    assert (dev.download(there) == np.tile(values[4500:], 2)).all()
    assert not dev.download(here).any()
    assert api.runtime.calls.count("graphLaunch") == 2  # of "zero" alone
    dev.close()
