"""The table of rules: it names what exists, all of it is used, and one line of it is enough."""

from __future__ import annotations

import string
from dataclasses import dataclass, fields, replace
from unittest.mock import patch

import pytest

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import GIB, MIB
from llmq.base.errors import ConfigError
from llmq.options.cards import Card, find_card, spec_of
from llmq.options.conditions import AttentionHere, Here, Length, Ranks
from llmq.options.option_types import option
from llmq.options.options import OPTIONS, TrainConfig, options_with_rules
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.options.rule import EXACT, IDLE, IMPLY, REFUSE, SAVE, Rule, Rules, each, idle, refused
from llmq.options.rules import RULES
from llmq.plan.advice import advice
from llmq.plan.cost import PARTS, Network, StepTime
from llmq.plan.estimate import Estimate, Planner
from llmq.plan.fit import Fit, eight_bit_gain, search_bases
from llmq.plan.memory import Limits, OutOfMemory
from llmq.plan.shrink import Shrinker
from llmq.runtime.device import DeviceSpec

# The value of a rule's fact, by its name; None: texts only show it as it is.
FACTS = {
    "model": ModelConfig,
    "ranks": Ranks,
    "here": Here,
    "attention": AttentionHere,
    "card": Card,
    "gpu": DeviceSpec,
    "length": Length,
    "total": None,
    "script": None,
    "files": None,
    "measuring": None,
    "verification": None,
}


def rules() -> list[Rule]:
    return [single for rule in RULES.table for single in rule.each(TrainConfig)]


def changes_of(rule: Rule) -> set[str]:
    """Names of the options that a rule sets."""
    if rule.sets is None:
        return set()
    return set(rule.sets(TrainConfig().normalized()) if callable(rule.sets) else rule.sets)


def test_every_option_in_the_table_exists():
    for rule in rules():
        assert {rule.option, *changes_of(rule)} <= OPTIONS.keys(), rule
        assert rule.effect in (IMPLY, REFUSE, IDLE, SAVE, EXACT), rule
        assert rule.about is None or rule.about in FACTS, rule
    assert all(list(rule.each(TrainConfig)) for rule in RULES.table), "a group without options"


def test_every_word_of_a_text_is_known():
    for rule in rules():
        own = {"value", "flag", "given", "shown", "found", rule.about}
        for _, name, *_ in string.Formatter().parse(rule.text):
            if name is None:
                continue
            first, dot, attribute = name.partition(".")
            assert first.partition("[")[0] in own or hasattr(
                TrainConfig, first.partition("[")[0]
            ), rule.text
            if dot:
                fact = FACTS[first]
                known = {f.name for f in fields(fact)} | set(dir(fact))
                assert attribute in known, rule.text


def test_flags_in_texts_exist():
    """Messages and help name flags: one that was renamed is found here."""
    flags = {f"--{flag}" for opt in OPTIONS.values() for flag in opt.flags}
    flags |= {f"--no-{opt.flags[0]}" for opt in OPTIONS.values()}
    flags |= {"--verify-steps", "--offload", "--recompute"}  # of one command; families
    for rule in rules():
        for word in f"{rule.text} {rule.help}".replace("=", " ").split():
            if word.startswith("--"):
                assert word.rstrip(":,.;)") in flags, rule.text or rule.help


class Guess(Planner):
    """A planner to whom each changed option saves 10 MiB of 1 GiB and costs a little time."""

    def estimate(self, config: TrainConfig) -> Estimate:
        plain = TrainConfig().normalized()
        changed = sum(getattr(config, name) != getattr(plain, name) for name in OPTIONS)
        time = StepTime(parts=dict.fromkeys(PARTS, 1 + changed / 100))
        return Estimate(device=GIB - changed * 10 * MIB, host=MIB, tokens=1, time=time)

    exact = estimate


