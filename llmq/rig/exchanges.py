"""Speed of collectives, alone and beside kernels, and the slowdown of the kernels. Each backend
needs its own process, because NCCL reads its settings once."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from llmq.base.dtypes import BF16, F64, I64, MIB, U8, DType
from llmq.base.tensor import Tensor
from llmq.bench.child import Job
from llmq.comm.collectives import part, silenced
from llmq.comm.connect import connect
from llmq.comm.links import LinkTable
from llmq.comm.options import CommOptions
from llmq.ops.pointwise import clock, elementwise
from llmq.ops.product import matmul
from llmq.runtime.device import Device, MemorySizes
from llmq.runtime.host_device import HostDevice
from llmq.runtime.machine import PLAN_SPEC
from llmq.runtime.mesh import Mesh
from llmq.runtime.plan_device import PlanDevice
from llmq.runtime.workers import RankPool, Workers

CALLS, REPLAYS = 10, 3  # number of collectives in a CUDA graph, number of replays of the graph
SIZES = (1, 16, 222)  # MiB of a slab, the weights of a block; a block of Qwen2.5-7B in fp8 has 222
COPIES = {"memcpy_all_gather": True, "memcpy_send_recv": True}
BACKENDS = {
    "nccl": CommOptions(all_to_all_reduce=True),
    "nccl-off": CommOptions(all_to_all_reduce=True, p2p="off"),
    "copies": CommOptions(all_to_all_reduce=True, **COPIES),
    "staged": CommOptions(all_to_all_reduce=True, p2p="off", **COPIES),
}
# The kernels beside the collectives are a product of square matrices and a copy, with durations in
# about the proportion of a training step.
PRODUCT = {"cuda": 4096, "host": 64}  # rows
COPY = {"cuda": 128 * MIB, "host": MIB}
LONGER = 2  # kernel time divided by collective time, so that kernels outlast the collectives
LOAD = "load"  # name of an operation: host-to-GPU traffic beside collectives

Times = dict[tuple[str, int], float]
"""Seconds by operation and MiB of a slab."""


@dataclass
class Exchanges:
    """Measurements of a backend. alone: seconds of a call on the slowest rank. beside: seconds of a
    call beside kernels, on the rank that waits for no other rank. slowdown: duration of the kernels
    beside collectives, divided by the kernels' duration alone, at the largest size. load: (bytes
    copied from host memory, seconds of these copies alone, seconds that they add to an exchange);
    None unless collectives go through host memory. intact: True if gathered data equal the sent
    data."""

    links: LinkTable | None = None
    alone: Times = field(default_factory=dict)
    beside: Times = field(default_factory=dict)
    slowdown: float = 1.0
    load: tuple[int, float, float] | None = None
    intact: bool = True


class Kernels:
    """Kernels of the main stream that run beside collectives, and device clocks for kernels and
    collectives."""

    def __init__(self, dev: Device, kind: str):
        """kind: the kind of device, "cuda" or "host", that sets the sizes. `dev` may be a
        PlanDevice."""
        rows, nbytes = PRODUCT[kind], COPY[kind]
        self.dev = dev
        self.a, self.out = (_alloc(dev, (rows, rows)) for _ in range(2))
        self.copied = [_alloc(dev, (nbytes,), U8) for _ in range(2)]
        self.starts = [_alloc(dev, (1,), I64) for _ in range(2)]
        self.totals = [_alloc(dev, (1,), F64) for _ in range(2)]
        elementwise.normal(dev, self.a, 1.0, 0)

    def run(self, count: int) -> None:
        """Enqueue `count` rounds of a product and a copy, timed by clock 0."""
        clock.start(self.dev, self.starts[0])
        for _ in range(count):
            matmul.matmul(self.dev, self.out, self.a, self.a, trans_b=True)
            self.dev.copy(*self.copied)
        clock.stop(self.dev, self.totals[0], self.starts[0])

    def seconds(self, run: Callable[[], None]) -> tuple[float, float]:
        """Return the total seconds of kernels and of collectives in `run`, from the two clocks."""
        for total in self.totals:
            self.dev.zero(total)
        run()
        self.dev.synchronize()
        return tuple(float(self.dev.download(total)[0]) / 1e3 for total in self.totals)


def _alloc(
    dev: Device, shape: tuple[int, ...], dtype: DType = BF16, place: str = "device"
) -> Tensor:
    return dev.alloc("rig", shape, dtype, "Activations", place=place)


class Program:
    """A rank's measurements, and the memory for measuring; a run on a PlanDevice gives the memory
    sizes."""

    def __init__(self, dev: Device, options: CommOptions, mib: int, kind: str):
        """mib: size of the largest slab. kind: the kind of device that sets the sizes of
        kernels."""
        self.dev, self.world = dev, dev.mesh.size()
        self.slab = _alloc(dev, (self._length(mib),))
        self._spare = _alloc(dev, (self.slab.size // self.world,))
        # This event marks that the input of a call is complete. As in a training step, a send
        # through host memory need not wait for the previous call.
        self._ready = dev.event()
        self.kernels = Kernels(dev, kind)
        self.operations = {"all_gather": self._all_gather, "all_to_all": self._all_to_all}
        if options.nccl:
            self.operations["reduce_scatter"] = dev.mesh.group().reduce_scatter
        # The load has half of the bytes that a rank receives, as fp8 weights have half of the bytes
        # of bf16 gradients.
        size = self.slab.nbytes * (self.world - 1) // self.world // 2
        places = ("device", "pinned") if options.p2p == "off" else ()
        self._loaded = [_alloc(dev, (size,), U8, place) for place in places]

    def _length(self, mib: int) -> int:
        unit = 128 * self.world  # alignment of slabs in elements
        return mib * MIB // BF16.itemsize // unit * unit

    def _all_gather(self, slab: Tensor) -> None:
        self.dev.mesh.group().all_gather(slab, part(slab, self.dev.mesh.rank, self.world))

    def _all_to_all(self, slab: Tensor) -> None:
        spare = self._spare.rows(0, slab.size // self.world)
        self.dev.mesh.group().all_to_all(slab, spare, self._ready)

    def run(self, workers: Workers, sizes: tuple[int, ...]) -> Exchanges:
        """Measure all operations. sizes: MiB of the slabs to exchange."""
        dev, found = self.dev, Exchanges()
        dev.zero(self.slab)  # repeated sums of zeros stay finite
        once = self._captured(("kernels",), lambda: self.kernels.run(CALLS))
        once()
        one = self.kernels.seconds(once)[0] / CALLS
        for (name, call), mib in itertools.product(self.operations.items(), sizes):
            run = partial(call, self.slab.rows(0, self._length(mib)))
            alone = found.alone[name, mib] = self._alone(workers, (name, mib), run)
            count = max(1, round(LONGER * CALLS * alone / one))
            found.beside[name, mib], computing = self._beside(workers, (name, mib), run, count)
            if name == "all_gather" and mib == max(sizes):
                lost = max(computing - count * one, 0.0)
                exchanging = (1 + CALLS) * found.beside[name, mib]
                found.slowdown = 1 + lost / max(exchanging - lost, lost, 1e-9)
        if self._loaded:
            found.load = self._with_load(workers)
        found.intact = self._intact(workers, self.slab.rows(0, self._length(min(sizes))))
        return found

    def _calls(self, call: Callable[[], None], count: int) -> None:
        """Enqueue `count` calls on the current stream."""
        self.dev.record(self._ready)
        for _ in range(count):
            call()

    def _captured(self, key: tuple, fn: Callable[[], None]) -> Callable[[], None]:
        """Capture `fn` as a CUDA graph and return a function that replays the graph. The first run
        is silent, without the other ranks, as in Rank.warm_up."""
        dev = self.dev
        with silenced(dev), dev.without_graphs():
            fn()
            dev.synchronize()
        with dev.capture_only():
            dev.graph(key, fn)
        return lambda: dev.graph(key, fn)

    def _alone(self, workers: Workers, key: tuple, call: Callable[[], None]) -> float:
        """Return the seconds of a call on this rank; all ranks begin together."""

        def several() -> None:
            with self.dev.on("comm"):
                self._calls(call, CALLS)

        replay = self._captured(key, several)
        workers.barrier()
        start = time.perf_counter()
        for _ in range(REPLAYS):
            replay()
        self.dev.synchronize()
        return (time.perf_counter() - start) / (CALLS * REPLAYS)

    def _beside(
        self, workers: Workers, key: tuple, call: Callable[[], None], count: int
    ) -> tuple[float, float]:
        """Return the seconds of a call on this rank beside `count` kernels, and the seconds of all
        these kernels. A first call before the clock starts aligns the ranks. Without this call,
        data that wait in a late rank's buffer would look like speed."""
        dev, kernels = self.dev, self.kernels

        def several() -> None:
            with dev.on("comm"):
                self._calls(call, 1)
                clock.start(dev, kernels.starts[1])
                self._calls(call, CALLS)
                clock.stop(dev, kernels.totals[1], kernels.starts[1])
            kernels.run(count)

        replay = self._captured((*key, "beside"), several)
        workers.barrier()
        computing, exchanging = kernels.seconds(lambda: [replay() for _ in range(REPLAYS)])
        return exchanging / (CALLS * REPLAYS), computing / REPLAYS

    def _with_load(self, workers: Workers) -> tuple[int, float, float]:
        """Measure Exchanges.load. The copies and the collective share a direction of the bus, and
        the collective's traffic in the other direction slows the copies down. The cost of the
        copies is therefore the time of copies and collective together, less the time of the
        collective alone."""
        exchange = partial(self._all_to_all, self.slab)

        def load() -> None:
            with self.dev.on("copy"):
                self.dev.copy(*self._loaded)

        def both() -> None:
            load()
            exchange()

        calls = {"load": load, "exchange": exchange, "both": both}
        took = {name: self._alone(workers, (LOAD, name), fn) for name, fn in calls.items()}
        return self._loaded[0].nbytes, took["load"], max(took["both"] - took["exchange"], 1e-9)

    def _intact(self, workers: Workers, slab: Tensor) -> bool:
        """Return True if each rank's part of the slab, filled with rank + 1, arrives at all other
        ranks."""
        dev = self.dev
        dev.zero(slab)
        elementwise.fill(dev, part(slab, dev.mesh.rank, self.world), float(dev.mesh.rank + 1))
        dev.synchronize()
        workers.barrier()
        self._all_gather(slab)
        dev.synchronize()
        found = dev.download(slab).astype(np.float32).reshape(self.world, -1)
        return bool((found == np.arange(1, self.world + 1)[:, None]).all())


