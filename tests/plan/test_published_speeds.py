"""The rates of cards: what they are fitted to, and how far off predictions by them are."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from llmq.options.cards import PUBLISHED, find_card, spec_of
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.plan.cost import step_time
from llmq.plan.plan import make_plan

PAGE = Path(__file__).parents[2] / "benchmarks" / "published.md"


def test_the_page_says_what_cards_have():
    """Rates are fitted to llm.q's own step (tools/README.md): none of its runs is off by more
    than the error that plans print."""
    page = PAGE.read_text()
    for name, _, bf16, fp8, off in re.findall(
        r"^\| (NVIDIA .*) \| (.*) \| (.*) \| (.*) \| (.*) % \|$", page, re.M
    ):
        card = find_card(name)
        assert float(off) <= 7.0
        if card.source == PUBLISHED:
            assert card.sustained == (round(float(bf16), 2), round(float(fp8), 2))
            assert card.error == pytest.approx(math.ceil(float(off)) / 100 + 0.04)
    assert page.count("\n| h100 |") == 16


# Thousands of tokens/s of this program on one H100 without the kernels that only Hopper has, as on
# the cards above; 2026-11-24, 32 x 4.
WITHOUT_HOPPERS = [
    ("0.5B", {}, 157.9),
    ("0.5B", {"matmul-dtype": "e4m3"}, 182.5),
    ("0.5B", {"matmul-dtype": "e4m3", "fp8-recipe": "delayed"}, 200.1),
    ("1.5B", {"lmhead-chunks": 4}, 60.5),
    ("1.5B", {"matmul-dtype": "e4m3"}, 78.1),
    ("1.5B", {"matmul-dtype": "e4m3", "fp8-recipe": "delayed"}, 85.6),
]


@pytest.mark.parametrize(("model", "options", "speed"), WITHOUT_HOPPERS)
def test_our_own_launches_of_such_cards_take_what_was_measured(model, options, speed):
    given = {"model": f"Qwen2.5-{model}", "from-scratch": True, "device": "cuda", "batch-size": 32}
    config = make_config(given | {"opt-m-dtype": "bf16", "opt-v-dtype": "bf16"} | options)
    h100 = find_card("h100")
    plan = make_plan(config, preset(config.model), replace(spec_of(h100), capability=89), "cudnn")
    assert plan.tokens / step_time(plan, h100).total == pytest.approx(1000 * speed, rel=0.02)
