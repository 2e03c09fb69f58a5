"""The machine of a run is its CPU or GPUs, with the memory that the run may use."""

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmq.base.dtypes import MIB
from llmq.base.errors import ConfigError, LlmqError
from llmq.base.stopwatch import START
from llmq.runtime.device import HOST_SPEC, Device, DeviceSpec, MemorySizes
from llmq.runtime.gpu_info import bus_id, gpu_count
from llmq.runtime.host_device import HostDevice
from llmq.runtime.host_usage import available_host_memory
from llmq.runtime.kernel import KernelSource
from llmq.runtime.mesh import Mesh
from llmq.runtime.world import World

# PLAN_SPEC is the device that `llmq plan` assumes by default. It has the largest matrix-product
# workspace and at least as many multiprocessors as any real card (an RTX PRO 6000 has 188), which
# makes most workspaces largest. (Workspaces of adapters' gradients may be larger on a small card.)
# PLAN_SPEC's compute capability is not Hopper's, because Hopper's fused products need less scratch
# memory than two kernels on other cards. The fused product that needs more is planned for PLAN_SPEC
# too (`ops/product/matmul_fused.py`).
PLAN_SPEC = DeviceSpec(
    name="any GPU", capability=100, num_sms=192, memory=0, library_workspace=32 * MIB
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The kind of device that was chosen, and the number of devices. kind: the word "host" or
    "cuda". spec: the properties of each device; if GPUs differ, a spec that fits all. note: a line
    that explains the choice to the user, or None. world: all processes and their ranks; each rank
    has one device. indices: numbers of this process's GPUs by rank; empty means GPUs 0, 1, and so
    on. specs: the properties of each device of this process."""

    kind: str
    spec: DeviceSpec
    note: str | None
    world: World = field(default_factory=World)
    indices: tuple[int, ...] = ()
    specs: tuple[DeviceSpec, ...] = ()

    @property
    def world_size(self) -> int:
        return self.world.size

    def index(self, rank: int) -> int:
        """Return the number of a rank's GPU among the GPUs that this process sees."""
        place = rank - self.world.base
        return self.indices[place] if self.indices else place

    def compile_ahead(self, sources: Iterable[KernelSource]) -> None:
        """Start to compile kernels that will be launched later; on the CPU nothing is compiled."""
        if self.kind == "cuda":
            from llmq.runtime import cuda_api
            from llmq.runtime.compile import compile_ahead

            compile_ahead(sources, cuda_api.compute_capability(self.index(self.world.base)))

    def open(
        self,
        sizes: MemorySizes,
        *,
        mesh: Mesh | None = None,
        graphs: bool = True,
        tune: bool = True,
        folders: Sequence[Path] = (),
    ) -> Device:
        """Return the device of a rank of this process, with the memory sizes of a plan; LlmqError
        if the device has too little memory. Call this in the thread that will use the device; with
        several ranks the call also moves the thread to the CPUs near its GPU. mesh: the rank's
        mesh; None: the first rank's mesh, with a shard for each rank. graphs, tune: values of
        --use-cuda-graphs and --tune, which the CPU ignores. folders: directories given by
        --offload-dir."""
        mesh = mesh or Mesh.of(self.world_size)
        if self.kind == "host":
            _check_host_memory(sizes, self.world.ranks_here)
            return HostDevice(sizes, mesh=mesh, folders=folders)
        from llmq.runtime.cuda_device import CudaDevice

        index = self.index(mesh.rank)
        if self.world_size > 1:
            stay_near(bus_id(index))
        # Different GPUs use the same grids, because the planned workspaces depend on the grids.
        return CudaDevice(
            *(index, sizes),
            graphs=graphs,
            tune=tune,
            num_sms=self.spec.num_sms,
            mesh=mesh,
            folders=folders,
        )


def open_apart(machine: Machine, index: int, sizes: MemorySizes) -> Device:
    """Return device `index` of a machine, opened like `Machine.open` but as the only rank and
    without tuning. Devices opened in this way work side by side and exchange nothing."""
    if machine.kind == "host":
        _check_host_memory(sizes, 1)
        return HostDevice(sizes)
    from llmq.runtime.cuda_device import CudaDevice

    if machine.world_size > 1:
        stay_near(bus_id(index))
    return CudaDevice(index, sizes, tune=False)


@START.part("opening the driver")
def choose_machine(device: str, gpus: int, world: World = World()) -> Machine:
    """Return the devices of this process, and the world with a rank for each device. device:
    "auto", "cpu" or "cuda". gpus: number of this process's ranks; 0: a rank for each GPU, or a
    single rank on the CPU. world: the processes of the run, all of which call this function. Raises
    LlmqError if the devices are missing; the message says why and what to do."""

    def look() -> tuple[str, int, str | None, list[str]]:
        kind, note = _kind_of(device)
        count = gpu_count() if kind == "cuda" else 0
        ids = [bus_id(i) if world.several else str(i) for i in range(count)]
        return kind, gpus, note, ids

    looks = world.together(look)
    kind, _, note, _ = looks[world.index]
    for index, (other, *_) in enumerate(looks):
        if other != looks[0][0]:
            names = [world.process_name(i) for i in (0, index)]
            raise ConfigError(
                f"--device {device}: {names[0]} runs on {looks[0][0]}, {names[1]} on {other}: "
                "give --device cuda or cpu"
            )
    if kind == "host":
        counts = tuple(max(asked, 1) for _, asked, _, _ in looks)
        whole = replace(world, counts=counts)
        specs = (HOST_SPEC,) * counts[world.index]
        return Machine(kind=kind, spec=HOST_SPEC, note=note, world=whole, specs=specs)
    divided = divide_gpus(world.machines, [(asked, ids) for _, asked, _, ids in looks])
    indices = divided[world.index]
    of_processes = world.together(lambda: _specs(indices))
    specs = [spec for of_one in of_processes for spec in of_one]
    return Machine(
        kind=kind,
        spec=common_spec(specs),
        note=difference([spec.name for spec in specs]),
        world=replace(world, counts=tuple(map(len, divided))),
        indices=indices,
        specs=tuple(of_processes[world.index]),
    )


def _kind_of(device: str) -> tuple[str, str | None]:
    """Return "host" or "cuda", and a note that explains the choice, or None."""
    if device == "cpu":
        return "host", None
    from llmq.runtime import cuda_api

    try:
        cuda_api.device_spec(0)  # device_spec raises an error with the reason if there is no GPU
        return "cuda", None
    except LlmqError as error:
        if device != "auto":
            raise
        return "host", f"Running on the CPU, meant for small models ({error})."


def _specs(indices: Iterable[int]) -> list[DeviceSpec]:
    """Return the specs of the GPUs with these numbers, as this process sees them."""
    from llmq.runtime import cuda_api

    try:
        return [cuda_api.device_spec(index) for index in indices]
    except LlmqError as error:
        raise LlmqError(
            f"{error}; to leave this GPU out use --gpus or CUDA_VISIBLE_DEVICES"
        ) from error


def difference(names: list[str]) -> str | None:
    """Return a warning if the GPUs' names differ; else None."""
    if len(set(names)) == 1:
        return None
    all_ = ", ".join(names)
    return f"WARNING: the GPUs differ ({all_}): without --share each waits for the slowest."


def divide_gpus(
    machines: Sequence[str], wishes: Sequence[tuple[int, list[str]]]
) -> list[tuple[int, ...]]:
    """Return, for each process, the numbers of the GPUs that the process takes among the GPUs that
    it sees. machines: name of the machine of each process. wishes: for each process, the value of
    --gpus and the bus ids of the GPUs that it sees. A process takes those GPUs of its machine that
    no earlier process has taken. With --gpus 0, processes that see the same GPUs share them
    equally. Raises ConfigError if there are too few GPUs."""
    taken: set[tuple[str, str]] = set()
    divided = []
    for index, (machine, (asked, ids)) in enumerate(zip(machines, wishes, strict=True)):
        alike = sum(m == machine and w[1] == ids for m, w in zip(machines, wishes, strict=True))
        count = asked or len(ids) // alike
        free = [number for number, place in enumerate(ids) if (machine, place) not in taken]
        if len(machines) == 1 and asked > len(ids):
            raise ConfigError(
                f"--gpus: {asked} are asked for, {len(ids)} can be seen; check CUDA_VISIBLE_DEVICES"
            )
        if count == 0 or len(free) < count:
            raise ConfigError(
                f"--gpus: process {index} on machine '{machine}' needs {max(count, 1)} GPUs, and "
                f"of the {len(ids)} that it sees {len(ids) - len(free)} belong to processes before "
                "it: start fewer processes, or give a smaller --gpus"
            )
        divided.append(tuple(free[:count]))
        taken.update((machine, ids[number]) for number in free[:count])
    return divided


def common_spec(specs: list[DeviceSpec]) -> DeviceSpec:
    """Return a spec with the features that all these GPUs have, and with workspaces large enough
    for each GPU."""
    return DeviceSpec(
        name=specs[0].name,
        capability=min(spec.capability for spec in specs),
        num_sms=max(spec.num_sms for spec in specs),
        memory=min(spec.memory for spec in specs),
        library_workspace=max(spec.library_workspace for spec in specs),
    )


def _check_host_memory(sizes: MemorySizes, ranks_here: int) -> None:
    """Raise LlmqError if the host has too little memory. ranks_here: number of ranks on this
    machine, which all need equal memory."""
    needed = (sizes.on_device + sizes.host) * ranks_here
    available = available_host_memory()
    if needed > available:  # the system would kill the process later
        raise LlmqError(
            f"out of memory: {-(-needed // MIB)} MiB are needed, {available // MIB} MiB of host "
            "memory are available: close other programs, or use a smaller model"
        )


DEVICES = Path("/sys/bus/pci/devices")


def parse_cpus(text: str) -> set[int]:
    """Return the CPUs in a list of the Linux kernel's format, such as 0-3,8,10-11."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def use_all_cpus(environment: Mapping[str, str] = os.environ) -> None:
    """Let this process, if Open MPI's mpirun has started it, and its children run on all CPUs. By
    default mpirun binds a process to a single core, which all ranks' threads and data readers would
    share. A limit that the system itself sets remains."""
    if "OMPI_COMM_WORLD_SIZE" in environment:
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))


def stay_near(bus_id: str, devices: Path = DEVICES) -> None:
    """Let the calling thread, and all threads that it starts, run only on the CPUs nearest to a
    GPU. bus_id: the GPU's PCI address, such as 0000:19:00.0. Only speed depends on this call.
    Nothing changes if the system does not name these CPUs, or lets this process use none of
    them."""
    # only Linux has sched_setaffinity
    with contextlib.suppress(OSError, ValueError, AttributeError):
        near = parse_cpus((devices / bus_id.lower() / "local_cpulist").read_text())
        ours = near & os.sched_getaffinity(0)
        if ours:
            os.sched_setaffinity(0, ours)
