"""The scaling law of `llmq recipe`: the loss of a model of N parameters after D tokens.

    L(N, D) = E + A / N^alpha + B / D^beta

is the form of Hoffmann et al., arXiv:2203.15556, and the constants are those that Besiroglu et al.,
arXiv:2404.10102, find in Hoffmann's own data.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from llmq.options.option_types import MUONS

OTHER_TEXT = 0.25
"""The part by which the loss of other text than a law's may differ: prose of web pages, in tokens
of 32,768 to 151,936 kinds, lies so far apart; that of code is lower still."""
# More passes teach hardly more, and a model that is more than so many times too large for the
# tokens that there are learns hardly more of them (Muennighoff et al., arXiv:2305.16264).
PASSES, EXCESS = 15.4, 5.3
MUON_TOKENS = 0.75
"""The part of AdamW's tokens with which Muon had a lower loss than AdamW's best (docs/optimizer.md:
three times, at 91M and 365M parameters). Others needed two thirds (docs/speed.md)."""


class Law(NamedTuple):
    """E, A, B, alpha and beta of the form above; N counts parameters, D tokens, L is in nats.
    source: words for the user."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    source: str = ""

    def loss(self, parameters: float, tokens: float, unique: float = math.inf) -> float:
        """The loss in nats a token. unique: tokens that there are, which further passes repeat."""
        if tokens > unique:
            tokens = worth(tokens, unique, PASSES)
            parameters = worth(parameters, self.size_for(unique), EXCESS)
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def size_for(self, tokens: float) -> float:
        """The parameters that reach the lowest loss of all that take as much computation."""
        ratio = self.A * self.alpha / (self.B * self.beta)
        return (ratio * tokens**self.beta) ** (1 / self.alpha)


def worth(amount: float, enough: float, times: float) -> float:
    """The part of an amount that counts: what is more than enough, ever less, at most so many times
    as much."""
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
