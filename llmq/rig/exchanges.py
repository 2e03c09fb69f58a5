"""How fast GPUs exchange data by each operation, alone and beside kernels, and what these lose.

A backend needs a process of its own: NCCL reads its settings once.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from llmq.base.dtypes import BF16, F64, I64, MIB, U8
from llmq.base.tensor import Tensor
from llmq.comm.collectives import part, silenced
from llmq.comm.connect import connect
from llmq.comm.links import LinkTable
from llmq.comm.options import CommOptions
from llmq.ops import clock, elementwise, matmul
from llmq.rig.child import Job
from llmq.runtime.device import Device, Event, MemorySizes
from llmq.runtime.host_device import HostDevice
from llmq.runtime.machine import PLAN_SPEC
from llmq.runtime.mesh import Mesh
from llmq.runtime.plan_device import PlanDevice
from llmq.runtime.workers import RankPool, Workers

CALLS, REPLAYS = 10, 3  # in a graph, and of it
SIZES = (1, 16, 222)  # MiB of a slab: 222 is a block of Qwen2.5-7B in fp8
COPIES = {"memcpy_all_gather": True, "memcpy_send_recv": True}
BACKENDS = {
    "nccl": CommOptions(all_to_all_reduce=True),
    "nccl-off": CommOptions(all_to_all_reduce=True, p2p="off"),
    "copies": CommOptions(all_to_all_reduce=True, **COPIES),
    "staged": CommOptions(all_to_all_reduce=True, p2p="off", **COPIES),
}
# The work that runs beside exchanges: a product of square matrices, then a copy, about as a step
# has both.
PRODUCT = {"cuda": 4096, "host": 64}  # rows
COPY = {"cuda": 128 * MIB, "host": MIB}
LONGER = 2  # times as long as the exchanges, so that these have kernels beside them to their end
LOAD = "load"  # among the operations, what exchanges through host memory have beside them

Times = dict[tuple[str, int], float]
"""Seconds by operation and MiB of a slab."""


@dataclass
class Exchanges:
    """The measurements of a backend. alone: of the slowest rank. beside: of the rank that waits for
    none, while kernels run. slowdown: how many times as long these take meanwhile, at the largest
    size. load: bytes that come from host memory, seconds of that alone, and how much longer an
    exchange through host memory takes with them; None where exchanges do not go there. intact:
    whether what was gathered is what had been sent; None where that was not looked at."""

    links: LinkTable | None
    alone: Times
    beside: Times = field(default_factory=dict)
    slowdown: float | None = None
    load: tuple[int, float, float] | None = None
    intact: bool | None = None


class Load:
    """A copy from host memory beside an exchange: half of what a rank receives by that, as weights
    in fp8 are of their gradients in bf16."""

    def __init__(self, dev: Device, slab: Tensor):
        """slab: what is exchanged."""
        world = dev.mesh.size()
        self.dev, self.nbytes = dev, slab.nbytes * (world - 1) // world // 2
        self._source = dev.alloc("load.source", (self.nbytes,), U8, "Activations", place="pinned")
        self._target = dev.alloc("load.target", (self.nbytes,), U8, "Activations")

    def run(self) -> None:
        """Enqueue it, on a stream of its own."""
        with self.dev.on("copy"):
            self.dev.copy(self._target, self._source)


class Kernels:
    """Work of the main stream that exchanges have beside them, and clocks for both."""

    def __init__(self, dev: Device, kind: str):
        """kind: of the device that it is for: a plan stands for another one."""
        rows, nbytes = PRODUCT[kind], COPY[kind]
        self.dev = dev
        self.a, self.out = (
            dev.alloc(name, (rows, rows), BF16, "Activations") for name in ("a", "out")
        )
        self.copied = [dev.alloc("copied", (nbytes,), U8, "Activations") for _ in range(2)]
        self.at = [dev.alloc("at", (1,), I64, "Activations") for _ in range(2)]
        self.totals = [dev.alloc("total", (1,), F64, "Activations") for _ in range(2)]
        elementwise.normal(dev, self.a, 1.0, 0)

    def run(self, count: int) -> None:
        """Enqueue them, timed."""
        clock.start(self.dev, self.at[0])
        for _ in range(count):
            matmul.matmul(self.dev, self.out, self.a, self.a, trans_b=True)
            self.dev.copy(*self.copied)
        clock.stop(self.dev, self.totals[0], self.at[0])

    def seconds(self, run: Callable[[], None]) -> tuple[float, float]:
        """The seconds of kernels and of exchanges, added up, in what is run."""
        for total in self.totals:
            self.dev.zero(total)
        run()
        self.dev.synchronize()
        return tuple(float(self.dev.download(total)[0]) / 1e3 for total in self.totals)


class Calls:
    """So many calls on the current stream. ready: when they begin, and their data are there: as in
    a step, what is sent through host memory need not wait for the call before."""

    def __init__(self, dev: Device):
        self.dev, self.ready = dev, dev.event()

    def run(self, call: Callable[[], None], count: int) -> None:
        """Enqueue them."""
        self.dev.record(self.ready)
        for _ in range(count):
            call()


def operations(
    dev: Device, options: CommOptions, whole: Tensor, ready: Event
) -> dict[str, Callable[[Tensor], None]]:
    """The operations to measure: functions of a slab at the beginning of `whole`. ready: as Calls
    has it."""
    spare = dev.alloc("spare", (whole.size // dev.mesh.size(),), whole.dtype, "Activations")

    def all_gather(slab: Tensor) -> None:
        dev.mesh.group().all_gather(slab, part(slab, dev.mesh.rank, dev.mesh.size()))

    def all_to_all(slab: Tensor) -> None:
        dev.mesh.group().all_to_all(slab, spare.rows(0, slab.size // dev.mesh.size()), ready)

    found = {"all_gather": all_gather, "all_to_all": all_to_all}
    if options.nccl:
        found["reduce_scatter"] = dev.mesh.group().reduce_scatter
    return found


def _captured(dev: Device, key: tuple, fn: Callable[[], None]) -> Callable[[], None]:
    """A graph of it, ready to be replayed. Made without the other ranks, as Rank.warm_up does."""
    with silenced(dev), dev.without_graphs():
        fn()
        dev.synchronize()
    with dev.capture_only():
        dev.graph(key, fn)
    return lambda: dev.graph(key, fn)


def seconds(calls: Calls, workers: Workers, key: tuple, call: Callable[[], None]) -> float:
    """Time of one call on this rank, beginning together."""
    dev = calls.dev

    def several() -> None:
        with dev.on("comm"):
            calls.run(call, CALLS)

    replay = _captured(dev, key, several)
    workers.barrier()
    start = time.perf_counter()
    for _ in range(REPLAYS):
        replay()
    dev.synchronize()
    return (time.perf_counter() - start) / (CALLS * REPLAYS)


def _beside(
    calls: Calls,
    workers: Workers,
    key: tuple,
    call: Callable[[], None],
    kernels: Kernels,
    count: int,
) -> tuple[float, float]:
    """Seconds of one call on this rank beside so many kernels, and of all those kernels. A call
    before the clock starts makes ranks begin together: what one that comes late finds in its peer's
    ring would count as its speed."""
    dev = calls.dev

    def several() -> None:
        with dev.on("comm"):
            calls.run(call, 1)
            clock.start(dev, kernels.at[1])
            calls.run(call, CALLS)
            clock.stop(dev, kernels.totals[1], kernels.at[1])
        kernels.run(count)

    replay = _captured(dev, (*key, "beside"), several)
    workers.barrier()
    computing, exchanging = kernels.seconds(lambda: [replay() for _ in range(REPLAYS)])
    return exchanging / (CALLS * REPLAYS), computing / REPLAYS


def program(
    dev: Device, workers: Workers, options: CommOptions, sizes: tuple[int, ...], together: bool
) -> Exchanges:
    """All measurements of one rank. together: those beside kernels, too."""
    unit = 128 * dev.mesh.size()  # elements, as slabs are
    lengths = {mib: mib * MIB // BF16.itemsize // unit * unit for mib in sizes}
    whole = dev.alloc("slab", (max(lengths.values()),), BF16, "Activations")
    dev.zero(whole)  # sums of zeros stay finite
    kernels = Kernels(dev, dev.kind) if together else None
    found = Exchanges(links=None, alone={})
    if together:
        once = _captured(dev, ("kernels",), lambda: kernels.run(CALLS))
        once()
        one = kernels.seconds(once)[0] / CALLS
    calls = Calls(dev)
    functions = operations(dev, options, whole, calls.ready)
    for name, call in functions.items():
        for mib, length in lengths.items():
            slab = whole.rows(0, length)
            run = lambda call=call, slab=slab: call(slab)  # noqa: E731 (bound now)
            alone = found.alone[name, mib] = seconds(calls, workers, (name, mib), run)
            if together:
                count = max(1, round(LONGER * CALLS * alone / one))
                mixed = _beside(calls, workers, (name, mib), run, kernels, count)
                found.beside[name, mib] = mixed[0]
                if name == "all_gather" and mib == max(sizes):
                    lost = max(mixed[1] - count * one, 0.0)
                    exchanging = (1 + CALLS) * mixed[0]
                    found.slowdown = 1 + lost / max(exchanging - lost, lost, 1e-9)
    if together and options.p2p == "off":
        exchange = partial(functions["all_to_all"], whole)
        found.load = _with_load(calls, workers, exchange, Load(dev, whole))
    found.intact = _intact(dev, workers, whole.rows(0, min(lengths.values())))
    return found


def _with_load(
    calls: Calls, workers: Workers, exchange: Callable[[], None], load: Load
) -> tuple[int, float, float]:
    """Measure loads as Exchanges.load has them. A load that exchanges have beside them shares their
    direction of the bus, and what they take away in the other one slows it down, which a load alone
    is not."""

    def both() -> None:
        load.run()
        exchange()

    functions = {"load": load.run, "exchange": exchange, "both": both}
    took = {name: seconds(calls, workers, (LOAD, name), fn) for name, fn in functions.items()}
    return load.nbytes, took["load"], max(took["both"] - took["exchange"], 1e-9)


def _intact(dev: Device, workers: Workers, slab: Tensor) -> bool:
    """Whether each rank's part arrives at all others: it holds the number of the rank."""
    dev.zero(slab)
    own = part(slab, dev.mesh.rank, dev.mesh.size())
    elementwise.fill(dev, own, float(dev.mesh.rank + 1))
    dev.synchronize()
    workers.barrier()
    dev.mesh.group().all_gather(slab, own)
    dev.synchronize()
    found = dev.download(slab).astype(np.float32).reshape(dev.mesh.size(), -1)
    return bool((found == np.arange(1, dev.mesh.size() + 1)[:, None]).all())


