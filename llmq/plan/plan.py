"""What a run needs before it starts: the real step, run on the device that does nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llmq.base.dtypes import E4M3, MIB, parse_dtype
from llmq.base.errors import LlmqError
from llmq.comm.connect import connect
from llmq.comm.options import CommOptions
from llmq.config.model import ModelConfig
from llmq.config.options import TrainConfig
from llmq.model.activations import Recompute
from llmq.model.model import ModelOptions
from llmq.model.operands import Fp8Options
from llmq.model.step import Step, StepOptions
from llmq.runtime.device import HOST_SPEC, PLACES, Device, DeviceSpec, MemorySizes
from llmq.runtime.kernel import Source
from llmq.runtime.plan_device import PlanDevice, Trace
from llmq.state.grads import GradientOptions
from llmq.state.optimizer import AdamWConstants, OptimizerOptions
from llmq.state.weights import WeightOptions

PARTS = ("micro_steps", "update", "evaluation")  # of a plan


class OutOfMemory(LlmqError):
    """A plan that does not fit, with what would make it fit."""


def fp8_options(config: TrainConfig) -> Fp8Options | None:
    """None where the products run in the model's own format."""
    if config.matmul_dtype != "e4m3":
        return None
    return Fp8Options(
        value=E4M3,
        gradient=parse_dtype(config.gradient_dtype),
        delayed=config.fp8_recipe == "delayed",
        head=config.head_dtype == "e4m3",
        fast=config.fp8_fast_accumulation,
    )


