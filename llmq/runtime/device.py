"""The interface of a machine, as the training step sees it.

Three devices implement the interface: CudaDevice launches kernels, HostDevice calls their NumPy
references, PlanDevice checks and counts, and moves nothing. One thread owns one device; devices
share nothing.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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

# Our kernels that compute a product and the operation behind it.
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
    """Properties of a machine that launchers and the planner need. capability: compute capability
    times 10 (90 for an H100), 0 for the CPU. num_sms: multiprocessors, which size grids and
    workspaces. memory: total bytes of the machine's memory. library_workspace: bytes of the arena
    that the matrix-product library may use; the default is NVIDIA's advice, 32 MiB on Hopper and
    later, 4 MiB before."""

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
        """The compute capability as people write it, such as 9.0."""
        return self.capability / 10

    @property
    def small_shared(self) -> bool:
        """True if a multiprocessor has 100 KiB of shared memory, as on GeForce, not 164 or more."""
        return self.capability in (86, 89, 120, 121)


HOST_SPEC = DeviceSpec(name="CPU", capability=0, num_sms=4, memory=0, library_workspace=0)


def told_to_fuse() -> frozenset[str] | None:
    """Return the fused products that LLMQ_FUSED in the environment names; None if it is not set.
    ConfigError for a name that is not in FUSED."""
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
    """Bytes of each memory that one rank needs, by name of the tier or "stack". A plan returns
    these sizes, and a device is opened with them."""

    def __init__(self, **sizes: int):
        super().__init__({name: sizes.pop(name, 0) for name in (*TIERS, "stack")})
        if sizes:
            raise TypeError(f"MemorySizes: {', '.join(sizes)} is no memory")

    @property
    def on_device(self) -> int:
        """Bytes of the device's own memory: its arena and the stack."""
        return self["device"] + self["stack"]

    @property
    def host(self) -> int:
        """Bytes of the machine's RAM beside the device."""
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
    """A point in a stream's work; on devices without streams every event has passed. of_comm: True
    if the event was last recorded on a stream of collectives, and the main stream has not waited
    for it since."""

    of_comm = False

    def synchronize(self) -> None:
        """Make the host wait for the work before the last `record`."""


class Clock(NamedTuple):
    """Functions that launch a measurement on the current stream: `stop` adds the time since `start`
    to a sum in device memory."""

    start: Callable[[], None]
    stop: Callable[[], None]


