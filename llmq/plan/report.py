"""`llmq plan`, and how `llmq train --auto` chooses: for which machine, what is printed."""

from __future__ import annotations

import functools
import json as json_module
import shlex
from bisect import bisect_right
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import MIB, OPTION_DTYPES
from llmq.base.errors import ConfigError, DataError, warn
from llmq.data.dataset import DataSet, SequenceLayout
from llmq.data.epoch_plan import Split
from llmq.data.reader import documents_of
from llmq.options.cards import card_of, rig_card
from llmq.options.conditions import Ranks
from llmq.options.option_file import command_line
from llmq.options.options import TrainConfig
from llmq.options.rules import RULES
from llmq.plan.advice import check_fits
from llmq.plan.checks import attention_backend, check_machine
from llmq.plan.cost import StepTime, cost_by_kind, exposed_seconds, step_time
from llmq.plan.disk import DiskUse, disk_use
from llmq.plan.estimate import Planner
from llmq.plan.faster import EightBitGain, eight_bit_gain, larger_batch
from llmq.plan.fit import SHOWN, Candidate, Fit, search_bases
from llmq.plan.memory import (
    allocator_table,
    kept_free,
    memory_limit,
    mib,
    needed_bytes,
    room,
)
from llmq.plan.plan import Plan
from llmq.plan.target import MachineOptions, PlanTarget, target
from llmq.report.tables import labelled, terminal_table
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.machine import Machine, choose_machine
from llmq.runtime.world import World
from llmq.state.params import parameter_count
from llmq.state.placement import Placement, SlabPlacement, Store, place, table_of, trained_count

# Tensors of a slab, as the columns of [Placement]: then come moments.
PLACED = ("work", "base", "master", "part", "transposed", "mirror", "gradient")
NAMES = {dtype: name for name, dtype in OPTION_DTYPES.items()}


def _groups(placement: Placement) -> list[tuple[str, SlabPlacement]]:
    """Neighbours that are placed alike as one: "layers.0-27"."""
    groups = []
    kinds = [(name.partition(".")[0], slab) for name, slab in placement.slabs.items()]
    for (_, alike), run in groupby(zip(kinds, placement.slabs, strict=True), itemgetter(0)):
        first, *others = [name for _, name in run]
        last = f"-{others[-1].partition('.')[2]}" if others else ""
        groups.append((first + last, alike))
    return groups


def _stores(slab: SlabPlacement, placement: Placement) -> dict[str, Store | None]:
    """By kind of tensor, in the order of the columns; of moments those that any slab has."""
    names = dict.fromkeys(name for other in placement.slabs.values() for name in other.moments)
    moments = {name: slab.moments.get(name) for name in names}
    return {kind: getattr(slab, kind) for kind in PLACED} | moments


def placement_record(placement: Placement) -> dict[str, Any]:
    """For programs. slabs: those that are placed alike in one row; head: see Placement."""
    rows = [
        {"slabs": name, "trainable": slab.trainable, "group": slab.group}
        | {kind: _record(store) for kind, store in _stores(slab, placement).items()}
        for name, slab in _groups(placement)
    ]
    return {"slabs": rows, "head": _record(placement.head)}


def _record(store: Store | None) -> dict[str, Any] | None:
    return None if store is None else asdict(store) | {"dtype": NAMES[store.dtype]}


def placement_table(placement: Placement) -> list[str]:
    """The lines of [Placement], without kinds of tensors that no slab has."""
    groups = [(name, slab, _stores(slab, placement)) for name, slab in _groups(placement)]
    every = dict.fromkeys(kind for *_, stores in groups for kind in stores)
    kinds = [kind for kind in every if any(stores[kind] for *_, stores in groups)]
    rows = []
    for name, slab, stores in groups:
        cells = [_words(stores[kind]) for kind in kinds]
        rows.append([name, slab.group if slab.trainable else "frozen", *cells])
    table = terminal_table(["slabs", "group", *kinds], rows, indent=2)
    head = [] if placement.head is None else [f"  LM head: {_words(placement.head)} beside these"]
    return [*table.splitlines(), *head]


