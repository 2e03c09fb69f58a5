"""Update rules, one per file; a rule declares its moments, and all other code reads the
declaration."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from llmq.base.errors import LlmqError
from llmq.options.groups.optim import OptimOptions
from llmq.options.removed import current_options
from llmq.state.params import Slab
from llmq.state.rules.adamw import AdamW
from llmq.state.rules.galore import GaLore
from llmq.state.rules.muon import Muon, NorMuon
from llmq.state.rules.rule import OptimizerState, UpdateRule

RULES: dict[str, type[UpdateRule]] = {
    "adamw": AdamW,
    "muon": Muon,
    "normuon": NorMuon,
    "galore": GaLore,
}

AVERAGE = OptimizerState(
    name="ema", group="ema", category="EMA", dtype=None, offload="offload_master"
)
"""The moving average of weights (`--ema`), stored like a moment. The average begins as a copy of
the weights."""
FIRST = OptimizerState(
    name="first", group="first", category="Reference", dtype=None, offload="offload_master"
)
"""The weights at the start of the run (`--keep-reference`), stored like a moment."""


def kept(optim: OptimOptions, slab: Slab | None = None) -> tuple[OptimizerState, ...]:
    """Return the states that a run keeps for a slab from update to update. slab: None for the
    states of all slabs."""
    rule = rule_class(optim.optimizer)
    moments = rule.moments if slab is None else rule.moments_of(slab)
    return (*moments, *[AVERAGE] * (optim.ema > 0), *[FIRST] * optim.keep_reference)


def rule_class(name: str) -> type[UpdateRule]:
    return RULES[name]


def optim_saved(options: Mapping[str, Any]) -> OptimOptions:
    """Return the optimizer options of a checkpoint. The rule is "adamw" if an old checkpoint names
    no rule. Raise LlmqError for an unknown rule."""
    today = current_options(options, "the checkpoint: ", quiet=True)
    names = {field.name for field in fields(OptimOptions)} & today.keys()
    optim = OptimOptions(**{name: today[name] for name in names})
    if optim.optimizer not in RULES:
        name = optim.optimizer
        raise LlmqError(f"a checkpoint of --optimizer {name}, which this version does not have")
    return optim


def rule_of(optim: OptimOptions) -> UpdateRule:
    return rule_class(optim.optimizer)(optim)