class Device(ABC):
    """Memory, launches, copies and order on one rank's machine. mesh: the rank's place among all
    ranks, and its ends of their collectives. last_operation: name of the last enqueued collective
    or replayed graph, for diagnosis. clock: measures how long the main stream waits for other
    ranks; None with one rank. stream_name: the current stream. fused: the only fused products to
    use, and wherever possible (LLMQ_FUSED); None: use whichever kernels are faster. constants: the
    tensors that `constant` made, with their content."""

    kind: str  # "cuda", "host" or "plan"
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
        """storages: a storage named "stack" and one for each of TIERS. sizes: bytes of each memory;
        None: unlimited, for a plan. mesh: the rank's mesh; None: the mesh of a single rank."""
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
        """Return a tensor that lives as long as the device, or as the surrounding block of
        `temporary`. Its content is undefined. category: name under which the bytes are counted.
        place: name of a tier."""
        if TIERS[place] is SSD and not self._opened:
            self._opened = True
            pinned = self.arenas["pinned"]
            self._open_files(pinned.take("ssd.buffers", (BUFFER_BYTES,), U8, "SSD buffers"))
        return self.arenas[place].take(name, shape, dtype, category)

    def _open_files(self, buffers: Tensor) -> None:  # noqa: B027 - a plan has none
        """Open the files of the tier "ssd". buffers: U8 (BUFFER_BYTES,)."""

    def constant(self, name: str, array: np.ndarray, dtype: DType, category: str) -> Tensor:
        """Return a tensor of this dtype and content. Only `restore` writes it again."""
        tensor = self.alloc(name, array.shape, dtype, category)
        self.upload(tensor, array)
        self.constants.append((tensor, array))
        return tensor

    def restore(self, constants: Iterable[tuple[Tensor, np.ndarray]]) -> None:
        """Write constants again, after other work has used their memory."""
        for tensor, array in constants:
            self.upload(tensor, array)

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """Free, at the end of the block, all memory that `alloc` takes within it. This is for work
        whose shapes change from call to call; a training step takes all memory beforehand."""
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
        """Yield memory in which kernels work on a tensor: the tensor's own memory, or a copy.
        reads, writes: whether the kernels read the content, and whether they write it. The copy
        goes back into the tensor if kernels write."""
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
        """Return a tensor on the stack that lives for a `with` block. Its content is undefined."""
        return self.stack.scratch(name, shape, dtype)

    def sizes(self) -> MemorySizes:
        """Return the most bytes used so far of each memory. A device of these sizes can repeat the
        work."""
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
        """Enqueue one kernel on the current stream. consts: compile-time integers (-DNAME=value).
        smem: bytes of dynamic shared memory. cost: for planner, profile and card files, which
        derive only traffic from the arguments. TypeError or ValueError if args do not fit the
        kernel's declaration."""
        types = kernel.bind(args, on_gpu=self.spec.capability > 0)
        self._launch(Launch(kernel, grid, block, args, types, consts or {}, smem, cost))

    @abstractmethod
    def _launch(self, launch: Launch) -> None: ...

    def choose(
        self, work: str, ways: dict[str, Callable[[], None]], kept: tuple[Tensor, ...] = ()
    ) -> None:
        """Enqueue a piece of work in one of several ways. A CUDA device that tunes times the ways
        at the first call and always takes the fastest; ways that raise Unsupported do not count
        (llmq/runtime/tuning.py). Other devices take the first way. work: a unique name. ways:
        functions by name; each enqueues launches on the current stream, and overwrites all that
        another way writes. kept: tensors that a way adds to, or reads and changes."""
        next(iter(ways.values()))()

    def alike(self, items: Sequence[T]) -> Iterable[T]:
        """Return the items of a loop that does the same for all but the first item. A plan runs two
        items, and counts the second one for all further items."""
        return items

    def choices(self) -> dict[str, str]:
        """Return the name of the way that `choose` has taken, for each piece of work so far."""
        return {}

    @abstractmethod
    def copy(self, dst: Tensor, src: Tensor) -> None:
        """Enqueue a copy of src's bytes to dst (same size, any places) on the current stream."""

    @abstractmethod
    def zero(self, tensor: Tensor) -> None:
        """Enqueue filling the tensor with zero bytes on the current stream."""

    @abstractmethod
    def compute(self, fn: Callable[..., None], *tensors: Tensor) -> None:
        """Enqueue fn(xp, *arrays) on the current stream, which writes in place: xp is NumPy on the
        CPU and CuPy on a GPU, arrays are xp's views of the tensors, with BF16 numbers as uint16
        bits. Arrays that fn makes lie outside of the arenas. The launches of fn must not depend on
        values of arrays or on the host's state: a graph replays them."""

    @abstractmethod
    def upload(self, dst: Tensor, array: np.ndarray) -> None:
        """Write host data of the same shape and dtype; synchronous, for set-up and tests."""

    def send(self, dst: Tensor, array: np.ndarray) -> None:
        """Enqueue a write of host data of the same shape and dtype. The caller may change the array
        after the call, unless `host_words` made the array."""
        self.upload(dst, array)

    def host_words(self, count: int) -> np.ndarray:
        """Return I32 zeros (count,) on the host, to and from which `send` and `receive` copy
        without a wait."""
        return np.zeros(count, np.int32)

    def receive(self, array: np.ndarray, src: Tensor) -> None:
        """Enqueue a copy of a tensor to an array of the same shape and dtype, made by
        `host_words`."""
        array[...] = self.download(src)

    @abstractmethod
    def download(self, src: Tensor) -> np.ndarray:
        """Return a host copy of the tensor, after all work enqueued so far; synchronous."""

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Make a stream the current one within the `with` block. "main": compute. "comm":
        collectives. "exchange": collectives of gradients, beside gathers on "comm". "copy": host to
        device. "store": device to host. "stage": copies for peers. "save": state for a checkpoint,
        never in a graph, since the graph would wait for it."""
        before = self.stream_name
        self._switch(stream)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, stream: str) -> None:
        """Make a stream the current one; devices without streams run all work in order."""
        self.stream_name = stream

    def event(self) -> Event:
        return Event()

    def record(self, event: Event) -> None:
        """Mark the current end of the current stream."""
        event.of_comm = self.stream_name in ("comm", "exchange")
        self._record(event)

    def wait(self, event: Event) -> None:
        """Make the current stream wait for the event's last record; the host goes on."""
        if not event.of_comm:
            self._wait(event)
            return
        with self.exposed():
            self._wait(event)
        event.of_comm = self.stream_name != "main"

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Mark a wait of the main stream for other ranks, which the clock measures."""
        if self.clock is None or self.stream_name != "main":
            yield
            return
        clock, self.clock = self.clock, None  # nested waits are not counted twice
        clock.start()
        try:
            yield
        finally:
            self.clock = clock
        clock.stop()

    def has_passed(self, event: Event) -> bool:
        """True if the work before the event's last record is done. Returns at once; any thread may
        call it."""
        return True

    def _record(self, event: Event) -> None:  # noqa: B027 - without streams all is in order
        """Enqueue the event's record on the current stream."""

    def _wait(self, event: Event) -> None:  # noqa: B027 - as above
        """Let the current stream wait for the event."""

    @abstractmethod
    def graph(self, key: tuple, fn: Callable[[], Any]) -> None:
        """Run fn's launches; a CUDA device captures them under the key and replays them later.
        Values that differ between calls of one key must be in device memory."""

    def forget_graphs(self) -> None:
        """Forget all captured graphs, because addresses in them change; `graph` captures again."""
        return

    def replay(self, key: tuple, fn: Callable[[], Any]) -> None:
        """Run fn as `graph` does; the CPU device also records fn and replays it. For short work
        that repeats often."""
        self.graph(key, fn)

    def fast_products(self) -> dict[str, bool]:
        """Return the fp8 products so far that may accumulate in fewer bits, by name; True if a
        product does."""
        return {}

    @contextmanager
    def capture_only(self) -> Iterator[None]:
        """Within the block, `graph` captures functions that are not captured yet, and runs nothing.
        Every kernel must have run before."""
        self._capture_only = True
        try:
            yield
        finally:
            self._capture_only = False

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Within the block, `graph` runs its function and remembers nothing."""
        yield

    @contextmanager
    def instead(self, **methods: Callable[..., Any]) -> Iterator[None]:
        """Within the block, call these functions instead of the device's methods. For measurements:
        a function gets a method's arguments and may call the method, if it kept a reference."""
        before = {name: vars(self)[name] for name in methods if name in vars(self)}
        vars(self).update(methods)
        try:
            yield
        finally:
            for name in methods:
                del vars(self)[name]  # the class's method is visible again
            vars(self).update(before)

    def synchronize(self) -> None:  # noqa: B027 - without streams there is nothing to wait for
        """Make the host wait for all enqueued work."""

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Name a span of work for profilers; free of cost without a profiler."""
        yield

    def close(self) -> None:  # noqa: B027 - most devices hold nothing that needs closing
        """Release resources of the operating system or driver."""
