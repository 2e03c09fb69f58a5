"""Just enough of CuPy's CUDA bindings, on host memory, to run CudaDevice without a GPU.

Work is done when it is enqueued, or recorded while its stream is captured and done at replay.
Rules of capturing that a mistake would break are enforced.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from types import SimpleNamespace

PINNED_LIMIT = 96 << 20  # bytes that the fake system locks at most
PROPERTIES = {
    "name": b"Fake GPU",
    "major": 9,
    "minor": 0,
    "multiProcessorCount": 132,
    "totalGlobalMem": 80 << 30,
}


class CudaError(RuntimeError):
    """Stands for CUDARuntimeError and CUDADriverError."""


class FakeRuntime:
    """The functions of cupy.cuda.runtime that llmq uses."""

    CUDARuntimeError = CudaError
    memcpyDefault = 4
    streamCaptureModeThreadLocal = 1

    def __init__(self):
        self.driver_version = self.runtime_version = 12090
        self.devices = 1
        self.properties = dict(PROPERTIES)
        self.free_bytes = 80 << 30
        self.calls: list[str] = []
        self.handles = itertools.count(1000)
        self.buffers: dict[int, ctypes.Array] = {}
        self.live: set[int] = set()
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.capture: list[Callable[[], None]] | None = None
        self.captured_streams: dict[int, bool] = {}  # whether main waits for all of its work
        self.recorded_in: dict[int, tuple[object, int]] = {}  # event -> capture, stream

    def _handle(self) -> int:
        handle = next(self.handles)
        self.live.add(handle)
        return handle

    def _forbidden(self, what: str) -> None:
        if self.capture is not None:
            raise CudaError(f"cudaErrorStreamCaptureUnsupported: {what}")

    def work(self, stream: int, action: Callable[[], None]) -> None:
        if stream not in self.captured_streams:
            action()
            return
        self.captured_streams[stream] = False
        self.capture.append(action)

    # -- facts, memory --

    def driverGetVersion(self):
        return self.driver_version

    def runtimeGetVersion(self):
        return self.runtime_version

    def getDeviceCount(self):
        if not self.devices:
            raise CudaError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return self.devices

    def getDeviceProperties(self, index):
        return self.properties

    def setDevice(self, index):
        self.calls.append(f"setDevice {index}")

    def memGetInfo(self):
        return self.free_bytes, self.properties["totalGlobalMem"]

    def malloc(self, size):
        buffer = (ctypes.c_uint8 * (size + 256))()
        address = ctypes.addressof(buffer) + 255 & ~255
        self.buffers[address] = buffer
        self.calls.append(f"malloc {size}")
        return address

    def free(self, address):
        del self.buffers[address]

    def hostAlloc(self, size, flags):
        if size > PINNED_LIMIT:
            raise CudaError("cudaErrorMemoryAllocation: out of memory")
        return self.malloc(size)

    freeHost = free

    def hostRegister(self, address, size, flags):
        if size > PINNED_LIMIT:
            raise CudaError("cudaErrorMemoryAllocation: out of memory")
        if address in self.buffers:
            raise CudaError("cudaErrorHostMemoryAlreadyRegistered")
        self.buffers[address] = None

    hostUnregister = free

    def memcpyAsync(self, dst, src, size, kind, stream):
        self.work(stream, lambda: ctypes.memmove(dst, src, size))

    def memcpy(self, dst, src, size, kind):
        self._forbidden("memcpy")
        ctypes.memmove(dst, src, size)

    def memsetAsync(self, address, value, size, stream):
        self.work(stream, lambda: ctypes.memset(address, value, size))

    # -- streams, events --

    def streamCreateWithFlags(self, flags):
        return self._handle()

    def eventCreateWithFlags(self, flags):
        return self._handle()

    def streamDestroy(self, stream):
        self.live.remove(stream)

    eventDestroy = streamDestroy

    def eventRecord(self, event, stream):
        inside = self.capture if stream in self.captured_streams else None
        self.recorded_in[event] = inside, stream
        self.calls.append(f"eventRecord {event} {stream}")

    def streamWaitEvent(self, stream, event, flags=0):
        self.calls.append(f"streamWaitEvent {stream} {event} {flags}")
        if self.capture is None or flags == 1:
            return
        capture, recorder = self.recorded_in.get(event, (None, 0))
        if capture is not self.capture:
            raise CudaError("cudaErrorStreamCaptureIsolation")
        if stream not in self.captured_streams:
            self.captured_streams[stream] = False
        self.captured_streams[recorder] = True

    def eventSynchronize(self, event):
        self._forbidden("eventSynchronize")

    def streamSynchronize(self, stream):
        self._forbidden("streamSynchronize")

    def deviceSynchronize(self):
        self._forbidden("deviceSynchronize")

    # -- graphs --

    def streamBeginCapture(self, stream, mode):
        assert mode == self.streamCaptureModeThreadLocal
        self.capture = []
        self.captured_streams = {stream: True}

    def streamEndCapture(self, stream):
        actions, self.capture = self.capture, None
        streams, self.captured_streams = self.captured_streams, {}
        if not all(joined for s, joined in streams.items() if s != stream):
            raise CudaError("cudaErrorStreamCaptureUnjoined")
        handle = self._handle()
        self.graphs[handle] = actions
        return handle

    def graphInstantiate(self, graph):
        handle = self._handle()
        self.graphs[handle] = self.graphs[graph]
        return handle

    def graphLaunch(self, executable, stream):
        self.calls.append("graphLaunch")
        for action in self.graphs[executable]:
            self.work(stream, action)

    def graphUpload(self, executable, stream):
        self.calls.append("graphUpload")

    def graphDestroy(self, graph):
        self.live.remove(graph)

    graphExecDestroy = graphDestroy


class FakeApi:
    """The object that cuda_api.load() returns.

    launches: (entry, grid, block, shared memory, stream, argument slots as 64-bit integers), noted
    when the work is done. num_args: by entry. shared: (entry, bytes of dynamic shared memory that
    it was given). loaded: paths. refused: entries that cannot be launched. memory_operations: calls
    of the driver on words in memory; memory_status: what they return.
    """

    DriverError = CudaError

    def __init__(self):
        self.runtime = FakeRuntime()
        self.driver = self
        self.num_args: dict[str, int] = {}
        self.entries: dict[int, str] = {}
        self.launches: list[tuple] = []
        self.shared: list[tuple[str, int]] = []
        self.loaded: list[str] = []
        self.refused: set[str] = set()
        self.memory_operations: list[tuple] = []
        self.memory_status = SUCCESS
        ranges: list[str] = []
        self.nvtx = SimpleNamespace(
            ranges=ranges, RangePush=ranges.append, RangePop=lambda: ranges.append("pop")
        )

    def RawModule(self, *, path):
        self.runtime._forbidden("RawModule")
        self.loaded.append(path)
        return SimpleNamespace(get_function=lambda name: FakeRawKernel(self, name))

    # -- cuda.bindings.driver --

    def CUfunction(self, handle):
        return handle

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, params, extra):
        entry = self.entries[function]
        if entry in self.refused:
            return (FakeStatus("CUDA_ERROR_INVALID_VALUE", 1),)
        count = self.num_args[entry]
        pointers = (ctypes.c_void_p * count).from_address(params)
        slots = tuple(ctypes.c_uint64.from_address(p).value for p in pointers)
        launch = (entry, (gx, gy, gz), (bx, by, bz), shared, stream, slots)
        self.runtime.work(stream, lambda: self.launches.append(launch))
        return (SUCCESS,)

    def cuStreamWaitValue32(self, *args):
        self.memory_operations.append(("wait", *args))
        return (self.memory_status,)

    def cuStreamWriteValue32(self, *args):
        self.memory_operations.append(("write", *args))
        return (self.memory_status,)


class FakeStatus(int):
    """A CUresult."""

    def __new__(cls, name: str, value: int):
        status = super().__new__(cls, value)
        status.name = name
        return status

    def __str__(self) -> str:
        return self.name


SUCCESS = FakeStatus("CUDA_SUCCESS", 0)


class FakeRawKernel:
    """A cupy.RawKernel."""

    def __init__(self, api: FakeApi, name: str):
        handle = next(api.runtime.handles)
        api.entries[handle] = name
        self.kernel = SimpleNamespace(ptr=handle)
        self.shared_size_bytes = 0
        self._api, self._name = api, name

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return max((size for name, size in self._api.shared if name == self._name), default=0)

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, value: int) -> None:
        self._api.shared.append((self._name, value))
