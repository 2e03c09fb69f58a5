"""Scaling law of `llmq recipe`: the loss of a model of N parameters after D tokens.

    L(N, D) = E + A / N^alpha + B / D^beta

The form is of Hoffmann et al., arXiv:2203.15556; Besiroglu et al., arXiv:2404.10102, fitted these
constants to Hoffmann's data.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from llmq.options.option_types import MUONS

OTHER_TEXT = 0.25
"""Relative error of a law's loss on other texts: losses on prose of web pages, with vocabularies of
32,768 to 151,936 ids, differ this much. Losses on code are even lower."""
# Limits of repeated data and of excess parameters: beyond these, passes over the data and
# parameters add hardly anything (Muennighoff et al., arXiv:2305.16264).
PASSES, EXCESS = 15.4, 5.3
MUON_TOKENS = 0.75
"""Share of AdamW's tokens with which Muon had a lower loss than AdamW's best (docs/optimizer.md: in
three comparisons, with 91M and 365M parameters). Other authors needed two thirds
(docs/speed.md)."""


class Law(NamedTuple):
    """E, A, B, alpha and beta of the form above; N in parameters, D in tokens, L in nats. source:
    the law's origin, as the user reads it."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    source: str = ""

    def loss(self, parameters: float, tokens: float, unique: float = math.inf) -> float:
        """Loss in nats a token. unique: tokens before the data repeat."""
        if tokens > unique:
            tokens = worth(tokens, unique, PASSES)
            parameters = worth(parameters, self.size_for(unique), EXCESS)
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def size_for(self, tokens: float) -> float:
        """Parameters with the lowest loss among models of equal training FLOPs."""
        ratio = self.A * self.alpha / (self.B * self.beta)
        return (ratio * tokens**self.beta) ** (1 / self.alpha)


def worth(amount: float, enough: float, times: float) -> float:
    """Effective part of an amount: units beyond `enough` count ever less, together at most times *
    enough."""
    if amount <= enough:
        return amount
    return enough * (1 + times * (1 - math.exp(-(amount / enough - 1) / times)))


ADAMW = Law(1.8172, 482.01, 2085.43, 0.3478, 0.3658, "Besiroglu et al. 2024 (arXiv:2404.10102), "
            "of Chinchilla's runs on web text")  # fmt: skip
MUON = ADAMW._replace(
    B=ADAMW.B * MUON_TOKENS**ADAMW.beta,
    source=f"{ADAMW.source}; Muon with {MUON_TOKENS:.0%} of the tokens",
)


def law_of(optimizer: str) -> Law:
    """The law of runs with this --optimizer."""
    return MUON if optimizer in MUONS else ADAMW
