"""Copy rates between GPUs and pinned host memory, and between GPUs. Copies run alone, in two
directions together, and on all GPUs together."""

import contextlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llmq.base.dtypes import MIB
from llmq.base.errors import LlmqError
from llmq.bench.child import Job
from llmq.comm.links import probe
from llmq.runtime.cuda_device import NON_BLOCKING
from llmq.runtime.gpu_info import bus_id
from llmq.runtime.machine import stay_near
from llmq.runtime.pinned import PinnedMemory

COPY = 256 * MIB  # bytes of a copy
SECONDS = 0.5  # target duration of a measurement
GUESS = 40e9  # assumed rate in bytes per second that sets the number of copies
WAYS = {"in": (True, False), "out": (False, True), "both": (True, True)}

Rates = dict[str, list[float]]
"""GB/s of each GPU that copies, by the keys of WAYS; "both" counts the slower direction."""


class End:
    """A GPU with, for each direction, a device buffer, a pinned host buffer and a stream. One
    thread, bound to cores near the GPU, makes, uses and closes an End."""

    def __init__(self, api: Any, gpu: int, nbytes: int = COPY):
        """api: CuPy's CUDA runtime module."""
        self.api, self.gpu, self.nbytes = api, gpu, nbytes
        api.setDevice(gpu)
        self._pinned = [PinnedMemory(api, nbytes) for _ in WAYS["both"]]
        self.host = [pinned.storage.base for pinned in self._pinned]
        self.device = [api.malloc(nbytes) for _ in WAYS["both"]]
        self.streams = [api.streamCreateWithFlags(NON_BLOCKING) for _ in WAYS["both"]]

    def copy(self, way: int) -> None:
        """Enqueue a copy. way: 0 for host to GPU, 1 for GPU to host."""
        pair = (self.device[way], self.host[way])
        dst, src = pair if way == 0 else pair[::-1]
        self.api.memcpyAsync(dst, src, self.nbytes, self.api.memcpyDefault, self.streams[way])

    def rate(self, ways: tuple[bool, bool], start: threading.Barrier, seconds: float) -> float:
        """Return the GB/s of the slower direction among `ways`, by the GPU's events. All Ends wait
        for each other at `start`."""
        api, count = self.api, int(seconds * GUESS / self.nbytes)
        taking_part = [way for way, takes_part in enumerate(ways) if takes_part]
        for way in taking_part:
            for _ in range(2):  # the first copy wakes the link from power saving
                begin = time.perf_counter()
                self.copy(way)
                api.streamSynchronize(self.streams[way])
            # With a riser of a single PCIe lane, the usual number of copies would take minutes.
            count = min(count, int(seconds / (time.perf_counter() - begin)))
        count = max(count, 2)
        start.wait()
        marks = {way: (api.eventCreate(), api.eventCreate()) for way in taking_part}
        for way in taking_part:
            api.eventRecord(marks[way][0], self.streams[way])
        for _ in range(count):
            for way in taking_part:
                self.copy(way)
        for way in taking_part:
            api.eventRecord(marks[way][1], self.streams[way])
        slowest = 0.0
        for way in taking_part:
            api.streamSynchronize(self.streams[way])
            slowest = max(slowest, api.eventElapsedTime(*marks[way]) / 1e3)
            for event in marks[way]:
                api.eventDestroy(event)
        return count * self.nbytes / slowest / 1e9

    def close(self) -> None:
        self.api.setDevice(self.gpu)
        for way in range(2):
            self.api.streamSynchronize(self.streams[way])
            self.api.streamDestroy(self.streams[way])
            self.api.free(self.device[way])
            self._pinned[way].free()


def together(api: Any, gpus: Sequence[int], nbytes: int = COPY, seconds: float = SECONDS) -> Rates:
    """Return rates of GPUs that copy at the same time, each GPU driven by its own thread."""
    start = threading.Barrier(len(gpus))
    found: Rates = {name: [0.0] * len(gpus) for name in WAYS}

    def run(index: int) -> None:
        try:
            with contextlib.suppress(LlmqError, RuntimeError):
                stay_near(bus_id(gpus[index]))
            end = End(api, gpus[index], nbytes)
            try:
                for name, ways in WAYS.items():
                    found[name][index] = end.rate(ways, start, seconds)
                    start.wait()
            finally:
                end.close()
        except Exception:
            start.abort()  # without abort() the other threads would wait for ever
            raise

    with ThreadPoolExecutor(len(gpus)) as pool:
        runs = [pool.submit(run, index) for index in range(len(gpus))]
    for error in (run.exception() for run in runs):
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return found


def measure(job: Job, *, gpus: int, **_: Any) -> None:
    """Measure copy rates, the part `bus` of `llmq rig`. The result has `alone`, the rates of each
    GPU; `at_once`, by N, the rates of the first N GPUs that copy together; `pairs`, a record for
    each ordered pair of GPUs."""
    from llmq.runtime.cuda_api import load

    api = load().runtime
    found: dict[str, Any] = {"alone": [], "at_once": {}, "pairs": []}
    for gpu in range(gpus):
        found["alone"].append(together(api, [gpu]))
        job.note(found)
    found["at_once"]["1"] = {way: [found["alone"][0][way][0]] for way in WAYS}
    job.note(found)
    for count in range(2, gpus + 1):
        if job.left > 0:
            found["at_once"][str(count)] = together(api, range(count))
            job.note(found)
    if gpus > 1:
        found["pairs"] = probe(api, range(gpus), "auto").records()
        job.note(found)
