"""Device is the interface through which a training step uses a machine.

Three classes implement the interface: CudaDevice launches kernels, HostDevice calls NumPy
references of kernels, and PlanDevice checks arguments and counts bytes without computing. Each
device is used by one thread, and devices share nothing.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from llmq.base.dtypes import U8, DType
from llmq.base.errors import ConfigError
from llmq.base.tensor import SSD, TIERS, Storage, Tensor
from llmq.runtime.arena import Arena, Stack
from llmq.runtime.cost import MOVES, Cost
from llmq.runtime.files import BUFFER_BYTES
from llmq.runtime.kernel import Kernel
from llmq.runtime.mesh import Mesh

T = TypeVar("T")

# FUSED names our kernels that compute a matrix product together with the operation that follows the
# product.
FUSED = (
    "matmul_adapted",
    "matmul_gradient",
    "matmul_grouped",
    "matmul_grouped_gradient",
    "matmul_swiglu",
    "matmul_swiglu_backward",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Properties of a device that launchers and the planner need. capability: the compute
    capability times 10 (90 for an H100); 0 for the CPU. num_sms: number of multiprocessors, from
    which grids and workspaces are sized. memory: total bytes of the device's memory.
    library_workspace: bytes that the matrix-product library may use; the default is NVIDIA's
    advice, 32 MiB on Hopper and later GPUs, 4 MiB on earlier GPUs."""

    name: str
    capability: int
    num_sms: int
    memory: int
    library_workspace: int = -1

    def __post_init__(self) -> None:
        if self.library_workspace < 0:
            advised = (32 if self.capability >= 90 else 4) << 20
            object.__setattr__(self, "library_workspace", advised)

    @property
    def version(self) -> float:
        """The compute capability with a decimal point, such as 9.0."""
        return self.capability / 10

    @property
    def small_shared(self) -> bool:
        """True if a multiprocessor has 100 KiB of shared memory, as on GeForce cards, instead of
        164 KiB or more."""
        return self.capability in (86, 89, 120, 121)


HOST_SPEC = DeviceSpec(name="CPU", capability=0, num_sms=4, memory=0, library_workspace=0)


def told_to_fuse() -> frozenset[str] | None:
    """Return the fused products that LLMQ_FUSED in the environment names; None if the variable is
    not set. Raises ConfigError for a name that is not in FUSED."""
    text = os.environ.get("LLMQ_FUSED", "")
    names = {"": [], "none": [], "all": [*FUSED]}.get(text, text.split(","))
    for name in names:
        if name not in FUSED:
            raise ConfigError(
                f"LLMQ_FUSED: '{name}' is no product of our own: give all, none, or some of "
                f"{','.join(FUSED)}"
            )
    return frozenset(names) if text else None


class MemorySizes(dict[str, int]):
    """The bytes that one rank needs in each memory; keys are names of tiers and "stack". A plan
    returns these sizes, and a device is constructed with these sizes."""

    def __init__(self, **sizes: int):
        super().__init__({name: sizes.pop(name, 0) for name in (*TIERS, "stack")})
        if sizes:
            raise TypeError(f"MemorySizes: {', '.join(sizes)} is no memory")

    @property
    def on_device(self) -> int:
        """The bytes in the device's own memory, for its arena and the stack."""
        return self["device"] + self["stack"]

    @property
    def host(self) -> int:
        """The bytes in the host's RAM."""
        return sum(self[name] for name, tier in TIERS.items() if tier.on_host and tier.in_ram)


class Launch(NamedTuple):
    """The arguments of one `Device.launch`. types: the dtypes bound to type variables."""

    kernel: Kernel
    grid: int | tuple[int, ...]
    block: int | tuple[int, ...]
    args: tuple
    types: dict[str, DType]
    consts: dict[str, int]
    smem: int
    cost: Cost


class Event:
    """A point in the work of a stream; on devices without streams every event has passed. of_comm:
    True if the event was last recorded on a stream of collectives and the main stream has not
    waited for the event since."""

    of_comm = False

    def synchronize(self) -> None:
        """Make the host wait for the work that was enqueued before the last `record`."""


