"""`llmq plan`, and how `llmq train --auto` chooses: for which machine, what is printed."""

from __future__ import annotations

import json as json_module
import shlex
from dataclasses import dataclass, replace
from typing import Any

from llmq.base.dtypes import MIB
from llmq.base.errors import ConfigError, warn
from llmq.config.cards import Card, card_of, card_with, find_card, spec_of
from llmq.config.command_line import command_line
from llmq.config.model import ModelConfig
from llmq.config.options import TrainConfig
from llmq.plan.advice import check_fits, mib, room
from llmq.plan.allocator_table import allocator_table
from llmq.plan.checks import attention_backend, check_machine, installed_attention
from llmq.plan.cost import StepTime, step_time
from llmq.plan.data_report import data_record, data_report
from llmq.plan.estimate import Planner
from llmq.plan.fit import Candidate, Fit
from llmq.plan.idle_options import rank_warnings
from llmq.plan.memory import Limits, memory_limit, needed_bytes
from llmq.plan.placement_table import placement_record, placement_table
from llmq.plan.plan import Plan, fewest_attention_parts
from llmq.runtime.device import HOST_SPEC, DeviceSpec
from llmq.runtime.host_memory import available_host_memory
from llmq.runtime.machine import PLAN_SPEC, Machine, choose_machine
from llmq.state.params import parameter_count

