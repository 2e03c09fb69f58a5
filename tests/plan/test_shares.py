"""Plans of unequal cards, and of shares of the micro-batches (--share)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from llmq.base.dtypes import GIB
from llmq.base.errors import ConfigError
from llmq.options.cards import find_card, together
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.plan.report import run_plan
from llmq.plan.target import MachineOptions, PlanTarget, target
from llmq.run import shares as run_shares
from llmq.run.shares import Shares
from llmq.runtime.device import DeviceSpec
from llmq.runtime.machine import Machine
from llmq.runtime.world import World

MODEL = preset("Qwen2.5-1.5B")
TWO = "rtx 5090,rtx 3090"
RUN = {"model": "Qwen2.5-1.5B", "from_scratch": True, "device": "cuda", "batch_size": 2}
RUN |= {"grad_accumulation": 16, "recompute_block": True}


def machine(card: str, **options: object) -> PlanTarget:
    """The machine of --card."""
    return target(make_config(RUN | options), MODEL, MachineOptions(card=card), search=False)


def speed(card: str, **options: object) -> float:
    """Tokens per second by the exact plan."""
    config = make_config(RUN | options)
    return machine(card, **options).planner(MODEL).exact(config).speed


def test_unequal_cards_reach_nine_tenths_of_their_sum():
    alone = [speed(card, grad_accumulation=32) for card in TWO.split(",")]
    assert 0.9 * sum(alone) < speed(TWO, share="auto") < sum(alone)
    assert speed(TWO) == pytest.approx(2 * min(alone), rel=0.03)  # each waits for the slowest
    planner, config = machine(TWO).planner(MODEL), make_config(RUN | {"share": "auto"})
    shares = planner.shares(config, planner.plan(config))
    assert sum(shares) == 32
    assert shares[0] / shares[1] == pytest.approx(alone[0] / alone[1], rel=0.1)
    assert planner.estimate(config).speed == pytest.approx(planner.exact(config).speed, rel=0.02)


def test_shares_of_equal_cards_cost_what_the_largest_does():
    even, uneven = (speed("3090", gpus=2, share=share) for share in ("equal", "3:1"))
    assert speed("3090", gpus=2, share="auto") == pytest.approx(even, rel=0.01)
    assert uneven == pytest.approx(even * 16 / 24, rel=0.02)


def test_unequal_cards_have_the_memory_and_the_formats_of_the_least():
    where = machine(TWO)
    assert where.limits.device == pytest.approx(23.5 * GIB)
    assert (where.world_size, where.spec.capability, where.spec.num_sms) == (2, 86, 170)
    assert where.card.fp8 == 0
    assert where.card.error == find_card("3090").error
    with pytest.raises(ConfigError, match="--card: names 2 GPUs of one machine, which are all"):
        machine(TWO, gpus=4)
    assert machine("rtx 3090,rtx 3090").cards == ()


def test_a_search_for_unequal_cards_finds_shares(capsys):
    small = {"model": "Qwen2.5-0.5B", "batch_size": 1, "grad_accumulation": 8}
    config, asked = make_config(RUN | small), MachineOptions(card="rtx 3080,rtx 3070")
    model = preset("Qwen2.5-0.5B")
    found = run_plan(config, model, asked, fit=frozenset(), json=True)
    assert json.loads(capsys.readouterr().out)["found"]
    assert (found.share, found.gpus) == ("auto", 2)
    run_plan(found, model, asked)
    out = capsys.readouterr().out
    assert "% of NVIDIA GeForce RTX 3080, " in out
    assert "Shares:" in out


def test_measured_cards_have_shares_before_the_first_step(monkeypatch):
    cards = tuple(map(find_card, TWO.split(",")))
    specs = tuple(DeviceSpec(name=c.name, capability=86, num_sms=82, memory=GIB) for c in cards)
    here = Machine(kind="cuda", spec=specs[0], note=None, world=World.of(2), specs=specs)
    config = make_config(RUN | {"share": "auto", "gpus": 2})
    plan = machine(TWO).planner(MODEL).plan(config)
    assert Shares(config, here, plan).measures  # no card file: by the first steps
    own = [replace(card, measured=object(), error=None) for card in cards]
    monkeypatch.setattr(run_shares, "cards_here", lambda specs: own)
    monkeypatch.setattr(run_shares, "times_of", lambda plan, cards: cards)
    monkeypatch.setattr(run_shares, "speeds", lambda times: [c.bf16 for c in times])
    shares = Shares(config, here, plan)
    assert not shares.measures
    assert shares.of(16) == [24, 8]
    assert together(cards[:1]) == cards[0]
