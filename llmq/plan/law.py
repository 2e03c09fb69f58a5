"""Scaling laws: the loss of a model of N parameters after D tokens, and how far off that may be.

    L(N, D) = E + A / N^alpha + B / D^beta

is the form of Hoffmann et al., arXiv:2203.15556, and the constants are those that Besiroglu et al.,
arXiv:2404.10102, find in Hoffmann's own data. `tools/scaling_law.py` fits others to runs of this
program, and writes the file of --law.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from llmq.base.errors import ConfigError
from llmq.base.files import read_json

LAYOUT = "llmq scaling law"
OTHER_TEXT = 0.25
"""The part by which the loss of other text than a law's may differ: prose of web pages, in tokens
of 32,768 to 151,936 kinds, lies so far apart; that of code is lower still."""
# More passes teach hardly more, and a model that is more than so many times too large for the
# tokens that there are learns hardly more of them (Muennighoff et al., arXiv:2305.16264).
PASSES, EXCESS = 15.4, 5.3


class Constants(NamedTuple):
    """E, A, B, alpha and beta of the form above; N counts parameters, D tokens, L is in nats."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """The form itself."""
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def size_for(self, tokens: float) -> float:
        """The parameters that reach the lowest loss of all that take as much computation."""
        ratio = self.A * self.alpha / (self.B * self.beta)
        return (ratio * tokens**self.beta) ** (1 / self.alpha)


class Range(NamedTuple):
    """The smallest and the largest that was measured."""

    least: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """A fit for one optimizer.

    source: words for the user. resampled: fits to random choices of the runs, whose distance is the
    uncertainty of the fit. off: the relative error of a run by a fit without the run. tokenizer:
    the fingerprint of the runs' tokens, None in the published law. derived: the law is another
    optimizer's, with other tokens to the same loss. parameters, tokens: of the runs.
    """

    source: str
    constants: Constants
    resampled: tuple[Constants, ...] = ()
    off: float = 0.0
    tokenizer: str | None = None
    derived: bool = False
    parameters: Range
    tokens: Range

    def loss(self, parameters: float, tokens: float, unique: float = math.inf) -> float:
        """The loss in nats a token. unique: tokens that there are, which further passes repeat."""
        if tokens > unique:
            tokens = worth(tokens, unique, PASSES)
            if self.tokenizer is None:  # the runs of others are fitted to what came in passes
                parameters = worth(parameters, self.constants.size_for(unique), EXCESS)
        return self.constants.loss(parameters, tokens)

    def error(self, parameters: float, tokens: float, tokenizer: str | None) -> float:
        """The part of a loss by which it may be off (two standard deviations). tokenizer:
        fingerprint of the tokens that are to be trained on."""
        if not self.is_of(tokenizer):
            return OTHER_TEXT
        found = [each.loss(parameters, tokens) for each in self.resampled]
        spread = statistics.stdev(found) / statistics.mean(found) if len(found) > 1 else 0.0
        return 2 * math.hypot(spread, self.off)

    def is_of(self, tokenizer: str | None) -> bool:
        """True if the law's runs had tokens of this tokenizer."""
        return self.tokenizer is not None and tokenizer == self.tokenizer

    def with_tokens(self, times: float, optimizer: str) -> Law:
        """The law of another optimizer, which needs so many times the tokens for each loss."""
        of_all = (self.constants, *self.resampled)
        constants, *resampled = (c._replace(B=c.B * times**c.beta) for c in of_all)
        return replace(
            self,
            source=f"{self.source}; {optimizer} with {times:.0%} of the tokens",
            constants=constants,
            resampled=tuple(resampled),
            derived=True,
        )

    def beyond(self, parameters: float, tokens: float) -> float:
        """The factor of extrapolation: the larger of N and D over the runs' largest, at least 1."""
        return max(parameters / self.parameters.most, tokens / self.tokens.most, 1.0)


def worth(amount: float, enough: float, times: float) -> float:
    """The part of an amount that counts: what is more than enough, ever less, at most so many times
    as much."""
    if amount <= enough:
        return amount
    return enough * (1 + times * (1 - math.exp(-(amount / enough - 1) / times)))


PUBLISHED = Law(
    source="Besiroglu et al. 2024 (arXiv:2404.10102), of Chinchilla's runs on web text",
    constants=Constants(1.8172, 482.01, 2085.43, 0.3478, 0.3658),
    parameters=Range(44e6, 16e9),
    tokens=Range(5e9, 500e9),
)
"""The law of AdamW without --law."""
MUON_TOKENS = 0.75
"""The part of AdamW's tokens with which Muon had a lower loss than AdamW's best (docs/optimizer.md:
three times, at 91M and 365M parameters). Others needed two thirds (docs/speed.md)."""


def published_laws() -> dict[str, Law]:
    """The published law by optimizer, Muon's as it follows from that."""
    return {"adamw": PUBLISHED, "muon": PUBLISHED.with_tokens(MUON_TOKENS, "Muon")}


def read_laws(file: Path) -> dict[str, Law]:
    """The laws of a file of tools/scaling_law.py by optimizer. Raises ConfigError."""
    try:
        found = read_json(file)
        if found.get("layout") != LAYOUT:
            raise ValueError("it is no scaling law")
        shared = {"source": found["source"], "tokenizer": found["tokenizer"]}
        return {name: _law(record, shared) for name, record in found["optimizers"].items()}
    except OSError as error:
        raise ConfigError(f"--law: cannot read '{file}': {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"--law: '{file}' is not of tools/scaling_law.py ({error})") from None


def _law(record: dict[str, Any], shared: dict[str, str]) -> Law:
    constants, *resampled = (Constants(*map(float, each)) for each in record["constants"])
    ranges = {name: Range(*map(float, record[name])) for name in ("parameters", "tokens")}
    return Law(
        **shared, constants=constants, resampled=tuple(resampled), off=record["off"], **ranges
    )