CONTEXT_WHEN_ASKED = 256 * MIB  # of CONTEXT_BYTES, taken already when the free memory is read


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The machine that a plan is for.

    card: whose speed is predicted, or None. named: whether that card is what was asked for, and
    not only one with as much memory.
    """

    spec: DeviceSpec
    backend: str
    limits: Limits
    world_size: int
    card: Card | None = None
    named: bool = False

    def planner(self, model: ModelConfig) -> Planner:
        """For this machine."""
        card = self.card or card_of(self.spec)
        return Planner(model, self.spec, self.backend, card, self.world_size)


def _target(
    config: TrainConfig,
    model: ModelConfig,
    gpu_memory: int | None,
    host_memory: int | None,
    card_words: str | None,
) -> Target:
    """From the options of `llmq plan`; never loads CUDA. Raises ConfigError for contradictions."""
    world_size = max(config.gpus, 1)
    if config.device == "cpu":
        for flag, given in (("--gpu-memory", gpu_memory), ("--card", card_words)):
            if given is not None:
                raise ConfigError(f"{flag}: has no meaning with --device cpu, use --memory-limit")
        least = min(filter(None, (host_memory, available_host_memory()))) // world_size
        limits = Limits(device=min(least, config.memory_limit or least))
        return Target(spec=HOST_SPEC, backend="native", limits=limits, world_size=world_size)
    card = None if card_words is None else find_card(card_words)
    if card is not None and card.fp8 == 0 and config.matmul_dtype == "e4m3":
        raise ConfigError(f"--matmul-dtype: e4m3 cannot be had, {card.name} has no fp8: use bf16")
    spec = PLAN_SPEC if card is None else spec_of(card)
    memory = gpu_memory or (None if card is None else spec.memory)
    device = min(filter(None, (memory, config.memory_limit)), default=None)
    return Target(
        spec=spec,
        backend=installed_attention(config, model, spec),
        limits=Limits(device=device, host=host_memory),
        world_size=world_size,
        card=card or (None if device is None else card_with(device)),
        named=card is not None,
    )


# ------------------------------------------------------------------------------------------------
# The plan of one configuration


def run_plan(
    config: TrainConfig,
    model: ModelConfig,
    *,
    gpu_memory: int | None = None,
    host_memory: int | None = None,
    card: str | None = None,
    fit: frozenset[str] | None = None,
    placement: bool = False,
    json: bool = False,
) -> TrainConfig:
    """`llmq plan`: print the plan of a run, or (fit) the fastest ones that fit; returns the first.

    gpu_memory, host_memory: bytes of the machine it is meant for. card: words of its card's name.
    fit: options that keep their values in a search. placement: print, too, where everything lies.
    Raises OutOfMemory, after printing the plan, if it does not fit, or nothing does.
    """
    if placement and fit is not None:
        raise ConfigError("--placement: has no meaning with --fit, use it with what that finds")
    where = _target(config, model, gpu_memory, host_memory, card)
    kind = "host" if where.spec == HOST_SPEC else "cuda"
    check_machine(config, model, Machine(kind=kind, spec=where.spec, note=None))
    warn(rank_warnings(config, where.world_size))
    planner = where.planner(model)
    if fit is not None:
        if where.limits.device is None:
            raise ConfigError("--fit: how much memory is there? Give --gpu-memory or --card")
        found = Fit(config, planner, where.limits, fit).search()
        log_file = "log_file" in fit
        if json:
            print(json_module.dumps(fit_record(found, where, log_file), indent=2))
        else:
            print("\n".join(fit_report(found, where, log_file)))
        return found[0].config
    parts = fewest_attention_parts(config, model, where.spec, where.backend, where.world_size)
    plan = planner.plan(parts)
    time = step_time(plan, where.card) if where.named else None
    record = plan_record(plan, model, where, time)
    data = data_record(config, model, where.world_size)
    record |= {} if data is None else {"data": data}
    if json:
        record |= {"placement": placement_record(plan.placement)} if placement else {}
        print(json_module.dumps(record, indent=2))
    else:
        lines = plan_report(plan, record, where)
        lines += [] if data is None else ["", *data_report(data)]
        lines += ["", "[Placement]", *placement_table(plan.placement)] if placement else []
        print("\n".join(lines))
    check_fits(config, planner, plan, where.limits)
    return config


def plan_report(plan: Plan, record: dict[str, Any], where: Target) -> list[str]:
    """The plan for people. record: as for programs."""
    needed, limit, host_limit = record["needed_bytes"], where.limits.device, where.limits.host
    free = None if limit is None or needed > limit else {"Free": limit - needed}
    lines = [
        "[Allocator State]",
        *allocator_table(plan.usage, free),
        "",
        "[Plan]",
        f"  Device:          {where.spec.name}",
        f"  Memory:          {mib(needed)}",
        f"  Parameters:      {record['parameters']:,}",
        f"  Tokens per step: {plan.tokens:,}",
        f"  FLOPs per token: {record['flops_per_token'] / 1e9:.3f} G",
    ]
    if plan.host_bytes and where.spec != HOST_SPEC:
        lines.insert(-3, f"  Host memory:     {mib(plan.host_bytes)}")
    if predicted := record["predicted"]:
        seconds, parts = predicted["step_seconds"], predicted["parts_seconds"].items()
        shares = [f"{name.replace('_', '-')} {s / seconds:.1%}" for name, s in parts if s]
        lines += [
            f"  Predicted:       {predicted['tokens_per_second']:,.0f} tokens/s, a step in "
            f"{seconds:.3g} s",
            f"  Of which:        {', '.join(shares)}",
            f"  Card's speed:    {predicted['source']}",
        ]
    if record["fits"] is None:
        return [*lines, "  Fits:            compare with the card, or give --gpu-memory"]
    rooms = [] if limit is None else [room(limit)]
    rooms += [] if host_limit is None else [f"{room(host_limit)} of host memory"]
    fits = "yes" if record["fits"] else "no"
    return [*lines, f"  Fits:            {fits}, into {' and '.join(rooms)}"]


def plan_record(
    plan: Plan, model: ModelConfig, where: Target, time: StepTime | None
) -> dict[str, Any]:
    """The plan for programs; sizes in bytes. fits is null where the card's memory is not known.

    needed_bytes is what is compared with limit_bytes, host_bytes with host_limit_bytes. predicted
    is null where no card is known.
    """
    needed, limits = needed_bytes(plan, where.spec), where.limits
    excess = limits.excess(needed, plan.host_bytes)
    return {
        "device": where.spec.name,
        "parameters": parameter_count(model),
        "tokens_per_step": plan.tokens,
        "flops_per_token": plan.flops * plan.world_size / plan.tokens,
        "traffic_bytes": plan.traffic,
        "launches": plan.launches,
        "memory": plan.usage.categories,
        "stack": [{"name": name, "bytes": size} for name, size in plan.usage.stack],
        "device_bytes": plan.usage.device_bytes,
        "pinned_bytes": plan.usage.sizes.host,
        "needed_bytes": needed,
        "limit_bytes": limits.device,
        "host_bytes": plan.host_bytes,
        "host_limit_bytes": limits.host,
        "fits": None if limits.device is None and not excess else not excess,
        "predicted": time and _predicted(plan.tokens, time) | {"source": where.card.source},
    }


def _predicted(tokens: int, time: StepTime) -> dict[str, Any]:
    return {
        "tokens_per_second": tokens / time.total,
        "step_seconds": time.total,
        "parts_seconds": time.parts,
    }


# ------------------------------------------------------------------------------------------------
# The best configurations


def fit_report(found: list[Candidate], where: Target, log_file: bool) -> list[str]:
    """For people: the fastest first, each with its command line."""
    host = "not limited" if where.limits.host is None else room(where.limits.host)
    lines = [
        "[Fit]",
        f"  Device:          {where.spec.name}, {room(where.limits.device)}",
        f"  Tokens per step: {found[0].need.tokens:,}, as given",
    ]
    if where.card is not None:  # on the CPU all memory is one, and nothing is known of its speed
        lines.insert(2, f"  Host memory:     {host}")
        lines.append(f"  Speed:           of {where.card.name}, {where.card.source}")
    for number, candidate in enumerate(found, start=1):
        need, config = candidate.need, candidate.config
        facts = [f"{config.batch_size} x {config.grad_accumulation} sequences", mib(need.device)]
        if where.card is not None:
            facts.insert(0, f"{need.speed:,.0f} tokens/s")
            facts.append(f"{mib(need.host)} of host memory")
        command = shlex.join(command_line(config, log_file=log_file))
        lines += ["", f"{number}. {', '.join(facts)}", f"   {command}"]
    return lines


def fit_record(found: list[Candidate], where: Target, log_file: bool) -> dict[str, Any]:
    """For programs; sizes in bytes."""
    return {
        "device": where.spec.name,
        "limit_bytes": where.limits.device,
        "host_limit_bytes": where.limits.host,
        "card": where.card and where.card.name,
        "source": where.card and where.card.source,
        "found": [
            {
                "command": command_line(candidate.config, log_file=log_file),
                "needed_bytes": candidate.need.device,
                "host_bytes": candidate.need.host,
                "predicted": where.card and _predicted(candidate.need.tokens, candidate.need.time),
            }
            for candidate in found
        ],
    }


def choose(config: TrainConfig, model: ModelConfig, given: frozenset[str]) -> TrainConfig:
    """The fastest configuration that fits into this machine: `llmq train --auto`.

    given: options that keep their values. Raises OutOfMemory if there is none.
    """
    machine = choose_machine(config.device, config.gpus)
    check_machine(config, model, machine)
    limits = memory_limit(config, machine)
    if machine.kind == "cuda":
        from llmq.runtime.gpu_info import least_free

        free = least_free(machine.world_size) + CONTEXT_WHEN_ASKED
        limits = replace(limits, device=min(limits.device, free))
    where = Target(
        spec=machine.spec,
        backend=attention_backend(config, model, machine),
        limits=limits,
        world_size=machine.world_size,
        card=card_of(machine.spec) if machine.kind == "cuda" else None,
    )
    found = Fit(config, where.planner(model), where.limits, given).search()
    print("\n".join(fit_report(found[:1], where, "log_file" in given)))
    print()
    return found[0].config
