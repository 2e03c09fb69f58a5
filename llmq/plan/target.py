"""Machine of a plan: the machine that options of `llmq plan` describe, or this machine."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import MIB
from llmq.base.errors import ConfigError, warn
from llmq.options.cards import (
    Card,
    card_from,
    card_of,
    card_with,
    cards_here,
    find_card,
    rig_card,
    spec_of,
    together,
)
from llmq.options.conditions import offloads_optimizer
from llmq.options.options import TrainConfig
from llmq.options.rules import RULES
from llmq.plan.checks import attention_backend, check_machine, installed_attention
from llmq.plan.cost import ONE_MACHINE, Network, StepTime
from llmq.plan.estimate import Planner
from llmq.plan.memory import Limits, kept_free, memory_limit
from llmq.runtime.device import HOST_SPEC, DeviceSpec
from llmq.runtime.host_usage import available_host_memory
from llmq.runtime.machine import PLAN_SPEC, choose_machine, common_spec

# Share of the power limit that a card draws while it waits; 0.23 to 0.35 on an H100 and an H200.
WAITING = 0.26


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTarget:
    """The machine of a plan. reserve: bytes of each device that stay free, already subtracted from
    the limits, as are `beside` bytes of a teacher. card: the card that predicts speed, or None.
    named: True if the user named the card; False if only its memory is similar. world_size: GPUs of
    all machines in the network. visible_share: share of causal query-key pairs that document masks
    leave; 1 if unknown. cards: each rank's card if cards differ, see Planner; then `card` joins
    their properties."""

    spec: DeviceSpec
    backend: str
    limits: Limits
    world_size: int
    network: Network = ONE_MACHINE
    reserve: int = 0
    beside: int = 0
    card: Card | None = None
    named: bool = False
    visible_share: float = 1.0
    cards: tuple[Card, ...] = ()

    def planner(self, model: ModelConfig) -> Planner:
        """Return a planner for this machine."""
        card = self.card or card_of(self.spec)
        return Planner(
            model,
            self.spec,
            self.backend,
            card,
            self.world_size,
            self.visible_share,
            self.network,
            cards=self.cards,
        )

    def predicted(self, config: TrainConfig, tokens: int, time: StepTime) -> dict[str, Any]:
        """Speed of a step of `tokens` tokens, and energy at the power limit, for programs. An
        update in host memory waits for the bus."""
        waits = time.parts["transfers"] + offloads_optimizer(config) * time.parts["optimizer"]
        joules = self.card.joules(time.total - (1 - WAITING) * waits, self.world_size)
        return {
            "tokens_per_second": tokens / time.total,
            "tokens_per_joule": joules and tokens / joules,
            "step_seconds": time.total,
            "parts_seconds": time.parts,
            "source": self.card.source,
            "error": self.card.error_of(self.world_size),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    """Options of `llmq plan` about the machine. gpu_memory, host_memory: bytes. card: words of the
    card's name; card_file: report of `llmq rig` on that machine. reserve: bytes of a GPU's memory
    that stay free; None: the default of --reserve. machines: number of equal machines; network:
    bytes per second between machines."""

    gpu_memory: int | None = None
    host_memory: int | None = None
    card: str | None = None
    card_file: Path | None = None
    reserve: int | None = None
    machines: int = 1
    network: int | None = None

    @property
    def is_elsewhere(self) -> bool:
        """True if a card is named, which may be elsewhere."""
        return self.card is not None or self.card_file is not None


def target(
    config: TrainConfig, model: ModelConfig, asked: MachineOptions, *, search: bool
) -> PlanTarget:
    """Return the machine of these options; never loads CUDA. Raises ConfigError for contradictions.
    search: True for --fit, which leaves room for a desktop unless the free memory is given."""
    machines, gpu_memory, reserve = asked.machines, asked.gpu_memory, asked.reserve
    joined = _network(machines, asked.network, predicts=search or asked.is_elsewhere)
    world_size = max(config.gpus, 1) * machines
    if config.device == "cpu":
        for name in ("gpu_memory", "card", "reserve", "card_file"):
            if getattr(asked, name) is not None:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag}: has no meaning with --device cpu, use --memory-limit")
        ranks = world_size // machines
        least = min(filter(None, (asked.host_memory, available_host_memory()))) // ranks
        limits = Limits(device=min(least, config.memory_limit or least))
        return PlanTarget(
            spec=HOST_SPEC,
            backend="native",
            limits=limits,
            world_size=world_size,
            network=joined,
        )
    cards = _cards(asked, config.gpus)
    world_size = len(cards) or world_size
    card = together(cards) if cards else _card(asked.card, asked.card_file, world_size // machines)
    spec = PLAN_SPEC if card is None else spec_of(card)
    if cards:
        spec = replace(common_spec([spec_of(each) for each in cards]), name=card.name)
    elif card is not None and card.measured is not None:
        spec = card.measured.spec()
    if card is not None:
        RULES.check(config, gpu=spec)
    memory = gpu_memory or (None if card is None else spec.memory)
    if reserve is not None and memory is None:
        raise ConfigError("--reserve: of how much memory? Give --gpu-memory or --card")
    if memory is not None:
        default = None if search and gpu_memory is None else 0
        reserve = kept_free(spec.name, memory, default if reserve is None else reserve)
        memory -= reserve
    device = min(filter(None, (memory, config.memory_limit)), default=None)
    return PlanTarget(
        spec=spec,
        backend=installed_attention(config, model, spec),
        limits=Limits(device=device, host=asked.host_memory),
        world_size=world_size,
        network=joined,
        reserve=reserve or 0,
        card=card or (None if device is None else card_with(device)),
        named=card is not None,
        cards=cards if len({*cards}) > 1 else (),
    )


def _cards(asked: MachineOptions, gpus: int) -> tuple[Card, ...]:
    """Each rank's card, with rates measured on one such card if there are any; () unless --card
    names several cards. gpus: the value of --gpus."""
    words = [] if asked.card is None else asked.card.split(",")
    if len(words) < 2:
        return ()
    if gpus not in (0, len(words)) or asked.machines > 1 or asked.card_file is not None:
        raise ConfigError(
            f"--card: names {len(words)} GPUs of one machine, which are all that it has: leave "
            "--gpus, --machines and --card-file out"
        )
    return tuple(rig_card(find_card(each), 1) for each in words)


def _card(words: str | None, file: Path | None, gpus: int) -> Card | None:
    """The card of --card and --card-file, with measured rates if there are any; None if neither is
    given."""
    if file is None:
        return None if words is None else rig_card(find_card(words), gpus)
    card = card_from(file)
    if words is not None and find_card(words).driver_name != card.driver_name:
        raise ConfigError(
            f"--card-file: '{file}' is of {card.name}, and --card means {find_card(words).name}"
        )
    if gpus > card.measured.gpus:
        warn(
            f"--card-file: '{file}' is of {card.measured.gpus} GPUs: for {gpus} of them links "
            "and host memory are taken from the data sheet"
        )
    return card


def _network(machines: int, rate: int | None, *, predicts: bool) -> Network:
    """The network of --machines and --network."""
    if machines == 1 and rate is not None:
        raise ConfigError("--network: joins several machines: give --machines")
    if machines > 1 and rate is None and predicts:
        raise ConfigError("--machines: how fast is what joins them? Give --network, as 25GB/s")
    return Network(machines, float(rate or math.inf))


CONTEXT_WHEN_ASKED = 256 * MIB  # part of CONTEXT_BYTES that is in use when free memory is read


def target_here(config: TrainConfig, model: ModelConfig, reserve: int | None = None) -> PlanTarget:
    """Return this machine, by --device and --gpus. reserve: bytes of each GPU's currently free
    memory that stay free; None: the default of --reserve."""
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
    cards = cards_here(machine.specs) if on_gpus else ()
    here = together(cards) if cards else rig_card(card_of(machine.spec), machine.world_size)
    return PlanTarget(
        spec=machine.spec,
        backend=attention_backend(config, model, machine),
        limits=limits,
        world_size=machine.world_size,
        reserve=reserve,
        card=here if on_gpus else None,
        cards=cards,
    )
