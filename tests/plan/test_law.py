"""The scaling law of `llmq recipe`."""

from __future__ import annotations

import pytest

from llmq.plan.law import ADAMW, law_of, worth


def test_the_published_law_says_what_its_paper_does():
    """About 20 tokens for each parameter at Chinchilla's budget."""
    assert 15 < 1.4e12 / ADAMW.size_for(1.4e12) < 30


def test_the_size_for_some_tokens_has_the_lowest_loss_of_its_computation():
    tokens = 1e9
    size = ADAMW.size_for(tokens)
    best = ADAMW.loss(size, tokens)
    assert all(ADAMW.loss(size * by, tokens / by) > best for by in (0.8, 0.95, 1.05, 1.25))


def test_further_passes_teach_less():
    law = ADAMW
    once, twice, often = (law.loss(1e8, passes * 1e9, 1e9) for passes in (1, 2, 1000))
    assert once == law.loss(1e8, 1e9) > twice > often
    assert law.loss(1e8, 2e9) < twice and often > law.loss(1e8, 16.5e9)
    assert worth(5, 10, 3.0) == 5 and worth(1e9, 10, 3.0) == 40


def test_muon_needs_three_quarters_of_the_tokens():
    assert law_of("muon").loss(1e8, 0.75e9) == pytest.approx(law_of("adamw").loss(1e8, 1e9))
