"""`llmq plan`: the printed plan of one configuration."""

from __future__ import annotations

import functools
import json as json_module
from dataclasses import asdict, replace
from typing import Any

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import GIB
from llmq.base.errors import ConfigError, warn
from llmq.base.shares import shown
from llmq.options.conditions import Ranks
from llmq.options.options import TrainConfig
from llmq.options.rules import RULES
from llmq.plan.advice import check_fits
from llmq.plan.checks import check_machine
from llmq.plan.cost import StepTime, cost_by_kind, exposed_seconds, rollout_time
from llmq.plan.epoch import data_record, data_report
from llmq.plan.fit import Fit, run_fit
from llmq.plan.memory import (
    Limits,
    SsdUse,
    allocator_table,
    disk_use,
    kept_free,
    mib,
    needed_bytes,
    room,
)
from llmq.plan.placement_table import placement_record, placement_table
from llmq.plan.plan import Plan, plan_generation
from llmq.plan.target import MachineOptions, PlanTarget, target
from llmq.report.tables import labelled
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.machine import Machine
from llmq.runtime.world import World
from llmq.state.params import parameter_count
from llmq.state.placement import trained_count


def run_plan(
    config: TrainConfig,
    model: ModelConfig,
    asked: MachineOptions = MachineOptions(),  # noqa: B008 - immutable
    *,
    fit: frozenset[str] | None = None,
    placement: bool = False,
    json: bool = False,
    teacher: tuple[TrainConfig, ModelConfig] | None = None,
) -> TrainConfig:
    """Print the plan of a run, or with `fit` the fastest configurations that fit; return the first.
    asked: the machine. fit: names of options that keep their values in a search. placement: True
    also prints where all tensors lie. teacher: another model beside the run's. Raises OutOfMemory,
    after printing the plan, if nothing fits."""
    if placement and fit is not None:
        raise ConfigError("--placement: has no meaning with --fit, use it with what that finds")
    where, machines = target(config, model, asked, search=fit is not None), asked.machines
    kind = "host" if where.spec == HOST_SPEC else "cuda"
    world = World.like(where.world_size, machines)
    check_machine(config, model, Machine(kind=kind, note=None, spec=where.spec, world=world))
    warn(*RULES.idle(config, ranks=Ranks(where.world_size, machines)))
    has_data = not (config.only_scores or config.samples)
    data = data_record(config, model, where.world_size) if has_data else None
    where = replace(where, visible_share=(data or {}).get("visible_share") or 1.0)
    if teacher is not None:
        where = _beside_teacher(where, *teacher)
    planner = where.planner(model)
    if fit is not None:
        return run_fit(Fit(config, planner, where.limits, fit), where, json=json)
    plan = planner.plan(planner.with_fewest_parts(config))
    time = planner.time(config, plan) if where.named else None
    disk = disk_use(config, model, plan.placement)
    record = plan_record(config, plan, model, where, time) | disk.record()
    record |= {"shares": time and planner.shares(config, plan)}
    record |= {"trained_parameters": trained_count(config, model)}
    ssd = SsdUse.of(plan)
    record |= {} if ssd is None else {"ssd": asdict(ssd)}
    record |= {} if data is None else {"data": data}
    rollout = _rollout(config, model, plan, where) if config.samples else None
    record |= {} if rollout is None else {"rollout": rollout}
    if json:
        record |= {"placement": placement_record(plan.placement)} if placement else {}
        record |= {"kinds": _kinds(plan, where)}
        print(json_module.dumps(record, indent=2))
    else:
        disks = {} if config.only_scores else disk.facts()
        disks |= {} if ssd is None else {"SSD": ssd.words(time and time.total)}
        lines = plan_report(plan, record, where, disks)
        lines += [] if data is None else ["", *data_report(data)]
        lines += [] if rollout is None else ["", "[Rollout]", *_rollout_lines(rollout)]
        lines += ["", "[Placement]", *placement_table(plan.placement)] if placement else []
        print("\n".join(lines))
    check_fits(config, planner, plan, where.limits)
    return config