class Clock(NamedTuple):
    """Two functions that launch a measurement on the current stream: `start`, and `stop`, which
    adds the time since `start` to a sum in device memory."""

    start: Callable[[], None]
    stop: Callable[[], None]


class Device(ABC):
    """The interface of a rank's device: memory, launches, copies, streams and events. mesh: the
    rank's place among all ranks, with its collectives. last_operation: name of the collective or
    graph replay that was enqueued last, for diagnosis. clock: measures how long the main stream
    waits for other ranks; None with one rank. stream_name: name of the current stream. fused: the
    fused products (LLMQ_FUSED) that are used wherever possible, while no others are; None: the
    faster kernels are used. constants: the tensors that `constant` made, each with its content."""

    kind: str  # the value is "cuda", "host" or "plan"
    last_operation = "none"
    clock: Clock | None = None
    stream_name = "main"

    def __init__(
        self,
        spec: DeviceSpec,
        storages: dict[str, Storage],
        sizes: MemorySizes | None,
        *,
        mesh: Mesh | None = None,
    ):
        """storages: the storage named "stack" and a storage for each of TIERS. sizes: bytes of each
        memory; None: unlimited memory, for a plan. mesh: the rank's mesh; None: the mesh of a
        single rank."""
        self.spec, self.mesh = spec, mesh or Mesh.of()
        capacity = dict.fromkeys((*TIERS, "stack")) if sizes is None else sizes
        self.arenas = {name: Arena(storages[name], capacity[name]) for name in TIERS}
        self.stack = Stack(storages["stack"], capacity["stack"])
        self.constants: list[tuple[Tensor, np.ndarray]] = []
        self.fused = told_to_fuse()
        self._opened = False
        self._capture_only = False

    @property
    def num_sms(self) -> int:
        return self.spec.num_sms

    def alloc(
        self, name: str, shape: tuple[int, ...], dtype: DType, category: str, place: str = "device"
    ) -> Tensor:
        """Return a tensor that lives as long as the device, or until the end of an enclosing
        `temporary` block. The tensor's content is undefined. category: name under which the
        tensor's bytes are counted. place: the name of a tier."""
        if TIERS[place] is SSD and not self._opened:
            self._opened = True
            pinned = self.arenas["pinned"]
            self._open_files(pinned.take("ssd.buffers", (BUFFER_BYTES,), U8, "SSD buffers"))
        return self.arenas[place].take(name, shape, dtype, category)

    def _open_files(self, buffers: Tensor) -> None:  # noqa: B027 - a plan has none
        """Open the scratch files of the tier "ssd". buffers: staging memory, U8 (BUFFER_BYTES,)."""

    def constant(self, name: str, array: np.ndarray, dtype: DType, category: str) -> Tensor:
        """Return a tensor of this dtype with the array's content. Only `restore` may write the
        tensor again."""
        tensor = self.alloc(name, array.shape, dtype, category)
        self.upload(tensor, array)
        self.constants.append((tensor, array))
        return tensor

    def restore(self, constants: Iterable[tuple[Tensor, np.ndarray]]) -> None:
        """Write constants again after other work has overwritten their memory."""
        for tensor, array in constants:
            self.upload(tensor, array)

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """Free all memory that `alloc` takes within the `with` block at the end of the block. Use
        this for work whose shapes change from call to call; a training step takes all memory before
        the first step."""
        before = {place: arena.used for place, arena in self.arenas.items()}
        constants = len(self.constants)
        try:
            yield
        finally:
            del self.constants[constants:]
            for place, used in before.items():
                self.arenas[place].free_from(used)

    @contextmanager
    def reached(
        self, tensor: Tensor, *, reads: bool = True, writes: bool = False
    ) -> Iterator[Tensor]:
        """Yield memory in which kernels can access a tensor: the tensor's own memory, or a copy.
        reads, writes: whether kernels read the content, and whether kernels write it. If kernels
        write, the copy is copied back into the tensor."""
        if tensor.direct:
            yield tensor
            return
        with self.scratch(tensor.name, tensor.shape, tensor.dtype) as copied:
            if reads:
                self.copy(copied, tensor)
            yield copied
            if writes:
                self.copy(tensor, copied)

    def scratch(
        self, name: str, shape: tuple[int, ...], dtype: DType
    ) -> AbstractContextManager[Tensor]:
        """Return a tensor on the stack that lives during a `with` block. The tensor's content is
        undefined."""
        return self.stack.scratch(name, shape, dtype)

    def sizes(self) -> MemorySizes:
        """Return the most bytes of each memory that have been used so far. A device constructed
        with these sizes can repeat the work."""
        used = {place: arena.high_water_mark for place, arena in self.arenas.items()}
        return MemorySizes(stack=self.stack.high_water_mark, **used)

    def launch(
        self,
        kernel: Kernel,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: tuple,
        *,
        consts: dict[str, int] | None = None,
        smem: int = 0,
        cost: Cost = MOVES,
    ) -> None:
        """Enqueue a kernel launch on the current stream. consts: compile-time integers
        (-DNAME=value). smem: bytes of dynamic shared memory. cost: cost for planner, profile and
        card files, which derive only memory traffic from the arguments. Raises TypeError or
        ValueError if args do not fit the kernel's declaration."""
        types = kernel.bind(args, on_gpu=self.spec.capability > 0)
        self._launch(Launch(kernel, grid, block, args, types, consts or {}, smem, cost))

    @abstractmethod
    def _launch(self, launch: Launch) -> None: ...

    def choose(
        self, work: str, ways: dict[str, Callable[[], None]], kept: tuple[Tensor, ...] = ()
    ) -> None:
        """Enqueue some work in the fastest of several equivalent ways. A CUDA device that tunes
        times all ways at the first call and then always takes the fastest; a way that raises
        Unsupported is skipped (llmq/runtime/tuning.py). Other devices take the first way in `ways`.
        work: unique name of the work. ways: functions by name; each function enqueues launches on
        the current stream and overwrites all that the other functions write. kept: tensors to which
        a way adds, or which a way reads and changes."""
        next(iter(ways.values()))()

    def alike(self, items: Sequence[T]) -> Iterable[T]:
        """Yield the items of a loop that does equal work for all items but the first. A plan runs
        the loop for two items, and counts the work of the second for all further items."""
        return items

    def choices(self) -> dict[str, str]:
        """Return the name of the way that `choose` has taken so far, for each work."""
        return {}

    @abstractmethod
    def copy(self, dst: Tensor, src: Tensor) -> None:
        """Enqueue a copy of src's bytes to dst, which has equal size, between any memories on the
        current stream."""

    @abstractmethod
    def zero(self, tensor: Tensor) -> None:
        """Enqueue filling the tensor with zero bytes on the current stream."""

    @abstractmethod
    def compute(self, fn: Callable[..., None], *tensors: Tensor) -> None:
        """Enqueue fn(xp, *arrays) on the current stream, which writes in place. On a GPU xp is
        CuPy, on the CPU NumPy; arrays are views of the tensors, with BF16 numbers as uint16 bits.
        Arrays that fn allocates lie outside the arenas. The launches of fn must not depend on
        values of arrays or on the host's state, because a graph replays the launches."""

    @abstractmethod
    def upload(self, dst: Tensor, array: np.ndarray) -> None:
        """Write a host array of the same shape and dtype into dst; synchronous, for set-up and
        tests."""

    def send(self, dst: Tensor, array: np.ndarray) -> None:
        """Enqueue a write of a host array of the same shape and dtype into dst. The caller may
        change the array after the call, unless `host_words` made the array."""
        self.upload(dst, array)

    def host_words(self, count: int) -> np.ndarray:
        """Return I32 zeros (count,) on the host, in memory that `send` and `receive` copy without
        waiting."""
        return np.zeros(count, np.int32)

    def receive(self, array: np.ndarray, src: Tensor) -> None:
        """Enqueue a copy of a tensor to an array of the same shape and dtype that `host_words`
        made."""
        array[...] = self.download(src)

    @abstractmethod
    def download(self, src: Tensor) -> np.ndarray:
        """Return a host copy of the tensor after waiting for all work enqueued so far."""

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Make a stream the current one within the `with` block. "main" computes. "comm" runs
        collectives. "exchange" runs collectives of gradients while "comm" gathers weights. "copy"
        copies from host to device. "store" copies from device to host. "stage" copies for peers.
        "save" copies state for a checkpoint and is never captured in a graph, because the graph
        would wait for it."""
        before = self.stream_name
        self._switch(stream)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, stream: str) -> None:
        """Make a stream the current one; devices without streams run all work in the order of
        calls."""
        self.stream_name = stream

    def event(self) -> Event:
        return Event()

    def record(self, event: Event) -> None:
        """Record the event at the current end of the current stream."""
        event.of_comm = self.stream_name in ("comm", "exchange")
        self._record(event)

    def wait(self, event: Event) -> None:
        """Make the current stream wait for the event's last record; the host does not wait."""
        if not event.of_comm:
            self._wait(event)
            return
        with self.exposed():
            self._wait(event)
        event.of_comm = self.stream_name != "main"

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Within the block, the clock measures the main stream's wait for other ranks."""
        if self.clock is None or self.stream_name != "main":
            yield
            return
        clock, self.clock = self.clock, None  # nested waits must not count twice
        clock.start()
        try:
            yield
        finally:
            self.clock = clock
        clock.stop()

    def has_passed(self, event: Event) -> bool:
        """True if the work before the event's last record is done. The call returns at once, and
        any thread may call."""
        return True

    def _record(self, event: Event) -> None:  # noqa: B027 - without streams all is in order
        """Enqueue a record of the event on the current stream."""

    def _wait(self, event: Event) -> None:  # noqa: B027 - as above
        """Make the current stream wait for the event."""

    @abstractmethod
    def graph(self, key: tuple, fn: Callable[[], Any]) -> None:
        """Run fn's launches; a CUDA device captures the launches under the key, and replays the
        graph in later calls. Values that differ between calls with the same key must be in device
        memory."""

    def forget_graphs(self) -> None:
        """Forget all captured graphs because addresses in the graphs change; `graph` captures
        again."""
        return

    def replay(self, key: tuple, fn: Callable[[], Any]) -> None:
        """Run fn as `graph` does; a HostDevice also records fn's calls and repeats the recorded
        calls. Use this for short work that repeats often."""
        self.graph(key, fn)

    def rows_apart(self) -> AbstractContextManager[None]:
        """Within the `with` block, a row's bits in a product depend on no other row, and on no
        number of rows, where the device can choose that: on the CPU."""
        return nullcontext()

    def fast_products(self) -> dict[str, bool]:
        """Return, by name, the fp8 products so far that may accumulate in fewer bits, each with
        True if the product does."""
        return {}

    @contextmanager
    def capture_only(self) -> Iterator[None]:
        """Within the block, `graph` captures functions that are not yet captured, and runs nothing.
        Every kernel must have run before the capture."""
        self._capture_only = True
        try:
            yield
        finally:
            self._capture_only = False

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Within the block, `graph` runs its function and captures nothing."""
        yield

    @contextmanager
    def instead(self, **methods: Callable[..., Any]) -> Iterator[None]:
        """Within the block, call these functions instead of the device's methods. Measurements use
        this: a function gets a method's arguments, and may call the method through an earlier
        reference."""
        before = {name: vars(self)[name] for name in methods if name in vars(self)}
        vars(self).update(methods)
        try:
            yield
        finally:
            for name in methods:
                del vars(self)[name]  # deleting makes the class's method visible again
            vars(self).update(before)

    def synchronize(self) -> None:  # noqa: B027 - without streams there is nothing to wait for
        """Make the host wait for all enqueued work."""

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Name the launches in the `with` block for profilers; the call is free without a
        profiler."""
        yield

    def close(self) -> None:  # noqa: B027 - most devices hold nothing that needs closing
        """Release the device's resources of the operating system or driver."""
