"""Which machine a run gets: the CPU or GPUs, and how much memory it may use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmq.base.dtypes import MIB
from llmq.base.errors import ConfigError, LlmqError
from llmq.runtime.affinity import stay_near
from llmq.runtime.device import HOST_SPEC, Device, DeviceSpec, MemorySizes
from llmq.runtime.gpu_info import bus_id, gpu_count
from llmq.runtime.host_memory import available_host_memory
from llmq.runtime.kernel import Source

# A card that `llmq plan` assumes where none is named: enough multiprocessors that no real card
# needs larger workspaces (an RTX PRO 6000 has 188), and the largest workspace for the library.
PLAN_SPEC = DeviceSpec(
    name="any GPU", capability=90, num_sms=192, memory=0, library_workspace=32 * MIB
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A chosen kind of device, and how many of them.

    kind: "host" or "cuda". spec: of every device; where GPUs differ, what fits all of them. note:
    one line for the user on what was chosen, or None. world_size: ranks, one device each.
    """

    kind: str
    spec: DeviceSpec
    note: str | None
    world_size: int = 1

    def compile_ahead(self, sources: Iterable[Source]) -> None:
        """Start to compile kernels that will be launched; on the CPU there is nothing to do."""
        if self.kind == "cuda":
            from llmq.runtime.compile import compile_ahead

            compile_ahead(sources, self.spec.capability)

    def open(
        self, sizes: MemorySizes, *, rank: int = 0, graphs: bool = True, tune: bool = True
    ) -> Device:
        """The device of a rank with the sizes of a plan; LlmqError if it has too little memory.

        Must be called in the thread that will use it. With several ranks the thread moves to the
        CPUs near its GPU. graphs, tune: --use-cuda-graphs and --tune, which mean nothing on the
        CPU.
        """
        ranks = {"rank": rank, "world_size": self.world_size}
        if self.kind == "host":
            return _open_host(sizes, **ranks)
        from llmq.runtime.cuda_device import CudaDevice

        if self.world_size > 1:
            stay_near(bus_id(rank))
        return CudaDevice(rank, sizes, graphs=graphs, tune=tune, **ranks)


def open_apart(machine: Machine, index: int, sizes: MemorySizes) -> Device:
    """The index-th device of a machine as the only rank of its own; nothing is tuned.

    For work that devices do beside each other without exchanging anything. As Machine.open.
    """
    if machine.kind == "host":
        return _open_host(sizes, rank=0, world_size=1)
    from llmq.runtime.cuda_device import CudaDevice

    if machine.world_size > 1:
        stay_near(bus_id(index))
    return CudaDevice(index, sizes, tune=False)


def choose_machine(device: str, gpus: int) -> Machine:
    """device: "auto", "cpu" or "cuda". gpus: ranks, 0 for all GPUs there are, on the CPU for one.

    Raises LlmqError when what is asked for is not there; the message says why and what to do.
    """
    if device == "cpu":
        return Machine(kind="host", spec=HOST_SPEC, note=None, world_size=max(gpus, 1))
    from llmq.runtime import cuda_api

    try:
        first = cuda_api.device_spec(0)  # says why, if there is none
    except LlmqError as error:
        if device != "auto":
            raise
        note = f"Running on the CPU, meant for small models ({error})."
        return Machine(kind="host", spec=HOST_SPEC, note=note, world_size=max(gpus, 1))
    if gpus == 1:
        return Machine(kind="cuda", spec=first, note=None)
    return _choose_gpus(gpus)


def _choose_gpus(gpus: int) -> Machine:
    """The first `gpus` GPUs, or all of them."""
    from llmq.runtime import cuda_api

    there = gpu_count()
    if gpus > there:
        raise ConfigError(
            f"--gpus: {gpus} are asked for, {there} can be seen; check CUDA_VISIBLE_DEVICES"
        )
    try:
        specs = [cuda_api.device_spec(index) for index in range(gpus or there)]
    except LlmqError as error:
        raise LlmqError(
            f"{error}; to leave this GPU out use --gpus or CUDA_VISIBLE_DEVICES"
        ) from error
    names, note = [spec.name for spec in specs], None
    if len(set(names)) > 1:
        note = f"WARNING: the GPUs differ ({', '.join(names)}): each waits for the slowest."
    return Machine(kind="cuda", spec=common_spec(specs), note=note, world_size=len(specs))


def common_spec(specs: list[DeviceSpec]) -> DeviceSpec:
    """What all of these GPUs can do, with workspaces that are large enough for each of them."""
    return DeviceSpec(
        name=specs[0].name,
        capability=min(spec.capability for spec in specs),
        num_sms=max(spec.num_sms for spec in specs),
        memory=min(spec.memory for spec in specs),
        library_workspace=max(spec.library_workspace for spec in specs),
    )


def _open_host(sizes: MemorySizes, rank: int, world_size: int) -> Device:
    from llmq.runtime.host_device import HostDevice

    needed = (sizes.device + sizes.stack + sizes.host) * world_size
    available = available_host_memory()
    if needed > available:  # the system would promise more than it has, and kill us later
        raise LlmqError(
            f"out of memory: {-(-needed // MIB)} MiB are needed, {available // MIB} MiB of host "
            "memory are available: close other programs, or use a smaller model"
        )
    return HostDevice(sizes, rank=rank, world_size=world_size)
