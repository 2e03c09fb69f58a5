"""The machine that a plan is for: the one of `llmq plan`'s options, or this one."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import MIB
from llmq.base.errors import ConfigError, warn
from llmq.options.cards import Card, card_from, card_of, card_with, find_card, rig_card, spec_of
from llmq.options.options import TrainConfig
from llmq.options.rules import RULES
from llmq.plan.checks import attention_backend, check_machine, installed_attention
from llmq.plan.cost import ONE_MACHINE, Network, StepTime
from llmq.plan.estimate import Planner
from llmq.plan.memory import Limits, kept_free, memory_limit
from llmq.runtime.device import HOST_SPEC, DeviceSpec
from llmq.runtime.host_usage import available_host_memory
from llmq.runtime.machine import PLAN_SPEC, choose_machine


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTarget:
    """The machine that a plan is for. reserve: bytes of each device that are to stay free, which
    the limits leave out. card: whose speed is predicted, or None. named: whether that card is what
    was asked for, and not only one with as much memory. world_size: GPUs of all machines, which the
    network joins. visible_share: what documents leave of attention, as far as it is known."""

    spec: DeviceSpec
    backend: str
    limits: Limits
    world_size: int
    network: Network = ONE_MACHINE
    reserve: int = 0
    card: Card | None = None
    named: bool = False
    visible_share: float = 1.0

    def planner(self, model: ModelConfig) -> Planner:
        """For this machine."""
        card = self.card or card_of(self.spec)
        shared = (self.spec, self.backend, card, self.world_size, self.visible_share)
        return Planner(model, *shared, self.network)

    def predicted(self, tokens: int, time: StepTime) -> dict[str, Any]:
        """The speed of a step of so many tokens, for programs."""
        return {
            "tokens_per_second": tokens / time.total,
            "step_seconds": time.total,
            "parts_seconds": time.parts,
            "source": self.card.source,
            "error": self.card.error_of(self.world_size),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    """The options of `llmq plan` about the machine. gpu_memory, host_memory: bytes. card: words of
    its name; card_file: the report of `llmq rig` there. reserve: bytes of a GPU's memory that are
    to stay free, None for what --reserve says. machines: of as many GPUs each; network: bytes per
    second of what joins them."""

    gpu_memory: int | None = None
    host_memory: int | None = None
    card: str | None = None
    card_file: Path | None = None
    reserve: int | None = None
    machines: int = 1
    network: int | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether a card is named, which need not be here."""
        return self.card is not None or self.card_file is not None


def target(
    config: TrainConfig, model: ModelConfig, asked: MachineOptions, *, search: bool
) -> PlanTarget:
    """The machine that is asked for; never loads CUDA. Raises ConfigError for contradictions.
    search: --fit, which leaves room for a desktop on a card where nobody has said how much is
    free."""
    machines, gpu_memory, reserve = asked.machines, asked.gpu_memory, asked.reserve
    joined = _network(machines, asked.network, predicts=search or asked.is_elsewhere)
    world_size = max(config.gpus, 1) * machines
    if config.device == "cpu":
        for name in ("gpu_memory", "card", "reserve", "card_file"):
            if getattr(asked, name) is not None:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag}: has no meaning with --device cpu, use --memory-limit")
        here = world_size // machines
        least = min(filter(None, (asked.host_memory, available_host_memory()))) // here
        limits = Limits(device=min(least, config.memory_limit or least))
        rest = {"world_size": world_size, "network": joined}
        return PlanTarget(spec=HOST_SPEC, backend="native", limits=limits, **rest)
    card = _card(asked.card, asked.card_file, world_size // machines)
    if card is not None:
        RULES.check(config, gpu=spec_of(card))
    spec = PLAN_SPEC if card is None else spec_of(card)
    if card is not None and card.measured is not None:
        spec = card.measured.spec()
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
    )


def _card(words: str | None, file: Path | None, gpus: int) -> Card | None:
    """The card that --card and --card-file name, with the rates that were measured of it, if there
    are any."""
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
    """The network that --machines and --network describe."""
    if machines == 1 and rate is not None:
        raise ConfigError("--network: joins several machines: give --machines")
    if machines > 1 and rate is None and predicts:
        raise ConfigError("--machines: how fast is what joins them? Give --network, as 25GB/s")
    return Network(machines, float(rate or math.inf))


CONTEXT_WHEN_ASKED = 256 * MIB  # of CONTEXT_BYTES, taken already when the free memory is read


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