def _beside_teacher(where: PlanTarget, config: TrainConfig, model: ModelConfig) -> PlanTarget:
    """The machine with the memory that a teacher leaves. config, model: the teacher's."""
    plan = where.planner(model).plan(config)
    needed, limits = needed_bytes(plan, where.spec), where.limits
    device = limits.device and max(limits.device - needed, 0)
    host = limits.host and max(limits.host - plan.host_bytes, 0)
    return replace(where, limits=Limits(device=device, host=host), beside=needed)


def plan_report(
    plan: Plan, record: dict[str, Any], where: PlanTarget, disk: dict[str, str]
) -> list[str]:
    """Lines of the plan for people. record: the result of plan_record and more facts. disk: facts
    about the disk."""
    needed, limit, count = record["needed_bytes"], where.limits.device, record["trained_parameters"]
    free = None if limit is None or needed > limit else {"Free": limit - needed}
    trained = "" if count == record["parameters"] else f", and {count:,} that are trained"
    facts = {
        "Device": where.spec.name,
        "Machines": None if plan.machines == 1 else _machines(plan),
        "Memory": mib(needed),
        "Each card": _each_card(where, needed),
        "Teacher": mib(where.beside) + " more" if where.beside else None,
        "Host memory": mib(plan.host_bytes)
        if plan.host_bytes and where.spec != HOST_SPEC
        else None,
        "Parameters": f"{record['parameters']:,}{trained}",
        "Tokens per step": f"{plan.tokens:,}",
        "FLOPs per token": f"{record['flops_per_token'] / 1e9:.3f} G",
        **disk,
        **_speed_facts(record, where),
        "Shares": record["shares"] and f"{shown(record['shares'])} micro-batches (--share)",
        "Fits": _verdict(record, where, free),
    }
    return ["[Allocator State]", *allocator_table(plan.usage, free), "", "[Plan]", *_lines(facts)]


def _rollout(
    config: TrainConfig, model: ModelConfig, plan: Plan, where: PlanTarget
) -> dict[str, Any]:
    """The rollout of `llmq rl`, for programs. It uses the memory of the activations, which the plan
    of the step counts. seconds is null without a card."""
    made = plan_generation(config, model, where.spec, where.backend, plan)
    time = rollout_time(plan, made, config, where.card) if where.named else None
    return {
        "samples": config.prompts_per_step * config.num_samples,
        "prompt_tokens": config.seq_len - config.max_new_tokens,
        "new_tokens": config.max_new_tokens,
        "updates": config.updates,
        "texts_at_a_time": made.texts(config.seq_len),
        "blocks_bytes": made.blocks_bytes,
        "seconds": time and time._asdict(),
    }


def _rollout_lines(rollout: dict[str, Any]) -> list[str]:
    """Lines of the plan about the rollout of `llmq rl`. rollout: the result of `_rollout`."""
    facts, seconds = {}, rollout["seconds"]
    facts["Samples"] = (
        f"{rollout['samples']} of {rollout['new_tokens']} tokens, behind prompts of "
        f"{rollout['prompt_tokens']}, the longest that fit"
    )
    facts["At a time"] = (
        f"{rollout['texts_at_a_time']} on each GPU, in {mib(rollout['blocks_bytes'])} of keys and "
        "values, where activations lie in training"
    )
    if seconds is not None:
        parts = ", ".join(f"{name} {s:.3g} s" for name, s in seconds.items() if s)
        updates = f" ({rollout['updates']} updates)" if rollout["updates"] > 1 else ""
        facts["Time"] = (
            f"{sum(seconds.values()):.3g} s{updates}: {parts}; the reward function's time comes "
            "on top"
        )
    return _lines(facts)


_lines = functools.partial(labelled, width=17)


def _each_card(where: PlanTarget, needed: int) -> str | None:
    """Text on the part of each card's memory that is needed, where cards differ."""
    rooms = (f"{needed / GIB / card.memory:.0%} of {card.name}" for card in where.cards)
    return ", ".join(dict.fromkeys(rooms)) or None