def open_device(device: str, rank: int, world_size: int, sizes: MemorySizes) -> Device:
    """Open a rank's device. device: "cuda" or "cpu"."""
    mesh = Mesh.of(world_size, rank)
    if device == "cpu":
        return HostDevice(sizes, mesh=mesh)
    from llmq.runtime.cuda_device import CudaDevice

    return CudaDevice(rank, sizes, mesh=mesh)


def measured(
    device: str, world_size: int, options: CommOptions, sizes: tuple[int, ...]
) -> Exchanges:
    """Measure a backend on all ranks; the slowest rank's times count. device: "cuda" or "cpu"."""
    devices: list[Device] = [None] * world_size
    kind = {"cpu": "host"}.get(device, device)
    plan = PlanDevice(PLAN_SPEC, Mesh.of(world_size))
    connect([plan], options)
    planned = Program(plan, options, max(sizes), kind)
    planned.kernels.run(1)

    def rank_program(rank: int, workers: Workers) -> tuple[LinkTable | None, Exchanges]:
        devices[rank] = open_device(device, rank, world_size, plan.sizes())
        workers.barrier()
        links = connect(devices, options, workers) if rank == 0 else None
        workers.barrier()
        found = Program(devices[rank], options, max(sizes), kind).run(workers, sizes)
        workers.barrier()
        return links, found

    pool = RankPool(world_size)
    try:
        results = pool.run("measure", lambda rank: rank_program(rank, pool.workers))
    finally:
        pool.close()
        for dev in filter(None, devices):
            dev.close()
    ranks = [found for _, found in results]
    return Exchanges(
        links=results[0][0],
        alone={key: max(rank.alone[key] for rank in ranks) for key in ranks[0].alone},
        # The last rank's time counts, because the other ranks' times include waiting for the last
        # rank.
        beside={key: min(rank.beside[key] for rank in ranks) for key in ranks[0].beside},
        load=_slowest([rank.load for rank in ranks if rank.load]),
        slowdown=max(rank.slowdown for rank in ranks),
        intact=all(rank.intact for rank in ranks),
    )


