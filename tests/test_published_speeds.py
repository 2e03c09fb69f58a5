"""The rates of cards: what they are fitted to, and how far off predictions by them are."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from llmq.options.cards import PUBLISHED, find_card
from tools.published_speeds import CACHES, Model, fit, rows

PAGE = Path(__file__).parents[1] / "benchmarks" / "published.md"
ROWS = [row for row in rows() if row.gpus == 1 and row.fits]
# Clocks under load over those of the sheets: an RTX 5090 was seen at 2.59 GHz at its power limit,
# and at 2.81 to 2.93 below it, in place of 2.41.
REACHED = 1.09


@pytest.mark.parametrize("name", CACHES)
def test_the_published_runs_of_a_card_are_predicted(name):
    """By the rates that plans take, and within the error that they print."""
    card = find_card(name.replace("-", " "))
    errors = [Model(row).error(card.sustained) for row in ROWS if row.card == name]
    assert len(errors) >= 6
    if card.source == PUBLISHED:
        assert max(map(abs, errors)) < 0.07
        assert card.error > max(map(abs, errors))
        assert abs(sum(errors)) / len(errors) < 0.02


def test_the_rates_of_a_card_are_the_fit_and_each_run_follows_from_the_others():
    card = find_card("5060 ti")
    models = [Model(row) for row in rows() if row.card == "5060-ti"]
    found = fit(models, card.sustained, rounds=2)
    assert found.shares == pytest.approx(card.sustained, abs=0.006)
    assert found.worst < 100 * card.error and found.worst < 7
    # A row is not predicted by itself: where it says something else, its error is as large.
    odd = models[0].row
    models[0].row = type(odd)(
        **{n: getattr(odd, n) for n in odd.__slots__} | {"speed": odd.speed / 2}
    )
    assert fit(models, card.sustained, rounds=2).left_out[models[0].row] > 90


def test_no_rate_is_above_what_the_data_sheet_allows():
    for name in CACHES:
        card = find_card(name.replace("-", " "))
        assert all(share <= (REACHED if "GeForce" in card.name else 1) for share in card.sustained)


def test_the_page_says_what_cards_have():
    """`tools/published_speeds.py` writes it anew."""
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


def test_llmqs_step_on_an_h100():
    """Its speeds, measured beside ours, by each other."""
    page = PAGE.read_text()
    errors = re.findall(r"^\| h100 \| 2026-05 .* \| ([+-][\d.]+) %", page, re.M)
    assert len(errors) == 6 and max(abs(float(error)) for error in errors) <= 4