def open_device(device: str, rank: int, world_size: int, sizes: MemorySizes) -> Device:
    """A rank's device; device: cuda or cpu."""
    mesh = Mesh.of(world_size, rank)
    if device == "cpu":
        return HostDevice(sizes, mesh=mesh)
    from llmq.runtime.cuda_device import CudaDevice

    return CudaDevice(rank, sizes, mesh=mesh)


def memory(
    options: CommOptions, world_size: int, mib: int, kernels: str | None = None
) -> MemorySizes:
    """The memory that a rank needs for slabs of that size. kernels: the kind of device, if they run
    beside."""
    plan = PlanDevice(PLAN_SPEC, Mesh.of(world_size))
    connect([plan], options)
    slab = plan.alloc("slab", (mib * MIB // 2,), BF16, "Activations")
    operations(plan, options, slab, plan.event())
    if kernels is not None and options.p2p == "off":
        Load(plan, slab)
    if kernels is not None:
        Kernels(plan, kernels).run(1)
    return plan.sizes()


def measured(
    device: str, world_size: int, options: CommOptions, sizes: tuple[int, ...], together: bool
) -> Exchanges:
    """Measure one backend; the slowest rank's times count. device: cuda or cpu. together: beside
    kernels, too."""
    devices: list[Device] = [None] * world_size
    kind = {"cpu": "host"}.get(device, device)
    needed = memory(options, world_size, max(sizes), kind if together else None)

    def rank_program(rank: int, workers: Workers) -> tuple[LinkTable | None, Exchanges]:
        devices[rank] = open_device(device, rank, world_size, needed)
        workers.barrier()
        links = connect(devices, options, workers) if rank == 0 else None
        workers.barrier()
        found = program(devices[rank], workers, options, sizes, together)
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
        # The time is that of the rank that comes last: the others' times have their waiting for it.
        beside={key: min(rank.beside[key] for rank in ranks) for key in ranks[0].beside},
        load=_slowest([rank.load for rank in ranks if rank.load]),
        slowdown=max((rank.slowdown for rank in ranks), default=None) if together else None,
        intact=all(rank.intact for rank in ranks),
    )


def _slowest(loads: list[tuple[int, float, float]]) -> tuple[int, float, float] | None:
    """The slowest load of ranks that load as much at once."""
    if not loads:
        return None
    nbytes, alone, beside = zip(*loads, strict=True)
    return nbytes[0], max(alone), max(beside)


def measure(job: Job, *, backend: str, gpus: int, device: str = "cuda", **_: Any) -> None:
    """The part: seconds by operation, as [received bytes, alone, beside kernels] of each size; of
    LOAD as Exchanges.load."""
    found = measured(device, gpus, BACKENDS[backend], SIZES, True)
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
    """Without the diagonal."""
    return [[x for s, x in enumerate(row) if s != r] for r, row in enumerate(table)]