def _slowest(loads: list[tuple[int, float, float]]) -> tuple[int, float, float] | None:
    """Return Exchanges.load with the times of the slowest rank; None without loads. All ranks load
    the same number of bytes at once."""
    if not loads:
        return None
    nbytes, alone, beside = zip(*loads, strict=True)
    return nbytes[0], max(alone), max(beside)


def measure(job: Job, *, backend: str, gpus: int, device: str = "cuda", **_: Any) -> None:
    """Measure collectives, the part `exchanges` of `llmq rig`. The result has, for each operation,
    a point for each size: [received bytes, seconds alone, seconds beside kernels]; for LOAD the
    three numbers of Exchanges.load."""
    found = measured(device, gpus, BACKENDS[backend], SIZES)
    points: dict[str, list[list[float]]] = {}
    for name, mib in found.alone:
        received = mib * MIB * (gpus - 1) // gpus
        times = [found.alone[name, mib], found.beside[name, mib]]
        points.setdefault(name, []).append([received, *times])
    if found.load is not None:
        points[LOAD] = [list(found.load)]
    beside_bus = found.links is not None and all(map(all, _pairs(found.links.beside_bus)))
    result = {"operations": points, "slowdown": found.slowdown, "intact": found.intact}
    job.note(result | {"beside_bus": beside_bus})


def _pairs(table: list[list[bool]]) -> list[list[bool]]:
    """Return the table without its diagonal."""
    return [[x for s, x in enumerate(row) if s != r] for r, row in enumerate(table)]
