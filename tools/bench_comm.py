"""How fast data travel between the GPUs, per operation, backend and size.

    python tools/bench_comm.py [--gpus 4] [--sizes 1,16,64,256] [--backend staged]

Backends: nccl and copies with peer access where it works, nccl-off and staged without any. A size
is that of a whole slab in MiB, of which every rank holds a part; 222 is a block of Qwen2.5-7B in
fp8, 444 in bf16. GB/s are 10^9 bytes that each GPU receives per second of the slowest rank, in
replayed graphs of several calls. Each backend runs in a process of its own, because NCCL reads its
settings once.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from llmq.base.dtypes import BF16
from llmq.base.tensor import Tensor
from llmq.comm.collectives import part, silenced
from llmq.comm.connect import connect
from llmq.comm.links import LinkTable
from llmq.comm.options import CommOptions
from llmq.runtime.device import Device, MemorySizes
from llmq.runtime.host_device import HostDevice
from llmq.runtime.machine import PLAN_SPEC
from llmq.runtime.plan_device import PlanDevice
from llmq.runtime.workers import RankPool, Workers

MIB = 1 << 20
CALLS, REPLAYS = 10, 5  # in a graph, and of it
COPIES = {"memcpy_all_gather": True, "memcpy_send_recv": True}
BACKENDS = {
    "nccl": CommOptions(all_to_all_reduce=True),
    "nccl-off": CommOptions(all_to_all_reduce=True, p2p="off"),
    "copies": CommOptions(all_to_all_reduce=True, **COPIES),
    "staged": CommOptions(all_to_all_reduce=True, p2p="off", **COPIES),
}


def calls(dev: Device, options: CommOptions, whole: Tensor) -> dict[str, Callable[[Tensor], None]]:
    """What is measured: functions of a slab at the beginning of `whole`."""
    spare = dev.alloc("spare", (whole.size // dev.world_size,), whole.dtype, "Activations")

    def all_gather(slab: Tensor) -> None:
        dev.comm.all_gather(slab, part(slab, dev.rank, dev.world_size))

    def all_to_all(slab: Tensor) -> None:
        dev.comm.all_to_all(slab, spare.rows(0, slab.size // dev.world_size))

    measured = {"all_gather": all_gather, "all_to_all": all_to_all}
    if options.nccl:
        measured["reduce_scatter"] = dev.comm.reduce_scatter
    return measured


def seconds(dev: Device, workers: Workers, key: tuple, call: Callable[[], None]) -> float:
    """Time of one call on this rank, beginning together."""

    def several() -> None:
        with dev.on("comm"):
            for _ in range(CALLS):
                call()

    with silenced(dev), dev.without_graphs():  # as llmq.train.rank.Rank.warm_up does it
        several()
        dev.synchronize()
    with dev.capture_only():
        dev.graph(key, several)
    workers.barrier()
    start = time.perf_counter()
    for _ in range(REPLAYS):
        dev.graph(key, several)
    dev.synchronize()
    return (time.perf_counter() - start) / (CALLS * REPLAYS)


def program(
    dev: Device, workers: Workers, options: CommOptions, sizes: list[int]
) -> dict[tuple[str, int], float]:
    """Seconds by operation and slab size in MiB, on one rank."""
    unit = 128 * dev.world_size  # elements, as slabs are
    lengths = {mib: mib * MIB // BF16.itemsize // unit * unit for mib in sizes}
    whole = dev.alloc("slab", (max(lengths.values()),), BF16, "Activations")
    dev.zero(whole)  # sums of zeros stay finite
    times = {}
    for name, call in calls(dev, options, whole).items():
        for mib, length in lengths.items():
            slab = whole.rows(0, length)
            key = (name, mib)
            times[key] = seconds(dev, workers, key, lambda call=call, slab=slab: call(slab))
    return times


def open_device(device: str, rank: int, world_size: int, sizes: MemorySizes) -> Device:
    """A rank's device."""
    if device == "cpu":
        return HostDevice(sizes, rank=rank, world_size=world_size)
    from llmq.runtime.cuda_device import CudaDevice

    return CudaDevice(rank, sizes, rank=rank, world_size=world_size)


def memory(options: CommOptions, world_size: int, mib: int) -> MemorySizes:
    """What a rank needs for slabs of that size."""
    plan = PlanDevice(PLAN_SPEC, world_size=world_size)
    connect([plan], options)
    calls(plan, options, plan.alloc("slab", (mib * MIB // 2,), BF16, "Activations"))
    return plan.sizes()


def measure(device: str, world_size: int, options: CommOptions, sizes: list[int]) -> Iterator[str]:
    """The lines for one backend: the links, then the times."""
    devices: list[Device] = [None] * world_size
    needed = memory(options, world_size, max(sizes))

    def rank_program(
        rank: int, workers: Workers
    ) -> tuple[LinkTable | None, dict[tuple[str, int], float]]:
        devices[rank] = open_device(device, rank, world_size, needed)
        workers.barrier()
        links = connect(devices, options, workers) if rank == 0 else None
        workers.barrier()
        times = program(devices[rank], workers, options, sizes)
        workers.barrier()
        return links, times

    pool = RankPool(world_size)
    try:
        results = pool.run("measure", lambda rank: rank_program(rank, pool.workers))
    finally:
        pool.close()
        for dev in filter(None, devices):
            dev.close()
    if results[0][0] is not None:
        yield from results[0][0].lines()
    for name, mib in results[0][1]:
        slowest = max(times[name, mib] for _, times in results)
        received = mib * MIB * (world_size - 1) / world_size
        rate = received / slowest / 1e9
        yield f"{name:<16}{mib:>6} {1e6 * slowest:10.1f} us {rate:9.1f} GB/s"


def main(
    gpus: Annotated[int, typer.Option(min=2)] = 2,
    sizes: Annotated[str, typer.Option(help="Slabs in MiB, with commas.")] = "1,16,64,222",
    backend: Annotated[str, typer.Option(help="One of them, or all.")] = "all",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
) -> None:
    """Time collectives between GPUs."""
    if backend != "all":
        if backend not in BACKENDS:
            raise typer.BadParameter(f"--backend: {backend}, use one of {', '.join(BACKENDS)}")
        numbers = [int(size) for size in sizes.split(",")]
        for line in measure(device, gpus, BACKENDS[backend], numbers):
            print(line, flush=True)
        return
    for name in BACKENDS:
        print(f"-- {name}, {gpus} ranks", flush=True)
        options = f"--gpus={gpus} --sizes={sizes} --device={device} --backend={name}"
        subprocess.run([sys.executable, __file__, *options.split()], check=False)


if __name__ == "__main__":
    typer.run(main)
