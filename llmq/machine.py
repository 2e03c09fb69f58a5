"""Which machine a run gets: the CPU or GPUs, and how much memory it may use."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from llmq.config import ModelConfig
from llmq.dtypes import parse_dtype
from llmq.errors import ConfigError, LlmqError, warn
from llmq.ops.attention import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM
from llmq.ops.common import MAX_COLUMNS
from llmq.options import TrainConfig
from llmq.runtime.affinity import stay_near
from llmq.runtime.device import HOST_SPEC, Device, DeviceSpec, MemorySizes
from llmq.runtime.gpu_info import bus_id, gpu_count
from llmq.runtime.kernel import Source

MIB = 1 << 20
CHANNEL_MULTIPLE = 8  # 16-byte vectors of BF16
QK_NORM_MULTIPLE = 4  # 16-byte vectors of F32

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


def choose_machine(device: str, gpus: int) -> Machine:
    """device: "auto", "cpu" or "cuda". gpus: ranks, 0 for all GPUs there are, on the CPU for one.

    Raises LlmqError when what is asked for is not there; the message says why and what to do.
    """
    if device == "cpu":
        return Machine(kind="host", spec=HOST_SPEC, note=None, world_size=max(gpus, 1))
    from llmq.runtime import cuda_device

    try:
        first = cuda_device.device_spec(0)  # says why, if there is none
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
    from llmq.runtime.cuda_device import device_spec

    there = gpu_count()
    if gpus > there:
        raise ConfigError(
            f"--gpus: {gpus} are asked for, {there} can be seen; check CUDA_VISIBLE_DEVICES"
        )
    try:
        specs = [device_spec(index) for index in range(gpus or there)]
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


def check_sizes(model: ModelConfig, machine: Machine) -> None:
    """ConfigError for sizes that no device can compute, or only the CPU device."""
    for name in ("hidden_size", "intermediate_size"):
        size = getattr(model, name)
        if size % CHANNEL_MULTIPLE:
            raise ConfigError(
                f"the model's {name} is {size}; it must be a multiple of {CHANNEL_MULTIPLE}"
            )
    if model.hidden_size > MAX_COLUMNS:
        raise ConfigError(
            f"the model's hidden_size is {model.hidden_size}; it must be at most {MAX_COLUMNS}"
        )
    if model.qk_norm and model.head_dim % QK_NORM_MULTIPLE:
        raise ConfigError(
            f"the model's head_dim is {model.head_dim}; where queries and keys are normalized it "
            f"must be a multiple of {QK_NORM_MULTIPLE}"
        )
    on_gpu = machine.kind == "cuda"
    if on_gpu and (model.head_dim % HEAD_DIM_MULTIPLE or model.head_dim > MAX_HEAD_DIM):
        raise ConfigError(
            f"the model's head_dim is {model.head_dim}; on a GPU it must be a multiple of "
            f"{HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}: use --device cpu"
        )


def attention_backend(config: TrainConfig, model: ModelConfig, machine: Machine) -> str:
    """ "native" or "cudnn": what --attention means here.

    Where cuDNN is missing or refuses, ConfigError if it is asked for, else native and a warning.
    """
    required = config.attention == "cudnn"
    if required and machine.kind == "host":
        raise ConfigError("--attention cudnn: it needs a GPU")
    if config.attention == "native" or machine.kind == "host":
        return "native"
    from llmq.runtime import cudnn

    dtype = parse_dtype(config.model_dtype)
    reason = cudnn.unsupported(machine.spec.capability, dtype, model.head_dim)
    if reason is not None:
        if required:
            raise ConfigError(f"--attention cudnn: {reason}; {cudnn.NATIVE}")
        return "native"
    sizes = (config.batch_size, config.seq_len, model.num_heads, model.num_kv_heads, model.head_dim)
    try:
        with closing(cudnn.CudnnAttention(0)) as library:
            for parts in {1, config.attn_bwd_chunks}:  # what the plan chooses is between them
                library.check(*sizes, parts)
    except LlmqError as error:
        if required:
            raise ConfigError(f"--attention cudnn: {error}") from error
        _warn_once(f"attention runs on the native kernels: {' '.join(str(error).split())}")
        return "native"
    return "cudnn"


@functools.cache
def _warn_once(line: str) -> None:
    warn([line])


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


def host_memory() -> tuple[int, int]:
    """Bytes of host memory that are free or can be freed, and bytes in all."""
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024, _total_host_memory()
    return _total_host_memory(), _total_host_memory()  # no Linux: all of it


def _total_host_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_host_memory() -> int:
    """Bytes that this process may still take: free memory, or less under a cgroup's limit."""
    return min([host_memory()[0], *_cgroup_headrooms()])


def _cgroup_headrooms(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """What each memory limit above this process leaves; file caches count as free."""
    for line in _lines(membership):
        _, controllers, group = line.split(":", 2)
        if controllers == "":  # version 2
            root, limit, used, cache = mount, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, cache = mount / "memory", "total_inactive_file"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # Inside a container the group may be named as the host sees it, but be mounted as the root.
        inner = root / group.lstrip("/")
        for folder in (inner, *inner.parents):
            most, current = _lines(folder / limit), _lines(folder / used)
            if most and current and most[0].isdigit():
                stats = dict(s.split(maxsplit=1) for s in _lines(folder / "memory.stat"))
                yield max(int(most[0]) - int(current[0]) + int(stats.get(cache, 0)), 0)
            if folder == root:
                break


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
