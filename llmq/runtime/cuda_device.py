"""CudaDevice is one NVIDIA GPU. Only this module and llmq/runtime/cu*.py load CUDA libraries, at
the first use.

With LLMQ_SYNC=1 in the environment, the host waits after every launch, so that an error names the
failed launch, and graphs are disabled.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llmq import __version__
from llmq.base.dtypes import BF16
from llmq.base.errors import LlmqError, MachineError
from llmq.base.tensor import SSD, TIERS, Storage, Tensor, host_tiers
from llmq.runtime import cuda_api
from llmq.runtime.arena import align_up
from llmq.runtime.compile import cache_dir
from llmq.runtime.cuda_kernels import CudaKernels
from llmq.runtime.device import Device, DeviceSpec, Launch, MemorySizes
from llmq.runtime.files import Files, Traffic
from llmq.runtime.graph import LATE, CudaEvent, Graphs, noticing
from llmq.runtime.mesh import Mesh
from llmq.runtime.pinned import PinnedMemory, read_write_combined
from llmq.runtime.tuning import Choices

STREAMS = ("main", "comm", "exchange", "copy", "store", "stage", "save")
NOT_READY = 600  # cudaErrorNotReady
PROGRAMMATIC = 90  # smallest compute capability, times 10, with programmatic dependent launch
# CUDA 12.3, the first release whose graphs capture programmatic launches
PROGRAMMATIC_GRAPHS = 12030
NON_BLOCKING = 1  # cudaStreamNonBlocking: no ordering with the legacy default stream
TUNED = "matmul.json"  # file of tuned products and choices in the cache folder
DISABLE_TIMING = 2  # cudaEventDisableTiming makes events cheaper
# CU_STREAM_WAIT_VALUE_GEQ: wait until the word has reached the value, modulo 2**32
WAIT_REACHED = 0


class CudaDevice(Device):
    """One GPU, driven by one thread. All memory is allocated at construction. sync_calls: number of
    times the host has waited for the GPU. use_graphs: True if `graph` captures and replays; False
    within `without_graphs`."""

    kind = "cuda"

    def __init__(
        self,
        index: int,
        sizes: MemorySizes,
        *,
        graphs: bool = True,
        tune: bool = True,
        num_sms: int | None = None,
        mesh: Mesh | None = None,
        folders: Sequence[Path] = (),
    ):
        """graphs: True to let `graph` capture and replay. tune: True to let matrix products use the
        fastest of several algorithms, timed once per shape; False to use the library's first
        choice. num_sms: number of multiprocessors from which grids are sized, as in the plan that
        gave `sizes`; None: the GPU's own number. mesh: the rank's mesh, see Device. folders:
        directories for the files of the tier "ssd". Raises LlmqError if the GPU is unusable or has
        too little memory."""
        spec = cuda_api.device_spec(index)
        if num_sms is not None:
            spec = replace(spec, num_sms=num_sms)
        api = cuda_api.load()
        self.index = index
        self._runtime, self._driver = api.runtime, api.driver
        self._nvtx = api.nvtx
        self._folders, self._traffic = folders, None
        self._moves_files: set[tuple] = set()  # keys of graphs that would copy scratch files
        stack_offset = align_up(sizes["device"])
        with ExitStack() as undo:
            self._memory = self._take_memory(spec, stack_offset + align_up(sizes["stack"]))
            undo.callback(self._runtime.free, self._memory)
            self._host_memory = []
            for name in host_tiers():
                memory = PinnedMemory(self._runtime, sizes[name], TIERS[name])
                undo.callback(memory.free)
                self._host_memory.append(memory)
            undo.pop_all()  # all memory is allocated: no error frees it from here on
        storages = {
            "device": Storage("device", self._memory),
            "stack": Storage("stack", self._memory + stack_offset),
            SSD.name: Storage(SSD.name),
            **{memory.storage.place: memory.storage for memory in self._host_memory},
        }
        super().__init__(spec, storages, sizes, mesh=mesh)
        self.sync_calls = 0
        self._events: list[int] = []
        new_stream = self._runtime.streamCreateWithFlags
        self._streams = {name: new_stream(NON_BLOCKING) for name in STREAMS}
        self._stream = self._streams["main"]
        self._graphs = Graphs(self._runtime, self._streams, self._new_event)
        self._sync_launches = os.environ.get("LLMQ_SYNC") == "1"
        self.use_graphs = graphs and not self._sync_launches
        self._tune = tune
        self._kernels = CudaKernels(api, cuda_api.compute_capability(index))
        self._libraries: dict[str, Any] = {}
        self._choices: Choices | None = None
        self._pool: Any = None  # CuPy's memory pool for `compute`
        self._errors = (api.runtime.CUDARuntimeError, api.DriverError)  # raised by launches
        newer = self._runtime.driverGetVersion() >= PROGRAMMATIC_GRAPHS
        self._programmatic = newer and spec.capability >= PROGRAMMATIC
        self._may_overlap = False  # True if the last operation launched a programmatic kernel

    def _take_memory(self, spec: DeviceSpec, need: int) -> int:
        gpu = f"GPU {self.index} ({spec.name})"
        try:
            self._runtime.setDevice(self.index)
            free, _ = self._runtime.memGetInfo()
        except self._runtime.CUDARuntimeError as error:
            raise MachineError(
                f"{gpu} cannot be opened ({error}); see nvidia-smi for what else uses it"
            ) from error
        if need > free:
            raise LlmqError(
                f"{gpu}: {need / 2**30:.2f} GiB are needed, {free / 2**30:.2f} GiB are free; see "
                "nvidia-smi for what else uses it, and `llmq plan` for flags that save memory"
            )
        try:
            return self._runtime.malloc(max(need, 1))
        except self._runtime.CUDARuntimeError as error:
            raise LlmqError(
                f"{gpu}: {need / 2**30:.2f} GiB in one piece cannot be had ({error}); another "
                "program may have just taken it, see nvidia-smi"
            ) from error

    @property
    def api(self) -> Any:
        return self._runtime

    @property
    def stream(self) -> int:
        """The current stream's handle (a cudaStream_t), for libraries."""
        self._may_overlap = False  # the library's work must not overlap
        return self._stream

    # -- kernel launches --

    def _launch(self, launch: Launch) -> None:
        kernel = launch.kernel
        programmatic = kernel.programmatic and self._programmatic
        overlaps, self._may_overlap = self._may_overlap and programmatic, programmatic
        try:
            if kernel.file.endswith(".cu"):
                self._kernels.launch(launch, self._stream, overlaps=overlaps)
            else:
                method = kernel.entry.removeprefix(f"{kernel.op}_")
                getattr(self._library(kernel.op), method)(self._stream, *launch.args)
            if self._sync_launches:
                self.sync_calls += 1
                self._runtime.streamSynchronize(self._stream)
        except self._errors as error:
            raise RuntimeError(
                f"{kernel.entry}: {error} (rank {self.mesh.rank}, grid {launch.grid}, block "
                f"{launch.block}, {launch.smem} bytes of dynamic shared memory, arguments "
                f"{launch.args})" + ("" if self._sync_launches else f"; {LATE}")
            ) from error

    def _library(self, name: str) -> Any:
        """Return the library that runs the kernels of an operation without a .cu file; the library
        is loaded at its first use. name: name of the operation, such as "matmul"."""
        if name not in self._libraries:
            if name == "matmul":
                from llmq.runtime.cublaslt import CublasLt

                path = cache_dir() / TUNED
                self._libraries[name] = CublasLt(self.spec.name, tune=self._tune, cache_path=path)
            else:
                from llmq.runtime.cudnn import CudnnAttention

                self._libraries[name] = CudnnAttention.of(self.index)
            self._errors += self._libraries[name].errors
        return self._libraries[name]

    def choose(
        self, work: str, ways: dict[str, Callable[[], None]], kept: tuple[Tensor, ...] = ()
    ) -> None:
        if not self._tune:
            super().choose(work, ways)
            return
        if self._choices is None:
            from llmq.runtime.gpu_info import library_versions

            releases = {"llmq": __version__} | library_versions()
            machine = ", ".join([self.spec.name, *(f"{n} {v}" for n, v in releases.items())])
            path = cache_dir() / TUNED
            self._choices = Choices(machine, cuda=self._runtime, cache_path=path)
        self._choices.run(self._stream, work, ways, kept)

    def choices(self) -> dict[str, str]:
        return {} if self._choices is None else dict(self._choices.chosen)

    def fast_products(self) -> dict[str, bool]:
        plans = getattr(self._libraries.get("matmul"), "plans", {})
        library = {str(p): plan.choice.fast for p, plan in plans.items() if p.fast_accumulation}
        return library | dict.fromkeys(self._kernels.fast_products(), True)

    # -- copies and fills --

    def copy(self, dst: Tensor, src: Tensor) -> None:
        if dst.nbytes != src.nbytes:
            raise ValueError(f"copy: {dst!r} and {src!r} differ in size")
        if SSD not in (dst.storage.tier, src.storage.tier):
            self.copy_bytes(dst.ptr, src.ptr, dst.nbytes)
        elif self.capturing:
            raise RuntimeError(f"copy: {dst!r}, {src!r}: no graph replays copies of files")
        elif src.storage.tier is SSD:
            self._traffic.load(dst.ptr, src.offset, src.nbytes)
        else:
            self._traffic.store(dst.offset, src.ptr, src.nbytes)

    def _open_files(self, buffers: Tensor) -> None:
        files = Files(self._folders, self.arenas[SSD.name].capacity, buffers.numpy())
        self._traffic = Traffic(files, buffers, self)

    def _settled_files(self) -> Files:
        """Return the scratch files after all work enqueued so far is done."""
        self.synchronize()
        self._traffic.drain()
        return self._traffic.files

    def copy_bytes(self, dst: int, src: int, nbytes: int) -> None:
        """Enqueue a copy between two addresses, each in pinned memory or in memory of a GPU that
        this GPU can access."""
        self._may_overlap = False
        with noticing(self._runtime, f"copying {nbytes} bytes"):
            self._runtime.memcpyAsync(dst, src, nbytes, self._runtime.memcpyDefault, self._stream)

    def wait_word(self, address: int, value: int, how: int = WAIT_REACHED) -> None:
        """Make the current stream wait for a 32-bit word. how: the comparison with `value`, a
        member of CUstreamWaitValue_flags. This call and `write_word` block while the stream's queue
        is full. A blocked call releases the interpreter lock, because another thread may have to
        let the stream go on."""
        self._check(*self._driver.cuStreamWaitValue32(self.stream, address, value, how))

    def write_word(self, address: int, value: int) -> None:
        """Enqueue a write of a 32-bit word after all earlier work of the current stream."""
        self._check(*self._driver.cuStreamWriteValue32(self.stream, address, value, 0))

    def _check(self, status: Any) -> None:
        if status:
            raise RuntimeError(f"stream memory operation: {status.name} (rank {self.mesh.rank})")

    def zero(self, tensor: Tensor) -> None:
        if tensor.storage.tier is SSD:
            self._settled_files().zero(tensor.offset, tensor.nbytes)
            return
        self._may_overlap = False
        self._runtime.memsetAsync(tensor.ptr, 0, tensor.nbytes, self._stream)

    def compute(self, fn: Callable[..., None], *tensors: Tensor) -> None:
        """See Device.compute. CuPy allocates from a memory pool of this device alone, so that
        memory captured in a graph stays valid in replays."""
        import cupy

        if self._pool is None:
            self._pool = cupy.cuda.MemoryPool()

        def array(tensor: Tensor) -> Any:
            dtype = np.uint16 if tensor.dtype is BF16 else tensor.dtype.numpy
            memory = cupy.cuda.UnownedMemory(tensor.ptr, tensor.nbytes, self, self.index)
            return cupy.ndarray(tensor.shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

        stream = cupy.cuda.ExternalStream(self._stream, self.index)
        self._may_overlap = False
        with stream, cupy.cuda.using_allocator(self._pool.malloc):
            fn(cupy, *map(array, tensors))

    def upload(self, dst: Tensor, array: np.ndarray) -> None:
        if array.shape != dst.shape or array.dtype != dst.dtype.numpy:
            raise ValueError(f"upload: {dst!r} given {array.dtype} {list(array.shape)}")
        array = np.ascontiguousarray(array)
        if dst.storage.tier is SSD:
            self._settled_files().save(dst.offset, array.reshape(-1).view(np.uint8))
            return
        self.synchronize()
        # cudaMemcpy could return before bytes from pageable memory have arrived, so a stream
        # copies.
        kind = self._runtime.memcpyDefault
        self._runtime.memcpyAsync(dst.ptr, array.ctypes.data, dst.nbytes, kind, self._stream)
        self._runtime.streamSynchronize(self._stream)

    def send(self, dst: Tensor, array: np.ndarray) -> None:
        self._may_overlap = False
        # bytes from pageable memory are staged before the call returns
        kind = self._runtime.memcpyDefault
        self._runtime.memcpyAsync(dst.ptr, array.ctypes.data, dst.nbytes, kind, self._stream)

    def host_words(self, count: int) -> np.ndarray:
        memory = PinnedMemory(self._runtime, 4 * count)
        self._host_memory.append(memory)
        return memory.storage.bytes.view(np.int32)

    def receive(self, array: np.ndarray, src: Tensor) -> None:
        self._may_overlap = False
        kind = self._runtime.memcpyDefault
        self._runtime.memcpyAsync(array.ctypes.data, src.ptr, src.nbytes, kind, self._stream)

    def download(self, src: Tensor) -> np.ndarray:
        array = np.empty(src.shape, src.dtype.numpy)
        if src.storage.tier is SSD:
            self._settled_files().load(array.reshape(-1).view(np.uint8), src.offset)
            return array
        self.synchronize()
        if not src.storage.tier.cached:
            read_write_combined(self._runtime, array.ctypes.data, src)
        else:
            kind = self._runtime.memcpyDefault
            self._runtime.memcpy(array.ctypes.data, src.ptr, src.nbytes, kind)
        return array

    # -- streams, events and graphs --

    def _switch(self, stream: str) -> None:
        self._stream, self._may_overlap = self._streams[stream], False
        super()._switch(stream)
        if self.capturing:
            self._graphs.use_stream(stream)

    def _new_event(self) -> int:
        handle = self._runtime.eventCreateWithFlags(DISABLE_TIMING)
        self._events.append(handle)
        return handle

    def event(self) -> CudaEvent:
        return CudaEvent(self._runtime, self._new_event(), self._waiting)

    def _record(self, event: CudaEvent) -> None:
        self._may_overlap = False
        self._graphs.record(event, self._stream)

    def _wait(self, event: CudaEvent) -> None:
        self._may_overlap = False
        self._graphs.wait(event, self._stream)

    def has_passed(self, event: CudaEvent) -> bool:
        self._runtime.setDevice(self.index)  # a thread without a current GPU would open GPU 0
        status = self._runtime.eventQuery(event.handle)
        if status not in (0, NOT_READY):
            raise RuntimeError(f"looking after copies: CUDA error {status}; {LATE}")
        return status == 0

    @property
    def capturing(self) -> bool:
        """True if launches go into a graph capture and not to the GPU."""
        return self._graphs.capturing is not None

    def graph(self, key: tuple, fn: Callable[[], Any]) -> None:
        if self.stream_name != "main":
            raise RuntimeError(f"graph {key}: graphs run on the main stream only")
        moved = self._traffic.moved if self._traffic else 0
        if self.use_graphs and key not in self._moves_files:
            self.last_operation = f"one of graph {key[0]}"  # a replay does not set the name
            enqueue = self._graphs.prepare if self._capture_only else self._graphs.run
            self._may_overlap = False
            enqueue(key, fn, self.stack.used)
            self._may_overlap = False
        elif not self._capture_only:
            fn()
        if self._traffic and self._traffic.moved > moved:
            self._moves_files.add(key)

    def forget_graphs(self) -> None:
        self._graphs.close()

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        before, self.use_graphs = self.use_graphs, False
        try:
            yield
        finally:
            self.use_graphs = before

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count a wait of the host for the GPU; RuntimeError during a graph capture."""
        if self.capturing:
            raise RuntimeError("the host may not wait for the GPU while a graph is captured")
        self.sync_calls += 1
        with noticing(self._runtime, "waiting for the GPU"):
            yield
        if self._traffic is not None:
            self._traffic.check()

    def synchronize(self) -> None:
        with self._waiting():
            self._runtime.setDevice(self.index)  # another thread may run the clean-up
            self._runtime.deviceSynchronize()

    def synchronize_stream(self) -> None:
        with self._waiting():
            self._runtime.streamSynchronize(self._stream)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        self._nvtx.RangePush(name)
        try:
            yield
        finally:
            self._nvtx.RangePop()

    def close(self) -> None:
        self._runtime.setDevice(self.index)
        self._runtime.deviceSynchronize()
        if self._traffic is not None:
            self._traffic.close()
        for held in (*self._libraries.values(), self._graphs, self.mesh):
            held.close()
        for event in self._events:
            self._runtime.eventDestroy(event)
        for stream in self._streams.values():
            self._runtime.streamDestroy(stream)
        for memory in self._host_memory:
            memory.free()
        if self._pool is not None:
            self._pool.free_all_blocks()
        self._runtime.free(self._memory)