def searched(card: str, memory: int, machines: int = 1, **given: object) -> None:
    """Run the searches of --fit and of a plan's advice."""
    config = make_config({"model": "tiny", "from-scratch": True, "seq-len": 256, **given})
    chosen = find_card(card)
    shared = (spec_of(chosen), "native", chosen, 2 * machines)
    planner = Guess(preset("tiny"), *shared, network=Network(machines))
    limits = Limits(device=memory, host=GIB)
    try:
        fit, found = search_bases(Fit(config, planner, limits, frozenset()))
        eight_bit_gain(fit, found[0])
    except OutOfMemory:
        pass
    advice(config, planner, limits)


def test_every_saver_is_tried():
    tried: list[dict] = []
    allowed = Shrinker.allowed

    def noted(self, now, change):
        tried.append(change)
        return allowed(self, now, change)

    with patch.object(Shrinker, "allowed", noted):
        searched("4090", MIB, machines=2, ema=0.9)
        searched("4090", 2 * GIB, matmul_dtype="e4m3", shard_weights=True)
        searched("4090", 2 * GIB, matmul_dtype="e4m3", fp8_recipe="delayed")
        searched("4090", 2 * GIB, lora_rank=4)
        searched("3090", 2 * GIB, lora_rank=4)
    names = set().union(*tried)
    savers = [rule for rule in RULES.table if rule.effect == SAVE]
    for rule in savers:
        assert changes_of(rule) <= names, rule
        assert callable(rule.sets) or rule.sets in tried, rule
    assert len(savers) > 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Kettle(TrainConfig):
    """Options with one that is made up."""

    cups: int = option(0, "Cups of tea to make", group="Machine", min=0)


def test_one_rule_is_enough():
    table = (
        *refused(
            "cups",
            lambda v, o: v > o.batch_size,
            "{value} cups are more than --batch-size {batch_size}",
        ),
        *each(
            "cups",
            REFUSE,
            lambda v, o, model: v > model.num_layers,
            "{shown}: {model.num_layers}",
        ),
        *idle(
            "cups",
            lambda v, o: o.device == "cpu" and "which boils nothing",
            "has no effect with --device cpu, {found}",
            help="needs a GPU",
        ),
        Rule(option="cups", effect=IMPLY, when=lambda v, o: v >= 3, sets={"tune": False}),
        Rule(option="cups", effect=SAVE, sets={"cups": 0}, use="arrange"),
        *each("cups", EXACT, lambda v, o, ranks: True),
    )
    rules = Rules((*RULES.table, *table))
    plain = TrainConfig().normalized()
    implied = ("lmhead_chunks", *(name for name in OPTIONS if name.endswith("_dtype")))
    formats = {name: getattr(plain, name) for name in implied}
    with pytest.raises(ConfigError, match=r"^--cups: 5 cups are more than --batch-size 4$"):
        rules.check(Kettle(cups=5, **formats))
    rules.check(Kettle(cups=4, **formats))
    with pytest.raises(ConfigError, match=r"^--cups 2: 1$"):
        rules.check(Kettle(cups=2), model=preset("tiny").with_layers((0,)))
    on_cpu = Kettle(cups=2, device="cpu")
    assert rules.idle(on_cpu) == ["--cups=2 has no effect with --device cpu, which boils nothing"]
    assert rules.idle(replace(on_cpu, cups=0)) == rules.idle(replace(on_cpu, device="auto")) == []
    assert options_with_rules(Kettle, rules)["cups"].help == "Cups of tea to make; needs a GPU"
    config = Kettle(cups=3)
    rules.imply(config)
    assert not config.tune and rules.implied_by("tune", config) is None  # it is off
    assert rules.savers("arrange")[-1].changes(config) == {"cups": 0}
    assert rules.exact(config, ranks=Ranks(1))["cups"] == 0
    assert RULES.idle(on_cpu) == [], "the table of all others is as it was"


def test_clauses_of_help():
    table = [
        Rule(option="gpus", effect=REFUSE, help="With luck:"),
        Rule(option="steps", effect=REFUSE, help="in the middle"),
    ]
    assert Rules(table).help("gpus", "Find a GPU") == "With luck: find a GPU"
    assert Rules(table).help("steps", "Steps, {rule}, to take") == "Steps, in the middle, to take"
    assert Rules(table).help("seed", "Seed") == "Seed"
    for name, opt in OPTIONS.items():
        assert "{" not in opt.help, name