def _words(store: Store | None) -> str:
    """A store in a few words: "bf16", "bf16 shard, pinned", "e4m3, in slots"."""
    if store is None:
        return "-"
    words = NAMES[store.dtype] + (" shard" if store.sharded else "")
    places = [store.memory.replace("_", "-")] if store.on_host else []
    return ", ".join([words, *places, *(["in slots"] if store.streamed else [])])


CONTEXT_WHEN_ASKED = 256 * MIB  # of CONTEXT_BYTES, taken already when the free memory is read


# ------------------------------------------------------------------------------------------------
# The plan of one configuration


def run_plan(
    config: TrainConfig,
    model: ModelConfig,
    asked: MachineOptions = MachineOptions(),  # noqa: B008 - nobody can change it
    *,
    fit: frozenset[str] | None = None,
    placement: bool = False,
    json: bool = False,
) -> TrainConfig:
    """`llmq plan`: print the plan of a run, or (fit) the fastest ones that fit; returns the first.
    asked: the machine. fit: options that keep their values in a search. placement: print, too,
    where everything lies. Raises OutOfMemory, after printing the plan, if it does not fit, or
    nothing does."""
    if placement and fit is not None:
        raise ConfigError("--placement: has no meaning with --fit, use it with what that finds")
    where, machines = target(config, model, asked, search=fit is not None), asked.machines
    kind = "host" if where.spec == HOST_SPEC else "cuda"
    of = {"spec": where.spec, "world": World.like(where.world_size, machines)}
    check_machine(config, model, Machine(kind=kind, note=None, **of))
    warn(*RULES.idle(config, ranks=Ranks(where.world_size, machines)))
    data = None if config.only_scores else data_record(config, model, where.world_size)
    where = replace(where, visible_share=(data or {}).get("visible_share") or 1.0)
    planner = where.planner(model)
    if fit is not None:
        return _search(Fit(config, planner, where.limits, fit), where, json)
    plan = planner.plan(planner.with_fewest_parts(config))
    speed = (where.card, where.visible_share, where.network)
    time = step_time(plan, *speed) if where.named else None
    disk = disk_use(config, model, plan.placement)
    record = plan_record(plan, model, where, time) | disk.record()
    record |= {"trained_parameters": trained_count(config, model)}
    record |= {} if data is None else {"data": data}
    record |= {"larger_batch": _larger_batch(config, planner, where) if record["fits"] else None}
    if json:
        record |= {"placement": placement_record(plan.placement)} if placement else {}
        record |= {"kinds": _kinds(plan, where)}
        print(json_module.dumps(record, indent=2))
    else:
        lines = plan_report(plan, record, where, {} if config.only_scores else disk.facts())
        lines += [] if data is None else ["", *data_report(data)]
        lines += ["", "[Placement]", *placement_table(plan.placement)] if placement else []
        print("\n".join(lines))
    check_fits(config, planner, plan, where.limits)
    return config


def _search(fit: Fit, where: PlanTarget, json: bool) -> TrainConfig:
    """--fit: print what is found, and return the fastest."""
    if where.limits.device is None:
        raise ConfigError("--fit: how much memory is there? Give --gpu-memory or --card")
    found = SearchResult.of(fit, where)
    if json:
        print(json_module.dumps(fit_record(found, where), indent=2))
    else:
        print("\n".join(fit_report(found, where)))
    return found.candidates[0].config


def plan_report(
    plan: Plan, record: dict[str, Any], where: PlanTarget, disk: dict[str, str]
) -> list[str]:
    """The plan for people. record: as for programs. disk: facts about it."""
    needed, limit, count = record["needed_bytes"], where.limits.device, record["trained_parameters"]
    free = None if limit is None or needed > limit else {"Free": limit - needed}
    trained = "" if count == record["parameters"] else f", and {count:,} that are trained"
    facts = {
        "Device": where.spec.name,
        "Machines": None if plan.machines == 1 else _machines(plan),
        "Memory": mib(needed),
        "Host memory": mib(plan.host_bytes)
        if plan.host_bytes and where.spec != HOST_SPEC
        else None,
        "Parameters": f"{record['parameters']:,}{trained}",
        "Tokens per step": f"{plan.tokens:,}",
        "FLOPs per token": f"{record['flops_per_token'] / 1e9:.3f} G",
        **disk,
        **_speed_facts(record, where),
        "Fits": _verdict(record, where, free),
    }
    return ["[Allocator State]", *allocator_table(plan.usage, free), "", "[Plan]", *_lines(facts)]


