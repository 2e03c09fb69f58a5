"""What a run needs before it starts: the real step, run on the device that does nothing."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass, replace

import numpy as np

from llmq.block import Recompute
from llmq.config import ModelConfig
from llmq.dtypes import parse_dtype
from llmq.errors import LlmqError
from llmq.machine import MIB, PLAN_SPEC, Machine, available_host_memory, choose_machine
from llmq.model import ModelOptions
from llmq.optimizer import AdamWConstants
from llmq.options import TrainConfig
from llmq.params import parameter_count
from llmq.runtime.device import HOST_SPEC, Device, DeviceSpec, MemorySizes
from llmq.runtime.plan_device import PlanDevice
from llmq.step import Step, StepOptions

PLACES = ("device", "pinned")


class OutOfMemory(LlmqError):
    """A plan that does not fit, with what would make it fit."""


def step_options(config: TrainConfig, backend: str) -> StepOptions:
    """The part of a run's options that shapes its step. backend: "native" or "cudnn" attention."""
    return StepOptions(
        model=ModelOptions(
            micro_batch=config.batch_size,
            seq_len=config.seq_len,
            dtype=parse_dtype(config.model_dtype),
            z_loss=config.z_loss,
            recompute=Recompute(
                swiglu=config.recompute_swiglu,
                norm=config.recompute_norm,
                ffn=config.recompute_ffn,
                qkv=config.recompute_qkv,
                att=config.recompute_att,
                block=config.recompute_block,
            ),
            lmhead_chunks=config.lmhead_chunks,
            attention_backend=backend,
            attention_chunks=config.attn_bwd_chunks,
        ),
        master_dtype=parse_dtype(config.master_dtype),
        grad_dtype=parse_dtype(config.grad_accum_dtype),
        m_dtype=parse_dtype(config.opt_m_dtype),
        v_dtype=parse_dtype(config.opt_v_dtype),
        adamw=AdamWConstants(
            beta1=config.beta_1,
            beta2=config.beta_2,
            epsilon=config.adam_epsilon,
            weight_decay=config.weight_decay,
        ),
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
            sizes=MemorySizes(
                device=dev.arenas["device"].used,
                stack=dev.stack.high_water_mark,
                pinned=dev.arenas["pinned"].used,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One optimizer step, counted. flops and traffic are those of one step on one rank."""

    usage: Usage
    tokens: int
    flops: int
    traffic: int
    launches: int


def make_plan(
    config: TrainConfig, model: ModelConfig, spec: DeviceSpec, backend: str = "native"
) -> Plan:
    """Run one step on a PlanDevice. config: normalized. Takes well under a second."""
    dev = PlanDevice(spec)
    step = Step(dev, model, step_options(config, backend))
    shape = (config.batch_size, config.seq_len)
    batch = (np.zeros(shape, np.int32), np.zeros(shape, np.int32))
    step.train(0, 0.0, 0.0, [batch])
    cost = _counted(dev)
    if config.grad_accumulation > 1:
        step.train(0, 0.0, 0.0, [batch, batch])
        accumulating = _counted(dev) - 2 * cost  # what each micro-step after the first one adds
        cost = cost + (config.grad_accumulation - 1) * accumulating
    step.evaluate_batch(batch)
    return Plan(
        usage=Usage.of(dev),
        tokens=config.batch_size * config.seq_len * config.grad_accumulation,
        flops=int(cost[0]),
        traffic=int(cost[1]),
        launches=int(cost[2]),
    )


def _counted(dev: PlanDevice) -> np.ndarray:
    """int64 (3,): FLOPs, bytes and launches so far."""
    return np.array([sum(c.values()) for c in (dev.flops, dev.bytes, dev.launches)], np.int64)


def allocator_state(usage: Usage, others: dict[str, int] | None = None) -> str:
    """The [Allocator State] table, in MiB. others: rows without a category, such as "Free"."""
    lines = ["[Allocator State]", f" {'in MiB':>17}  Device | Managed | Pinned "]
    names = list(usage.categories["device"])
    names += [name for name in usage.categories["pinned"] if name not in names]
    rows = {name: [usage.categories[place].get(name, 0) for place in PLACES] for name in names}
    rows |= {name: [value, 0] for name, value in (others or {}).items()}
    for name, (device, pinned) in rows.items():
        lines.append(f"  {name:>16}: {device // MIB:6d} | {0:7d} | {pinned // MIB:6d} ")
    lines.append("")
    for name, size in usage.stack:
        if size >= MIB:
            lines.append(f"  {'stack.' + name:>16}: {size // MIB:6d} ")
    return "\n".join(lines) + "\n"


# Ways to need less memory, cheapest in time first: what is said, and the options that change.
_SAVERS: tuple[tuple[str, dict], ...] = (
    ("--recompute-swiglu", {"recompute_swiglu": True}),
    ("--recompute-norm", {"recompute_norm": True}),
    ("--lmhead-chunks", {}),
    ("--opt-m-dtype=bf16 --opt-v-dtype=bf16", {"opt_m_dtype": "bf16", "opt_v_dtype": "bf16"}),
    ("--recompute-ffn", {"recompute_ffn": True}),
    ("--recompute-att", {"recompute_att": True}),
    ("--recompute-block", {"recompute_block": True}),
    ("--batch-size", {}),
)


def _apply(config: TrainConfig, flag: str, changes: dict) -> tuple[str, TrainConfig] | None:
    """The flag as a user would write it, and the changed options; None if it changes nothing."""
    if flag == "--lmhead-chunks":
        chunks = config.lmhead_chunks * 8
        if config.batch_size * config.seq_len % chunks:
            return None
        flag, changes = f"--lmhead-chunks={chunks}", {"lmhead_chunks": chunks}
    elif flag == "--batch-size":
        half = config.batch_size // 2
        if half == 0 or config.batch_size % 2 or half % config.attn_bwd_chunks:
            return None
        flag = f"--batch-size={half} --grad-accumulation={config.grad_accumulation * 2}"
        changes = {"batch_size": half, "grad_accumulation": config.grad_accumulation * 2}
    changed = replace(config, **changes).normalized()
    return None if changed == config else (flag, changed)


def savings(
    config: TrainConfig, model: ModelConfig, spec: DeviceSpec, backend: str, limit: int
) -> list[tuple[str, int, int]]:
    """Flags to add, in order, until the plan fits into `limit` bytes.

    Each entry: flags, bytes that they save on top of those before, bytes needed then.
    """
    found = []
    current = config
    needed = make_plan(config, model, spec, backend).usage.device_bytes
    while needed > limit:
        for flag, changes in _SAVERS:
            applied = _apply(current, flag, changes)
            if applied is None:
                continue
            less = make_plan(applied[1], model, spec, backend).usage.device_bytes
            if less < needed:
                found.append((applied[0], needed - less, less))
                current, needed = applied[1], less
                break
        else:
            break
    return found


def check_fits(
    config: TrainConfig, model: ModelConfig, spec: DeviceSpec, backend: str, plan: Plan, limit: int
) -> None:
    """Raise OutOfMemory unless the plan fits into `limit` bytes of device memory."""
    needed = plan.usage.device_bytes
    if needed <= limit:
        return
    sizes = sorted(plan.usage.categories["device"].items(), key=lambda item: -item[1])
    largest = ", ".join(f"{name} {size // MIB} MiB" for name, size in sizes[:3])
    found = savings(config, model, spec, backend, limit)
    steps = "; ".join(f"{f} saves {s // MIB} MiB -> {n // MIB} MiB" for f, s, n in found)
    if found and found[-1][2] <= limit:
        advice = f"adding these, in this order, makes it fit: {steps}"
    else:
        advice = "nothing makes this model fit here" + (f", not even all of: {steps}" * bool(found))
    raise OutOfMemory(
        f"out of memory: {needed // MIB} MiB are needed, {limit // MIB} MiB are available "
        f"(largest: {largest}); {advice}"
    )


def memory_limit(config: TrainConfig, machine: Machine) -> int:
    """Bytes of device memory that a run may take on this machine."""
    available = available_host_memory() if machine.kind == "host" else machine.spec.memory
    return min(available, config.memory_limit or available)


def run_plan(
    config: TrainConfig, model: ModelConfig, gpu_memory: int | None, json: bool = False
) -> None:
    """Print the plan of a run: `llmq plan`. gpu_memory: bytes of the card it is meant for.

    Never loads CUDA: without --gpu-memory and on --device cpu the limit is the host's memory.
    """
    spec = HOST_SPEC if config.device == "cpu" else PLAN_SPEC
    backend = "cudnn" if config.attention == "cudnn" else "native"
    plan = make_plan(config, model, spec, backend)
    limit = gpu_memory or config.memory_limit
    if limit is None and config.device == "cpu":
        limit = memory_limit(config, choose_machine("cpu", 1))
    fits = None if limit is None else plan.usage.device_bytes <= limit
    if json:
        print(json_module.dumps(plan_record(plan, model, limit, fits), indent=2))
        return
    print(allocator_state(plan.usage))
    print(f"Parameters: {parameter_count(model):,}")
    print(f"Tokens per step: {plan.tokens:,}")
    print(f"FLOPs per token: {plan.flops / plan.tokens / 1e9:.3f} G")
    print(f"Device memory: {plan.usage.device_bytes // MIB} MiB")
    if fits:
        print(f"Fits into {limit // MIB} MiB, {(limit - plan.usage.device_bytes) // MIB} MiB free")
    elif fits is False:
        check_fits(config, model, spec, backend, plan, limit)


def plan_record(plan: Plan, model: ModelConfig, limit: int | None, fits: bool | None) -> dict:
    """The plan for programs; sizes in bytes."""
    return {
        "parameters": parameter_count(model),
        "tokens_per_step": plan.tokens,
        "flops_per_token": plan.flops / plan.tokens,
        "traffic_bytes": plan.traffic,
        "launches": plan.launches,
        "memory": plan.usage.categories,
        "stack": [{"name": name, "bytes": size} for name, size in plan.usage.stack],
        "device_bytes": plan.usage.device_bytes,
        "pinned_bytes": plan.usage.sizes.pinned,
        "limit_bytes": limit,
        "fits": fits,
    }
