"""The plan of a run on the machine that it begins on."""

from __future__ import annotations

from typing import NamedTuple

from llmq.arch.model_config import ModelConfig
from llmq.options.cards import card_here
from llmq.options.options import TrainConfig
from llmq.plan.advice import check_fits
from llmq.plan.checks import attention_backend, check_machine
from llmq.plan.cost import Network
from llmq.plan.estimate import Planner
from llmq.plan.memory import memory_limit
from llmq.plan.plan import Plan, fewest_attention_parts
from llmq.runtime.machine import Machine


class RunPlan(NamedTuple):
    """A plan, the options that it is of, and by which attention it computes."""

    plan: Plan
    config: TrainConfig
    backend: str


def plan_run(config: TrainConfig, model: ModelConfig, machine: Machine) -> RunPlan:
    """Raises ConfigError for what the machine cannot compute, OutOfMemory for what does not fit."""
    planner, run = plan_unchecked(config, model, machine)
    check_fits(config, planner, run.plan, memory_limit(config, machine))
    return run


def plan_unchecked(
    config: TrainConfig, model: ModelConfig, machine: Machine
) -> tuple[Planner, RunPlan]:
    """As plan_run, whether it fits or not; and what has planned it."""
    check_machine(config, model, machine)
    backend, spec = attention_backend(config, model, machine), machine.spec
    network = Network(machine.world.num_machines)
    of_ranks = (machine.world_size, network.machines)
    planned = fewest_attention_parts(config, model, spec, backend, *of_ranks)
    card = card_here(spec, machine.world_size, cuda=machine.kind == "cuda")
    shared = (spec, backend, card, machine.world_size)
    planner = Planner(model, *shared, network=network, gpus=machine.world.ranks_here)
    return planner, RunPlan(planner.plan(planned), planned, backend)