_lines = functools.partial(labelled, width=17)


def _machines(plan: Plan) -> str:
    each = plan.world_size // plan.machines
    whole = "the state is divided among all of them"
    state = whole if plan.shards == plan.world_size else "a replica of the state on each"
    return f"{plan.machines}, of {each} GPUs; {state}"


def _speed_facts(record: dict[str, Any], where: PlanTarget) -> dict[str, str | None]:
    """The facts about the predicted speed, and what would be faster."""
    predicted, larger = record["predicted"], record["larger_batch"]
    if not predicted:
        return {}
    seconds, speed = predicted["step_seconds"], predicted["tokens_per_second"]
    parts = predicted["parts_seconds"].items()
    shares = [f"{name.replace('_', '-')} {s / seconds:.1%}" for name, s in parts if s]
    error, exposed = where.card.plus_minus(where.world_size), predicted.get("exposed_seconds")
    return {
        "Predicted": f"{speed:,.0f} tokens/s{error}, a step in {seconds:.3g} s",
        "Of which": ", ".join(shares),
        "Communication": None if exposed is None else f"{exposed / seconds:.1%} of the step",
        "Card's speed": predicted["source"],
        "Faster": larger
        and f"by {larger['tokens_per_second'] / speed - 1:.1%} with {' '.join(larger['flags'])}, "
        f"in {mib(larger['needed_bytes'])}",
    }


def _verdict(record: dict[str, Any], where: PlanTarget, free: dict[str, int] | None) -> str:
    """Whether it fits. free: as the allocator's table has it."""
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
    plan: Plan, model: ModelConfig, where: PlanTarget, time: StepTime | None
) -> dict[str, Any]:
    """The plan for programs; sizes in bytes. fits is null where the card's memory is not known.
    needed_bytes is what is compared with limit_bytes, host_bytes with host_limit_bytes. predicted
    is null where no card is known, its error where `llmq rig` has measured this machine."""
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
        "limit_bytes": limits.device,
        "host_bytes": plan.host_bytes,
        "host_limit_bytes": limits.host,
        "reserve_bytes": where.reserve,
        "fits": None if limits.device is None and not excess else not excess,
        "predicted": time and _predicted(plan.tokens, time, where) | _exposed(plan, where),
    }


def _kinds(plan: Plan, where: PlanTarget) -> list[dict[str, Any]]:
    """The launches of a step of one rank, by kind; its cost for programs."""
    card = where.card if where.named else None
    costs = cost_by_kind(plan, card, where.visible_share, where.network)
    keys = ("kind", "launches", "flops", "bytes", "seconds")
    return [dict(zip(keys, (name, *cost), strict=True)) for name, cost in costs.items()]


def _predicted(tokens: int, time: StepTime, where: PlanTarget) -> dict[str, Any]:
    return {
        "tokens_per_second": tokens / time.total,
        "step_seconds": time.total,
        "parts_seconds": time.parts,
        "source": where.card.source,
        "error": where.card.error_of(where.world_size),
    }


def _exposed(plan: Plan, where: PlanTarget) -> dict[str, float]:
    """The lines that a plan of several GPUs has besides."""
    if plan.world_size == 1:
        return {}
    shares = (where.visible_share, where.network)
    return {"exposed_seconds": exposed_seconds(plan, where.card, *shares)}


