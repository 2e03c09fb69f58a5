"""Functions that run once on every rank, in threads of their own; with devices, or without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmq.comm.connect import connect
from llmq.comm.options import CommOptions
from llmq.runtime.device import MemorySizes
from llmq.runtime.host_device import HostDevice
from llmq.runtime.mesh import Mesh
from llmq.runtime.workers import RankPool, Workers

SIZES = MemorySizes(device=1 << 16, stack=1 << 12, pinned=1 << 16)


def run_ranks(world_size: int, fn: Callable[[int, Workers], Any]) -> list[Any]:
    """fn(rank, workers) once on every rank of a pool of its own; the results by rank."""
    pool = RankPool(world_size)
    try:
        return pool.run("run", lambda rank: fn(rank, pool.workers))
    finally:
        pool.close()


def run_devices(
    world_size: int,
    fn: Callable[[HostDevice, Workers], Any],
    *,
    options: CommOptions = CommOptions(),  # noqa: B008 - frozen
    shards: int | None = None,
) -> list[Any]:
    """fn(dev, workers) likewise, the small devices connected; the results by rank."""
    devices: list[HostDevice | None] = [None] * world_size

    def rank_fn(rank: int, workers: Workers) -> Any:
        dev = HostDevice(SIZES, poison=True, mesh=Mesh.of(world_size, rank, shards))
        devices[rank] = dev
        workers.barrier()
        if rank == 0:
            connect(devices, options, workers)
        workers.barrier()
        return fn(dev, workers)

    return run_ranks(world_size, rank_fn)
