"""Choose the collectives of a run's ranks by their devices and options.

The collectives of plans are here, too; in a plan, collectives move no data and count bytes.
"""

from collections.abc import Sequence
from functools import partial

from llmq.base.tensor import Tensor
from llmq.comm.collectives import Comm, SingleComm, join, part, same_memory
from llmq.comm.links import LinkTable
from llmq.comm.options import CommOptions, allocate
from llmq.runtime.device import HOST_SPEC, Device, Event
from llmq.runtime.plan_device import PlanDevice
from llmq.runtime.workers import Workers
from llmq.runtime.world import World


def connect_plan(dev: PlanDevice, options: CommOptions, world: World) -> None:
    """Give the device of a plan its collectives, as one rank of the world; all machines have
    equally many ranks."""
    if dev.spec != HOST_SPEC:
        allocate(dev, options)
    machines = world.num_machines if dev.mesh.size("replica") == 1 else 1
    ends = {
        "shard": partial(PlanComm, dev, options, "shard", machines),
        "replica": partial(CrossPlanComm, dev),
        "context": partial(PlanComm, dev, options, "context"),
    }
    join(dev, lambda axis: ends[axis]())


class PlanComm(Comm):
    """Collectives of a plan along "shard", which count bytes. For each byte received, the device
    writes one byte and reads one byte."""

    _dev: PlanDevice

    def __init__(self, dev: PlanDevice, options: CommOptions, axis: str, machines: int = 1):
        """machines: number of machines over which the group is spread."""
        super().__init__(dev, axis)
        self._options, self._machines = options, machines
        self.exchange_stream = options.exchange_stream

    def _others(self, buffer: Tensor) -> int:
        """Return the bytes of all parts of buffer but this rank's part."""
        return buffer.nbytes // self.size * (self.size - 1)

    def _all_gather(self, dst: Tensor, src: Tensor, mirror: Tensor | None) -> None:
        received = dst.nbytes - src.nbytes
        loaded = src.nbytes if src.on_host else 0
        copied = 0 if same_memory(part(dst, self.rank, self.size), src) else src.nbytes
        copies = self._options.memcpy_all_gather
        sizes = {"loaded": loaded, "network": self._ring(received)}
        if copies and (src.on_host or mirror is not None):
            sizes["shared"] = received
        else:  # one staged copy serves all other ranks, where NCCL sends from rank to rank
            sizes |= {"received": received, "sent": src.nbytes if copies else received}
        self._dev.collective("all_gather", 2 * (received + copied) - loaded, **sizes)

    def _ring(self, received: int) -> int:
        """Return the bytes that each machine receives from the machine before in a ring of all
        GPUs, which are as many as one GPU receives; 0 with one machine."""
        return received if self._machines > 1 else 0

    def _reduce_scatter(self, buffer: Tensor) -> None:
        received = self._others(buffer)
        self._exchange("reduce_scatter", received, self._ring(received))

    def _all_reduce(self, buffer: Tensor) -> None:
        raise AssertionError("all_reduce is for the groups across replicas")

    def _all_to_all(
        self, buffer: Tensor, targets: list[Tensor], written: Event | None, out: Tensor | None
    ) -> None:
        ranks_here = self.size // self._machines
        from_others = buffer.nbytes // self.size * (self.size - ranks_here)
        self._exchange("all_to_all", self._others(buffer), ranks_here * from_others)

    def _exchange(self, kind: str, received: int, network: int) -> None:
        """Count an exchange in which every rank sends as many bytes as it receives."""
        sizes = {"received": received, "sent": received, "network": network}
        self._dev.collective(kind, 2 * received, **sizes)


class CrossPlanComm(Comm):
    """Collectives of a plan across machines, which count the network bytes of all ranks of a
    machine together."""

    _dev: PlanDevice

    def __init__(self, dev: PlanDevice):
        super().__init__(dev, "replica")

    def _count(self, kind: str, received: int) -> None:
        network = received * self._dev.mesh.size("shard")
        self._dev.collective(kind, 2 * received, network=network)

    def _all_gather(self, dst: Tensor, src: Tensor, mirror: Tensor | None) -> None:
        self._count("all_gather", dst.nbytes - src.nbytes)

    def _all_reduce(self, buffer: Tensor) -> None:
        self._count("all_reduce", 2 * (buffer.nbytes * (self.size - 1) // self.size))

    def _nothing(self, *_: object) -> None:
        raise AssertionError("across replicas there is all_gather and all_reduce")

    _reduce_scatter = _all_to_all = _nothing


def connect(
    devices: Sequence[Device],
    options: CommOptions,
    workers: Workers | None = None,
    world: World | None = None,
) -> LinkTable | None:
    """Give each device's mesh its groups; return the measured links between GPUs, or None.

    Call this function once, in one thread, with the devices of all ranks of the process. The call
    comes directly after the devices' construction, because it allocates. The ranks' threads meet at
    a barrier before and after.

    workers: the state that the ranks' threads share; None is allowed for one rank and in a plan.
    When workers are stopped, every wait for a peer ends, on the host and on GPUs. Close the devices
    when all ranks' threads have ended, or after `dev.synchronize()` and a barrier; before, peers
    may still use the devices' flags and staging buffers. A plan needs the device of one rank only.
    world: the processes of the run, which all call this function; None for one process. Raises
    LlmqError if GPUs cannot communicate as the options demand.
    """
    if devices[0].mesh.size() == 1:
        join(devices[0], partial(SingleComm, devices[0]))
        return None
    kind, world = devices[0].kind, world or World.of(devices[0].mesh.size())
    if kind == "plan":
        for dev in devices:
            connect_plan(dev, options, world)
        return None
    if kind == "host":
        from llmq.comm.host import connect_host

        connect_host(devices, workers, world)
        return None
    from llmq.comm.cuda import connect_cuda

    return connect_cuda(devices, options, workers, world)