def _larger_batch(
    config: TrainConfig, planner: Planner, where: PlanTarget
) -> dict[str, Any] | None:
    """For programs. It leaves room for a desktop, as a search does."""
    if not where.named or where.limits.device is None:
        return None
    free = 0 if where.reserve else kept_free(where.spec.name, where.limits.device, None)
    larger = larger_batch(config, planner, where.limits.less(free))
    if larger is None:
        return None
    return {
        "flags": larger.flags.split(),
        "tokens_per_second": larger.speed,
        "needed_bytes": larger.device,
    }


# ------------------------------------------------------------------------------------------------
# The best configurations


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The result of a search, the fastest first, and the number formats that would be faster."""

    candidates: list[Candidate]
    gains: list[EightBitGain]
    disk: DiskUse

    @classmethod
    def of(cls, fit: Fit, where: PlanTarget) -> SearchResult:
        """Search. Nothing is known of the speed of a CPU. Raises OutOfMemory if nothing fits."""
        (fit, candidates), model = search_bases(fit), fit.planner.model
        config = candidates[0].config
        shards = config.shards(where.world_size, where.network.machines)
        placement = place(config.for_step, table_of(config, model, shards), shards)
        return cls(
            candidates=candidates,
            gains=[] if where.card is None else eight_bit_gain(fit, candidates[0]),
            disk=disk_use(config, model, placement),
        )


def fit_report(found: SearchResult, where: PlanTarget, shown: int = SHOWN) -> list[str]:
    """For people: the fastest first, each with its command line. shown: so many of them."""
    card, host = where.card, where.limits.host
    facts = {
        "Device": f"{where.spec.name}, {room(where.limits.device)}",
        # On the CPU all memory is one, and nothing is known of its speed.
        "Host memory": card and ("not limited" if host is None else room(host)),
        "Left free": f"{room(where.reserve)} (--reserve)" if where.reserve else None,
        "Tokens per step": f"{found.candidates[0].need.tokens:,}, as given",
        **found.disk.facts(),
        "Speed": card and f"of {card.name}, {card.source}{card.plus_minus(where.world_size)}",
    }
    lines = ["[Fit]", *_lines(facts)]
    for number, candidate in enumerate(found.candidates[:shown], start=1):
        need, config = candidate.need, candidate.config
        told = [f"{config.batch_size} x {config.grad_accumulation} sequences", mib(need.device)]
        if card is not None:
            told = [f"{need.speed:,.0f} tokens/s", *told, f"{mib(need.host)} of host memory"]
        command = shlex.join(command_line(config))
        lines += ["", f"{number}. {', '.join(told)}", f"   {command}"]
    if found.gains:
        ways = [f"{way.speed:,.0f} tokens/s with {way.flags}" for way in found.gains]
        lines += ["", f"Faster, with coarser numbers: about {', '.join(ways)}"]
    return lines


def fit_record(found: SearchResult, where: PlanTarget) -> dict[str, Any]:
    """For programs; sizes in bytes."""
    return {
        "device": where.spec.name,
        "limit_bytes": where.limits.device,
        "host_limit_bytes": where.limits.host,
        "reserve_bytes": where.reserve,
        "card": where.card and where.card.name,
        "source": where.card and where.card.source,
        "found": [
            {
                "command": command_line(candidate.config),
                "needed_bytes": candidate.need.device,
                "host_bytes": candidate.need.host,
                "predicted": where.card
                and _predicted(candidate.need.tokens, candidate.need.time, where),
            }
            for candidate in found.candidates
        ],
        "coarser": [
            {"flags": way.flags.split(), "tokens_per_second": way.speed} for way in found.gains
        ],
    } | found.disk.record()


def choose(
    config: TrainConfig, model: ModelConfig, given: frozenset[str], reserve: int | None = None
) -> TrainConfig:
    """The fastest configuration that fits into this machine: `llmq train --auto`. given: options
    that keep their values. reserve: as target_here has it. Raises OutOfMemory if there is none."""
    where = target_here(config, model, reserve)
    found = SearchResult.of(Fit(config, where.planner(model), where.limits, given), where)
    print("\n".join(fit_report(found, where, shown=1)))
    print()
    return found.candidates[0].config


def target_here(config: TrainConfig, model: ModelConfig, reserve: int | None = None) -> PlanTarget:
    """This machine, as --device and --gpus mean it. reserve: bytes that stay free of each GPU's
    memory that is free now, None for what --reserve says."""
    machine = choose_machine(config.device, config.gpus)
    check_machine(config, model, machine)
    limits = memory_limit(config, machine)
    if machine.kind == "host":
        if reserve is not None:
            raise ConfigError("--reserve: has no meaning on the CPU, use --memory-limit")
        reserve = 0
    else:
        from llmq.runtime.gpu_info import drives_display, least_free

        free = min(machine.spec.memory, least_free(machine.world_size) + CONTEXT_WHEN_ASKED)
        display = drives_display(machine.world_size)
        reserve = kept_free(machine.spec.name, free, reserve, drives_display=display)
        limits = replace(limits, device=min(limits.device, free - reserve))
    on_gpus = machine.kind == "cuda"
    return PlanTarget(
        spec=machine.spec,
        backend=attention_backend(config, model, machine),
        limits=limits,
        world_size=machine.world_size,
        reserve=reserve,
        card=rig_card(card_of(machine.spec), machine.world_size) if on_gpus else None,
    )


SAMPLE = 256  # sequences whose documents are looked at


def data_record(config: TrainConfig, model: ModelConfig, world_size: int) -> dict[str, Any] | None:
    """The record of an epoch, for programs. None where files are read as they are: then it is not
    opened. problem: why nothing is known, such as files that are not there yet. visible_share: None
    without document masks, else what they leave of the causal pairs of query and key."""
    layout = SequenceLayout.of(config, config, config.pairs)
    if not layout.needs_documents and layout.weights is None:
        return None
    try:
        data = DataSet(
            config.train_patterns,
            seq_len=config.seq_len,
            vocab_size=model.vocab_size,
            split=Split(config.eval_fraction, held_out=False) if config.splits else None,
            layout=layout,
            everything=False,
        )
    except DataError as error:
        return {"problem": str(error)}
    up = 0 if config.drop_last else 1  # whether what does not fill a part counts
    groups = sum((count + up * (world_size - 1)) // world_size for count in data.plan.counts)
    sizes = (config.batch_size, config.grad_accumulation)
    steps = functools.reduce(lambda n, size: (n + up * (size - 1)) // size, sizes, groups)
    return {
        **data.record(),
        "tokens_per_epoch": data.plan.tokens(),
        "sequences": data.sequences,
        "padding": data.padding,
        "visible_share": _visible_share(data, config.train_seed) if layout.document_mask else None,
        "steps_per_epoch": steps,
        "lines": data.lines("train"),
    }


def _visible_share(data: DataSet, seed: int) -> float:
    """The mean of some sequences, evenly spread over the first epoch."""
    of_places = [data.plan.counts[part] for part in data.plan.parts(seed, 0)]
    edges = list(accumulate(of_places, initial=0))
    chosen = np.unique(np.linspace(0, edges[-1] - 1, SAMPLE).astype(int))
    pairs = 0
    for number in chosen.tolist():
        place = bisect_right(edges, number) - 1
        spans = data.plan.spans(seed, 0, place, number - edges[place])
        starts, _ = documents_of(spans, data.seq_len)
        lengths = np.diff([*np.unique(starts), data.seq_len])
        pairs += int((lengths**2).sum())
    return pairs / (len(chosen) * data.seq_len**2)


def data_report(record: dict[str, Any]) -> list[str]:
    """The same for people."""
    if "problem" in record:
        return ["[Data]", f"  not known: {record['problem']}"]
    share = record["visible_share"]
    return [
        "[Data]",
        *(f"  {line}" for line in record["lines"]),
        f"  Tokens per epoch: {record['tokens_per_epoch']:,}, {100 * record['padding']:.2f} % "
        "padding beside them",
        f"  Steps per epoch:  {record['steps_per_epoch']:,}",
        *(() if share is None else (f"  Attention sees:   {100 * share:.1f} % of unmasked",)),
    ]