def step_options(config: TrainConfig, backend: str) -> StepOptions:
    """The part of a run's options that shapes its step. backend: "native" or "cudnn" attention."""
    host = "write_combined" if config.write_combined else "pinned"
    return StepOptions(
        model=ModelOptions(
            micro_batch=config.batch_size,
            seq_len=config.seq_len,
            dtype=parse_dtype(config.model_dtype),
            fp8=fp8_options(config),
            z_loss=config.z_loss,
            recompute=Recompute(
                swiglu=config.recompute_swiglu,
                norm=config.recompute_norm,
                ffn=config.recompute_ffn,
                qkv=config.recompute_qkv,
                att=config.recompute_att,
                block=config.recompute_block,
                layers=config.recompute_layers,
            ),
            lmhead_chunks=config.lmhead_chunks,
            attention_backend=backend,
            attention_chunks=config.attn_bwd_chunks,
            offload_residual=config.offload_residual,
        ),
        weights=WeightOptions(
            dtype=parse_dtype(config.model_dtype),
            master_dtype=parse_dtype(config.master_dtype),
            fp8=E4M3 if config.matmul_dtype == "e4m3" else None,
            fp8_head=config.head_dtype == "e4m3",
            shard=config.shard_weights,
            persistent_quants=config.persistent_quants,
            keep_transposed=config.keep_transposed,
            mirror=config.has_mirrors,
            master_place=host if config.offload_master else "device",
            quants_place=host if config.offload_quants else "device",
        ),
        gradients=GradientOptions(
            dtype=parse_dtype(config.grad_accum_dtype),
            shard=config.shard_gradients,
            place=host if config.offload_gradients else "device",
            all_to_all=config.all_to_all_reduce,
        ),
        optimizer=OptimizerOptions(
            constants=AdamWConstants(
                beta1=config.beta_1,
                beta2=config.beta_2,
                epsilon=config.adam_epsilon,
                weight_decay=config.weight_decay,
            ),
            m_dtype=parse_dtype(config.opt_m_dtype),
            v_dtype=parse_dtype(config.opt_v_dtype),
            m_place=host if config.offload_opt_m else "device",
            v_place=host if config.offload_opt_v else "device",
            zero_copy=config.use_zero_copy,
        ),
        grad_accum_steps=config.grad_accumulation,
        seed=config.seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Bytes by place and category ("Stack" among them), and what the stack's peak is made of."""

    categories: dict[str, dict[str, int]]
    stack: tuple[tuple[str, int], ...]
    sizes: MemorySizes

    @property
    def device_bytes(self) -> int:
        """Everything in device memory: the arena and the stack."""
        return self.sizes.device + self.sizes.stack

    @classmethod
    def of(cls, dev: Device) -> Usage:
        """What a device holds, and its stack's high-water mark so far."""
        categories = {place: dict(dev.arenas[place].categories) for place in PLACES}
        categories["device"]["Stack"] = dev.stack.high_water_mark
        return cls(
            categories=categories,
            stack=tuple(dev.stack.high_water_tensors),
            sizes=dev.sizes(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One optimizer step, counted. usage, flops, traffic and launches are those of one rank.

    sources: what its kernels, and those of an evaluation, are compiled from. micro_steps: what each
    of them enqueues, and how many of them do; update: what follows them.
    """

    usage: Usage
    world_size: int
    nccl: bool  # whether anything goes by it
    peer_access: bool  # whether GPUs may reach each other's memory
    tokens: int
    flops: int
    traffic: int
    launches: int
    sources: frozenset[Source]
    micro_steps: tuple[tuple[Trace, int], ...] = field(repr=False)
    update: Trace = field(repr=False)

    @property
    def host_bytes(self) -> int:
        """Host memory of all ranks together that the GPUs work with."""
        return self.usage.sizes.host * self.world_size


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of cyclic garbage: it would look for some in every note of a plan."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_uncollected()
def make_plan(
    config: TrainConfig,
    model: ModelConfig,
    spec: DeviceSpec,
    backend: str = "native",
    world_size: int = 1,
    parts: tuple[str, ...] = PARTS,
) -> Plan:
    """Run one step of one rank on a PlanDevice. config: normalized. Takes well under a second.

    parts: what is run and counted. An evaluation does not need more than a step; running it makes
    sure.
    """
    dev = PlanDevice(spec, world_size=world_size)
    connect([dev], comm_options(config))
    step = Step(dev, model, step_options(config, backend))
    step.weights.refresh()
    shape, count = (config.batch_size, config.seq_len), config.grad_accumulation
    batch = (np.zeros(shape, np.int32), np.zeros(shape, np.int32))
    if "micro_steps" in parts and not step.model.operands.ready:
        step.calibrate()  # a part of the first step only
        step.weights.updated()  # what it has gathered, each step gathers
    micro_steps: list[tuple[Trace, int]] = []
    update: Trace = []
    cost = _counted(dev)
    step.start()
    cost = _counted(dev) - cost

    def run(enqueue: Callable[[], object], times: int) -> Trace:
        before = _counted(dev)
        enqueue()
        cost[:] += times * (_counted(dev) - before)
        return dev.graphs[-1][1]

    # All between the first and the last one are alike. One rank at most squares sums in the last
    # one: where all count as such, a plan takes less time and is 0.5 % off.
    last = max(count - 1, 1)
    middle = {1: count - 2, count - 1: 1} if world_size > 1 else {last: count - 1}
    for number, times in ({0: 1} | middle).items():
        if "micro_steps" in parts and times > 0 and number < count:
            scalars = step.scalars_of(0, number, 0.0, 0.0)
            trace = run(lambda args=(number, scalars, batch): step.micro_step(*args), times)
            micro_steps.append((trace, times))
    if "update" in parts:
        update = run(step.update, 1)
    if "evaluation" in parts:
        step.evaluate_batch(batch)
    return Plan(
        usage=Usage.of(dev),
        world_size=world_size,
        nccl=world_size > 1 and comm_options(config).nccl,
        peer_access=config.p2p != "off",
        tokens=config.batch_size * config.seq_len * config.grad_accumulation * world_size,
        flops=int(cost[0]),
        traffic=int(cost[1]),
        launches=int(cost[2]),
        sources=frozenset(dev.sources),
        micro_steps=tuple(micro_steps),
        update=update,
    )


def fewest_attention_parts(
    config: TrainConfig,
    model: ModelConfig,
    spec: DeviceSpec,
    backend: str = "native",
    world_size: int = 1,
) -> TrainConfig:
    """The config with as few parts of attention's backward as take no more memory, and its results.

    The parts are there to bound a workspace that often lies where another part of the step needs
    more: then one part is as small, and faster.
    """
    asked = config.attn_bwd_chunks

    def stack(parts: int) -> int:
        cut = replace(config, attn_bwd_chunks=parts)
        return make_plan(cut, model, spec, backend, world_size, ("micro_steps",)).usage.sizes.stack

    if asked == 1:
        return config
    most = stack(asked)
    divisors = (n for n in range(1, asked) if config.batch_size % n == 0)
    return replace(config, attn_bwd_chunks=next((n for n in divisors if stack(n) <= most), asked))


def comm_options(config: TrainConfig) -> CommOptions:
    """How the ranks of a run exchange data."""
    on_host = config.work_shards_offloaded or config.has_mirrors
    return CommOptions(
        gathers_from_host=config.shard_weights and on_host,
        memcpy_all_gather=config.memcpy_all_gather,
        memcpy_send_recv=config.memcpy_send_recv,
        all_to_all_reduce=config.all_to_all_reduce,
        p2p=config.p2p,
    )


def _counted(dev: PlanDevice) -> np.ndarray:
    """(3,): FLOPs, bytes and launches so far, as Python's integers, which have no largest one."""
    return np.array([sum(c.values()) for c in (dev.flops, dev.bytes, dev.launches)], object)


def allocator_rows(usage: Usage, others: dict[str, int] | None = None) -> list[dict[str, Any]]:
    """[Allocator State] for programs: bytes of each category by kind of memory.

    others: rows that are not the trainer's, such as "Free", and their device memory.
    """
    rows = []
    for name in dict.fromkeys(name for place in PLACES for name in usage.categories[place]):
        device, *host = (usage.categories[place].get(name, 0) for place in PLACES)
        rows.append(_row(name, device, sum(host)))
    return rows + [_row(name, size, 0) for name, size in (others or {}).items()]


def _row(name: str, device: int, pinned: int) -> dict[str, Any]:
    """In llm.q's columns, two of which are never used here."""
    return {"name": name, "device": device, "managed": 0, "pinned": pinned, "pageable": 0}


def allocator_table(usage: Usage, others: dict[str, int] | None = None) -> list[str]:
    """The lines of [Allocator State], in MiB: rows as above, then the stack at its highest."""
    lines = [f" {'in MiB':>17}  Device | Managed | Pinned "]
    for row in allocator_rows(usage, others):
        device, managed, pinned = (row[kind] // MIB for kind in ("device", "managed", "pinned"))
        lines.append(f"  {row['name']:>16}: {device:6d} | {managed:7d} | {pinned:6d} ")
    stack = [(name, size // MIB) for name, size in usage.stack if size >= MIB]
    if stack:
        lines.append("")
    return lines + [f"  {'stack.' + name:>16}: {size:6d} " for name, size in stack]


# What CUDA takes beside the arena: context, kernels, cuBLASLt and cuDNN. Measured on an H100 with
# driver 580: 537 MiB in a run of the 0.5B preset.
CONTEXT_BYTES = 540 * MIB
# What NCCL 2.28 takes on each of four H200, with the channels of runtime/nccl.py.
NCCL_BYTES = 930 * MIB


def needed_bytes(plan: Plan, spec: DeviceSpec) -> int:
    """What must fit into the device's memory. On the CPU pinned memory is the same memory."""
    if spec == HOST_SPEC:
        return plan.usage.device_bytes + plan.usage.sizes.host
    beside = CONTEXT_BYTES + (NCCL_BYTES if plan.nccl else 0)
    return plan.usage.device_bytes + beside + page_tables(plan.host_bytes, spec)


def page_tables(pinned: int, spec: DeviceSpec) -> int:
    """Bytes in which each GPU keeps where the pinned memory of all ranks lies: 8 per 4 KiB."""
    return 0 if spec == HOST_SPEC else pinned // 512
