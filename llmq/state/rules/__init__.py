"""Update rules: one file each; everything else asks them for moments, unit and update."""

from __future__ import annotations

from llmq.options.options import TrainConfig
from llmq.state.rules.adamw import AdamW
from llmq.state.rules.rule import UpdateRule

RULES: dict[str, type[UpdateRule]] = {"adamw": AdamW}


def rule_class() -> type[UpdateRule]:
    """The rule of all runs: there is one, so that no option chooses."""
    return RULES["adamw"]


def rule_of(config: TrainConfig) -> UpdateRule:
    """The rule of a run. config: normalized."""
    return rule_class()(config)
