"""What a run needs before it starts: the real step, run on the device that does nothing."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any

import numpy as np

from llmq.block import Recompute
from llmq.config import ModelConfig
from llmq.dtypes import E4M3, parse_dtype
from llmq.errors import ConfigError, LlmqError
from llmq.machine import MIB, PLAN_SPEC, Machine, available_host_memory, check_ranks
from llmq.model import ModelOptions
from llmq.operands import Fp8Options
from llmq.optimizer import AdamWConstants
from llmq.options import OPTIONS, TrainConfig
from llmq.params import parameter_count
from llmq.runtime.cudnn import MAX_BACKWARD_HEAD_DIM
from llmq.runtime.device import HOST_SPEC, Device, DeviceSpec, MemorySizes
from llmq.runtime.plan_device import PlanDevice
from llmq.step import Step, StepOptions

PLACES = ("device", "pinned")
MIN_CHUNK_ROWS = 256  # of the LM head's products, below which advice does not go


class OutOfMemory(LlmqError):
    """A plan that does not fit, with what would make it fit."""


def fp8_options(config: TrainConfig) -> Fp8Options | None:
    """None where the products run in the model's own format."""
    if config.matmul_dtype != "e4m3":
        return None
    return Fp8Options(value=E4M3, gradient=parse_dtype(config.gradient_dtype))


def step_options(config: TrainConfig, backend: str) -> StepOptions:
    """The part of a run's options that shapes its step. backend: "native" or "cudnn" attention."""
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
            ),
            lmhead_chunks=config.lmhead_chunks,
            attention_backend=backend,
            attention_chunks=config.attn_bwd_chunks,
        ),
        grad_accum_steps=config.grad_accumulation,
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


def allocator_rows(usage: Usage, others: dict[str, int] | None = None) -> list[dict[str, Any]]:
    """[Allocator State] for programs: bytes of each category by kind of memory.

    others: rows that are not the trainer's, such as "Free", and their device memory.
    """
    rows = []
    for name in dict.fromkeys(name for place in PLACES for name in usage.categories[place]):
        device, pinned = (usage.categories[place].get(name, 0) for place in PLACES)
        rows.append(_row(name, device, pinned))
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


# ------------------------------------------------------------------------------------------------
# Does it fit, and what would make it fit


def _more_chunks(config: TrainConfig) -> dict[str, Any]:
    """Eight times as many, while products of that many rows still fill a GPU."""
    chunks = config.lmhead_chunks * 8
    rows, rest = divmod(config.batch_size * config.seq_len, chunks)
    return {} if rest or rows < MIN_CHUNK_ROWS else {"lmhead_chunks": chunks}


def _smaller_batch(config: TrainConfig) -> dict[str, Any]:
    """Half as many sequences at a time, twice as often."""
    half = config.batch_size // 2
    if config.batch_size % 2 or half % config.attn_bwd_chunks:
        return {}
    return {"batch_size": half, "grad_accumulation": 2 * config.grad_accumulation}


# Ways to need less memory, cheapest in time and accuracy first: options to change, none where it
# cannot be done.
_SAVERS: tuple[Callable[[TrainConfig], dict[str, Any]], ...] = (
    lambda config: {"recompute_swiglu": True},
    lambda config: {"recompute_norm": True},
    _more_chunks,
    lambda config: {"opt_m_dtype": "bf16", "opt_v_dtype": "bf16"},
    lambda config: {"grad_accum_dtype": config.model_dtype},
    lambda config: {"master_dtype": config.model_dtype},
    lambda config: {"recompute_ffn": True},
    lambda config: {"recompute_att": True},
    lambda config: {"recompute_block": True},
    _smaller_batch,
    lambda config: dict.fromkeys(("model_dtype", "grad_accum_dtype", "master_dtype"), "bf16"),
)


def _spelled(config: TrainConfig, changes: dict[str, Any]) -> str:
    """The flags that make these changes."""
    flags = [
        OPTIONS[name].flag + ("" if value is True else f"={value}")
        for name, value in changes.items()
        if getattr(config, name) != value
    ]
    return " ".join(flags)


# What CUDA takes beside the arena: context, kernels, cuBLASLt and cuDNN. Measured on an H100 with
# driver 580: 537 MiB in a run of the 0.5B preset.
CONTEXT_BYTES = 540 * MIB


def needed_bytes(usage: Usage, spec: DeviceSpec) -> int:
    """What must fit into the device's memory. On the CPU pinned memory is the same memory."""
    return usage.device_bytes + (usage.sizes.pinned if spec == HOST_SPEC else CONTEXT_BYTES)


def savings(
    config: TrainConfig, model: ModelConfig, spec: DeviceSpec, backend: str, limit: int
) -> list[tuple[str, int, int]]:
    """Flags to add so that the plan fits into `limit` bytes, cheapest first.

    Each entry: flags, bytes that they save on top of those before, bytes needed then. If even all
    of them are not enough, the last entry needs more than the limit.
    """

    @cache
    def needed(changed: TrainConfig) -> int:
        return needed_bytes(make_plan(changed, model, spec, backend).usage, spec)

    def having(changes: Iterable[dict[str, Any]]) -> TrainConfig:
        return reduce(lambda c, change: replace(c, **change).normalized(), changes, config)

    found: list[dict[str, Any]] = []
    while needed(having(found)) > limit:
        now = having(found)
        useful = (
            c
            for c in (saver(now) for saver in _SAVERS)
            if needed(having([*found, c])) < needed(now)
        )
        change = next(useful, None)
        if change is None:
            break
        found.append(change)
    # What a later one implies or makes superfluous goes, the dearest first.
    enough = max(limit, needed(having(found)))
    for change in reversed(found[:-1]):
        rest = [c for c in found if c is not change]
        if needed(having(rest)) <= enough:
            found = rest
    sizes = [needed(having(found[:n])) for n in range(len(found) + 1)]
    return [
        (_spelled(having(found[:n]), change), sizes[n] - sizes[n + 1], sizes[n + 1])
        for n, change in enumerate(found)
    ]