def _machines(plan: Plan) -> str:
    each = plan.world_size // plan.machines
    whole = "the state is divided among all of them"
    state = whole if plan.shards == plan.world_size else "a replica of the state on each"
    return f"{plan.machines}, of {each} GPUs; {state}"


def _speed_facts(record: dict[str, Any], where: PlanTarget) -> dict[str, str | None]:
    """Facts about the predicted speed, by label; {} without a prediction."""
    predicted = record["predicted"]
    if not predicted:
        return {}
    seconds, speed = predicted["step_seconds"], predicted["tokens_per_second"]
    parts = predicted["parts_seconds"].items()
    shares = [f"{name.replace('_', '-')} {s / seconds:.1%}" for name, s in parts if s]
    error, exposed = where.card.plus_minus(where.world_size), predicted.get("exposed_seconds")
    energy = predicted["tokens_per_joule"]
    return {
        "Predicted": f"{speed:,.0f} tokens/s{error}, a step in {seconds:.3g} s",
        "Energy": energy and f"{energy:,.1f} tokens/J, at {where.card.power} W",
        "Of which": ", ".join(shares),
        "Communication": None if exposed is None else f"{exposed / seconds:.1%} of the step",
        "Card's speed": predicted["source"],
    }


def _verdict(record: dict[str, Any], where: PlanTarget, free: dict[str, int] | None) -> str:
    """Text that says if the plan fits. free: free bytes, as allocator_table takes them."""
    limit, host_limit = where.limits.device, where.limits.host
    if record["fits"] is None:
        return "compare with the card, or give --gpu-memory"
    rooms = [] if limit is None else [room(limit)]
    rooms += [] if host_limit is None else [f"{room(host_limit)} of host memory"]
    verdict = f"{'yes' if record['fits'] else 'no'}, into {' and '.join(rooms)}"
    if where.reserve:
        return f"{verdict}, with {room(where.reserve)} left free (--reserve)"
    if free and where.named and free["Free"] < kept_free(where.spec.name, limit, None):
        return f"{verdict}; beside a desktop it may not, {room(free['Free'])} are left"
    return verdict


def plan_record(
    config: TrainConfig, plan: Plan, model: ModelConfig, where: PlanTarget, time: StepTime | None
) -> dict[str, Any]:
    """The plan for programs; sizes in bytes. fits is null if the card's memory is unknown.
    needed_bytes compares with limit_bytes, host_bytes with host_limit_bytes. predicted is null
    without a card; its error is null if `llmq rig` has measured this machine."""
    needed, limits = needed_bytes(plan, where.spec), where.limits
    excess = limits.excess(needed, plan.host_bytes)
    return {
        "device": where.spec.name,
        "machines": plan.machines,
        "shards": plan.shards,
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
        "teacher_bytes": where.beside,
        "limit_bytes": limits.device,
        "host_bytes": plan.host_bytes,
        "host_limit_bytes": limits.host,
        "reserve_bytes": where.reserve,
        "fits": None if limits.device is None and not excess else not excess,
        "predicted": time and where.predicted(config, plan.tokens, time) | _exposed(plan, where),
    }


def _kinds(plan: Plan, where: PlanTarget) -> list[dict[str, Any]]:
    """Cost of a rank's launches in a step, by kind, for programs."""
    card = where.card if where.named else None
    costs = cost_by_kind(plan, card, where.visible_share, where.network)
    keys = ("kind", "launches", "flops", "bytes", "seconds")
    return [dict(zip(keys, (name, *cost), strict=True)) for name, cost in costs.items()]


def _exposed(plan: Plan, where: PlanTarget) -> dict[str, float]:
    """Additional fields of a plan of several GPUs."""
    if plan.world_size == 1 or where.cards:
        return {}
    shares = (where.visible_share, where.network)
    return {"exposed_seconds": exposed_seconds(plan, where.card, *shares)}
