"""Choose the collectives of a run's ranks by their devices and options."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from llmq.comm.collectives import SingleComm, join
from llmq.comm.links import LinkTable
from llmq.comm.options import CommOptions
from llmq.comm.plan import connect_plan
from llmq.runtime.device import Device
from llmq.runtime.processes import processes
from llmq.runtime.workers import Workers
from llmq.runtime.world import World


def connect(
    devices: Sequence[Device],
    options: CommOptions,
    workers: Workers | None = None,
    world: World | None = None,
) -> LinkTable | None:
    """Give each device's mesh its groups; returns the measured links between GPUs, or None.

    Called once, in one thread, with the devices of all ranks of the process, directly after they
    are made: it allocates. With rank threads:

        devices[rank] = open_device(rank)         # a list that the ranks share
        workers.barrier()
        if rank == 0:
            links = connect(devices, options, workers)
        workers.barrier()

    workers: of the ranks' threads; needed by more than one rank, except on the plan device. When
    they are stopped, everything that waits for a peer, on the host or on a GPU, stops waiting.
    Close the devices when the threads of all ranks have ended, or after `dev.synchronize()` and a
    barrier: until then peers may use their flags and staging buffers. A plan needs one device, of
    any rank. world: where the ranks are, if they are of several processes, which all call this.
    Raises LlmqError where GPUs cannot talk to each other as the options demand.
    """
    if devices[0].mesh.size() == 1:
        join(devices[0], partial(SingleComm, devices[0]))
        return None
    kind = devices[0].kind
    if kind == "plan":
        for dev in devices:
            connect_plan(dev, options, world or World.of(dev.mesh.size()))
        return None
    several = world is not None and world.several
    if kind == "host" and several:
        from llmq.comm.host_processes import connect_processes

        connect_processes(devices, workers, world, processes())
        return None
    if kind == "host":
        from llmq.comm.host import connect_host

        connect_host(devices, workers)
        return None
    from llmq.comm.cuda import connect_cuda

    return connect_cuda(devices, options, workers)