def check_fits(
    config: TrainConfig, model: ModelConfig, spec: DeviceSpec, backend: str, plan: Plan, limit: int
) -> None:
    """Raise OutOfMemory unless the plan fits into `limit` bytes of device memory."""
    needed = needed_bytes(plan.usage, spec)
    if needed <= limit:
        return
    sizes = sorted(plan.usage.categories["device"].items(), key=lambda item: -item[1])
    largest = ", ".join(f"{name} {_mib(size)}" for name, size in sizes[:3])
    found = savings(config, model, spec, backend, limit)
    steps = "; ".join(f"{flags} saves {_mib(s)} -> {_mib(n)}" for flags, s, n in found)
    if found and found[-1][2] <= limit:
        advice = f"adding these, in this order, makes it fit: {steps}"
    elif found:
        advice = f"no options make it fit, use a smaller model or --seq-len; the best are: {steps}"
    else:
        advice = "no options make it need less, use a smaller model or --seq-len"
    raise OutOfMemory(
        f"out of memory: {_mib(needed)} are needed, {_mib(limit)} are available "
        f"(largest: {largest}); {advice}"
    )


def _mib(size: int) -> str:
    return f"{size // MIB} MiB"


def memory_limit(config: TrainConfig, machine: Machine) -> int:
    """Bytes of device memory that a run may take on this machine."""
    available = available_host_memory() if machine.kind == "host" else machine.spec.memory
    return min(available, config.memory_limit or available)


# ------------------------------------------------------------------------------------------------
# llmq plan


def run_plan(
    config: TrainConfig, model: ModelConfig, gpu_memory: int | None, json: bool = False
) -> None:
    """Print the plan of a run: `llmq plan`. gpu_memory: bytes of the card it is meant for.

    Never loads CUDA. Compares with the least of --gpu-memory, --memory-limit and, on the CPU, the
    host's memory. Raises OutOfMemory after printing if it does not fit.
    """
    check_ranks(config.gpus)
    on_cpu = config.device == "cpu"
    if on_cpu and gpu_memory is not None:
        raise ConfigError("--gpu-memory: has no meaning with --device cpu, use --memory-limit")
    spec = HOST_SPEC if on_cpu else PLAN_SPEC
    backend = "native" if on_cpu else _gpu_attention(config, model)
    plan = make_plan(config, model, spec, backend)
    limits = [gpu_memory, config.memory_limit, available_host_memory() if on_cpu else None]
    limit = min((size for size in limits if size is not None), default=None)
    if json:
        print(json_module.dumps(plan_record(plan, model, spec, limit), indent=2))
    else:
        print("\n".join(plan_report(plan, model, spec, limit)))
    if limit is not None:
        check_fits(config, model, spec, backend, plan, limit)


def _gpu_attention(config: TrainConfig, model: ModelConfig) -> str:
    """The attention that Trainer takes on a GPU, where cuDNN is taken to be installed."""
    cudnn = config.model_dtype == "bf16" and model.head_dim <= MAX_BACKWARD_HEAD_DIM
    return "cudnn" if cudnn and config.attention != "native" else "native"


def plan_report(plan: Plan, model: ModelConfig, spec: DeviceSpec, limit: int | None) -> list[str]:
    """The plan for people."""
    needed = needed_bytes(plan.usage, spec)
    fits = limit is not None and needed <= limit
    lines = [
        "[Allocator State]",
        *allocator_table(plan.usage, {"Free": limit - needed} if fits else None),
        "",
        "[Plan]",
        f"  Device:          {spec.name}",
        f"  Memory:          {_mib(needed)}",
        f"  Parameters:      {parameter_count(model):,}",
        f"  Tokens per step: {plan.tokens:,}",
        f"  FLOPs per token: {plan.flops / plan.tokens / 1e9:.3f} G",
    ]
    if limit is None:
        lines.append("  Fits:            compare with the card, or give --gpu-memory")
    else:
        lines.append(f"  Fits:            {'yes' if fits else 'no'}, into {_mib(limit)}")
    return lines


def plan_record(
    plan: Plan, model: ModelConfig, spec: DeviceSpec, limit: int | None
) -> dict[str, Any]:
    """The plan for programs; sizes in bytes. fits is null where there is nothing to compare with.

    needed_bytes is what is compared with limit_bytes.
    """
    needed = needed_bytes(plan.usage, spec)
    return {
        "device": spec.name,
        "parameters": parameter_count(model),
        "tokens_per_step": plan.tokens,
        "flops_per_token": plan.flops / plan.tokens,
        "traffic_bytes": plan.traffic,
        "launches": plan.launches,
        "memory": plan.usage.categories,
        "stack": [{"name": name, "bytes": size} for name, size in plan.usage.stack],
        "device_bytes": plan.usage.device_bytes,
        "pinned_bytes": plan.usage.sizes.pinned,
        "needed_bytes": needed,
        "limit_bytes": limit,
        "fits": None if limit is None else needed <= limit,
    }
