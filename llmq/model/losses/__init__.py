"""Losses: one file each; everything else asks them for their sums, their weights of rows, and the
numbers that reports have of them."""

from __future__ import annotations

from llmq.model.losses.cross_entropy import TokenCrossEntropy
from llmq.model.losses.loss import Loss

LOSSES: dict[str, type[Loss]] = {"ce": TokenCrossEntropy}


def loss_class() -> type[Loss]:
    """The loss of all runs: there is one, so that no option chooses."""
    return LOSSES["ce"]
