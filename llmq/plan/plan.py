"""Needs of a run before it starts: the real step, run on a device that only counts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.batch import Batch
from llmq.base.errors import ConfigError
from llmq.base.tensor import TIERS
from llmq.comm.connect import connect
from llmq.comm.options import CommOptions
from llmq.model.activations import BLOCK
from llmq.model.generator import PIECE, Generator
from llmq.model.step import Step
from llmq.options.options import TrainConfig
from llmq.runtime.device import Device, DeviceSpec, MemorySizes
from llmq.runtime.kernel import KernelSource
from llmq.runtime.mesh import DATA
from llmq.runtime.plan_device import PlanDevice, Trace, Work
from llmq.runtime.world import World
from llmq.state.placement import Placement, mesh_of, place, table_of

SLOTS = (64, 32, 16, 8, 4, 2, 1)  # numbers of texts continued at a time; the first that fits
PARTS = ("micro_steps", "update", "evaluation")  # parts of a plan
COUNTED = ("flops", "traffic", "launches")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Bytes by place and category ("Stack" among these), and the tensors of the stack's peak."""

    categories: dict[str, dict[str, int]]
    stack: tuple[tuple[str, int], ...]
    sizes: MemorySizes

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory: arena and stack."""
        return self.sizes.on_device

    @classmethod
    def of(cls, dev: Device) -> Usage:
        """Return the tensors that a device holds, and its stack's high-water mark so far."""
        categories = {place: dict(dev.arenas[place].categories) for place in TIERS}
        categories["device"]["Stack"] = dev.stack.high_water_mark
        return cls(
            categories=categories, stack=tuple(dev.stack.high_water_tensors), sizes=dev.sizes()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Counts of one optimizer step. usage, flops, traffic (bytes), launches: the counts of one
    rank. placement: where weights, gradients and moments are. sources: sources of the kernels of a
    step and an evaluation. micro_steps: trace of each kind of micro-step, with the number of such
    micro-steps; update: trace of the work after the micro-steps; evaluation: trace of one
    micro-batch. machines: number of machines. shards: number of parts of the state. gpus: number of
    ranks of one machine; None if there is only one machine."""

    usage: Usage
    world_size: int
    machines: int
    shards: int
    nccl: bool  # True if the ranks that share a state use NCCL
    divides: bool  # True if NCCL exchanges parts of sequences
    peer_access: bool  # True if GPUs may access each other's memory
    tokens: int
    flops: int
    traffic: int
    launches: int
    placement: Placement
    sources: frozenset[KernelSource]
    micro_steps: tuple[tuple[Trace, int], ...] = field(repr=False)
    update: Trace = field(repr=False)
    evaluation: Trace = field(repr=False)
    gpus: int | None = None

    @property
    def communicators(self) -> int:
        """Number of NCCL communicators of each rank."""
        return int(self.nccl) + int(self.shards < self.world_size) + int(self.divides)

    def ssd_traffic(self) -> tuple[int, int]:
        """Bytes that all ranks of a machine read and write in scratch files in one step."""
        ranks = self.gpus or self.world_size
        moved = [0, 0]
        for trace, count in (*self.micro_steps, (self.update, 1)):
            for work in (item for item in trace if isinstance(item, Work)):
                moved[0] += count * ranks * work.read
                moved[1] += count * ranks * work.written
        return moved[0], moved[1]

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the GPUs use, of all ranks of a machine together."""
        return self.usage.sizes.host * (self.gpus or self.world_size)


def comm_options(config: TrainConfig, placement: Placement) -> CommOptions:
    """Options of the exchanges between a run's ranks."""
    return CommOptions(
        gathers_from_host=placement.gathers_from_host,
        matrices=any(slab.by_matrix for slab in placement.slabs.values()),
        memcpy_all_gather=config.memcpy_all_gather,
        memcpy_send_recv=config.memcpy_send_recv,
        all_to_all_reduce=config.all_to_all_reduce,
        p2p=config.p2p,
    )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Switch off Python's cyclic garbage collector, which would search every record of a plan."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _planned_step(
    config: TrainConfig,
    model: ModelConfig,
    spec: DeviceSpec,
    backend: str,
    world_size: int,
    machines: int,
    frozen: Collection[str] = (),
) -> tuple[PlanDevice, Step, CommOptions]:
    """Return a PlanDevice, the step of one rank on it, and the options of its exchanges."""
    dev = PlanDevice(spec, mesh_of(config, world_size, machines))
    shards = dev.mesh.size("shard")
    placement = place(config.for_step, table_of(config, model, shards), shards, frozen)
    exchange = comm_options(config, placement)
    connect([dev], exchange, world=World.like(world_size, machines))
    step = Step(dev, model, config.for_step, placement, backend, background=config.ckpt_background)
    return dev, step, exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Generation in the memory of a step's activations. sizes: arguments of its `Generator`.
    passes: trace of each kind of pass, by kind ("prefill", "decode") and number of tokens.
    token_bytes: bytes of one token's keys and values. blocks_bytes: bytes of all blocks."""

    sizes: dict[str, int]
    passes: dict[tuple[str, int], Trace] = field(repr=False)
    token_bytes: float
    blocks_bytes: int

    def texts(self, tokens: int) -> int:
        """Number of texts of `tokens` tokens that are continued at a time."""
        return max(min(self.sizes["slots"], self.sizes["blocks"] // Generator.blocks_of(tokens)), 1)


@_uncollected()
def plan_generation(
    config: TrainConfig,
    model: ModelConfig,
    spec: DeviceSpec,
    backend: str,
    plan: Plan,
) -> Generation:
    """Return the `Generator` that continues the most texts of up to --seq-len tokens within the
    memory of a step's activations. plan: the plan of the step. ConfigError if not even one text
    fits."""
    for slots in SLOTS:
        dev, step, _ = _planned_step(config, model, spec, backend, plan.world_size, plan.machines)
        arena = dev.arenas["device"]
        of_text = Generator.blocks_of(config.seq_len)
        most, least = slots * of_text + 1, max(slots * of_text // 2, of_text) + 1
        sizes = {"slots": slots, "positions": config.seq_len, "piece": min(PIECE, 4 * slots)}
        sizes |= {"exact": True} if config.exact else {}
        with arena.over(step.model.activations_at):
            sizes["blocks"] = least
            generator = step.new_generator(**sizes)
            generator.rehearse()
            used = arena.used
        left = arena.used - used
        if left >= 0 and dev.stack.high_water_mark <= plan.usage.sizes["stack"]:
            blocks = min(most, least + left // generator.block_bytes)
            return Generation(
                sizes=sizes | {"blocks": blocks},
                passes={key[:2]: trace for key, trace in dev.graphs},
                token_bytes=generator.block_bytes / BLOCK,
                blocks_bytes=blocks * generator.block_bytes,
            )
    raise ConfigError(
        "--batch-size and --seq-len: the activations of a micro-step leave no memory to generate a "
        "text of --seq-len tokens in: use larger micro-steps"
    )


@_uncollected()
def make_plan(
    config: TrainConfig,
    model: ModelConfig,
    spec: DeviceSpec,
    backend: str = "native",
    world_size: int = 1,
    parts: tuple[str, ...] = PARTS,
    frozen: Collection[str] = (),
    machines: int = 1,
) -> Plan:
    """Run one step of one rank on a PlanDevice; takes well under a second. config: normalized.
    world_size: ranks of all machines, equally many on each. parts: the parts to run and count; an
    evaluation needs no more memory than a step, and running it makes sure. frozen: names of slabs
    that are not trained."""
    dev, step, exchange = _planned_step(config, model, spec, backend, world_size, machines, frozen)
    mesh, shards = dev.mesh, dev.mesh.size("shard")
    step.weights.refresh()
    cost, micro_steps, update, evaluation = _run(dev, step, parts)
    return Plan(
        usage=Usage.of(dev),
        world_size=world_size,
        machines=machines,
        shards=shards,
        nccl=shards > 1 and exchange.nccl,
        divides=mesh.size("context") > 1 and not exchange.memcpy_send_recv,
        peer_access=config.p2p != "off",
        tokens=config.batch_size * config.seq_len * config.grad_accumulation * mesh.size(*DATA),
        **{name: int(sum_) for name, sum_ in zip(COUNTED, cost, strict=True)},
        placement=step.weights.placement,
        sources=frozenset(dev.sources),
        micro_steps=tuple(micro_steps),
        update=update,
        evaluation=evaluation,
    )


def _run(
    dev: PlanDevice, step: Step, parts: tuple[str, ...]
) -> tuple[np.ndarray, list[tuple[Trace, int]], Trace, Trace]:
    """Run these parts of a step: return its COUNTED, and the Plan's micro_steps, update and
    evaluation. Without training micro-steps are evaluations, and no update follows."""
    sizes, trains = step.options.batch, not step.options.model.only_scores
    shape, count = (sizes.batch_size, sizes.seq_len), sizes.grad_accumulation
    batch = Batch(np.zeros(shape, np.int32), np.zeros(shape, np.int32))
    if trains and "micro_steps" in parts and not step.scales.ready:
        step.calibrate()  # only in the first step
        step.weights.updated()  # each step gathers anew
    micro_steps, update, evaluation = [], [], []
    cost = _counted(dev)
    step.start()
    cost = _counted(dev) - cost

    def run(enqueue: Callable[[], object], times: int) -> Trace:
        before = _counted(dev)
        enqueue()
        cost[:] += times * (_counted(dev) - before)
        return dev.graphs[-1][1]

    kinds = _kinds(count, dev.mesh.size()) if "micro_steps" in parts else []
    if not trains and kinds:
        micro_steps.append((run(partial(step.evaluate_batch, batch), count), count))
    for number, times in kinds if trains else ():

        def micro_step(number: int = number) -> None:
            step.inbox.send(step.scalars_of(0, number, 0.0, 0.0), batch, step.results)
            dev.graph(*step.micro_step(number, last=number == count - 1))

        micro_steps.append((run(micro_step, times), times))
    if trains and "update" in parts:
        # Updates of other kinds are rare: they count in the stack's peak alone.
        first, *others = step.optimizer.rule.kinds
        update = run(partial(step.update, first), 1)
        for kind in others:
            step.update(kind)
    if "evaluation" in parts:
        evaluation = run(partial(step.evaluate_batch, batch), 0)
    return cost, micro_steps, update, evaluation


def _kinds(count: int, world_size: int) -> list[tuple[int, int]]:
    """Numbers of the micro-steps to run, each with the number of micro-steps that it represents.
    All micro-steps between the first and the last are alike. A single rank squares sums only in the
    last micro-step; the plan counts all but the first like the last, which is faster and 0.5 %
    off."""
    last = max(count - 1, 1)
    middle = {1: count - 2, count - 1: 1} if world_size > 1 else {last: count - 1}
    kinds = {0: 1} | middle
    return [(number, times) for number, times in kinds.items() if times > 0 and number < count]


def _counted(dev: PlanDevice) -> np.ndarray:
    """Sums (3,) of COUNTED so far, as Python integers, which never overflow."""
    return np.array([sum(c.values()) for c in (dev.flops, dev.bytes, dev.launches)], object)
