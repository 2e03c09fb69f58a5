"""Losses of texts that the model itself has sampled, weighted by advantages
(`ops/loss/grpo.py`)."""

from collections.abc import Mapping
from math import inf, nan
from typing import ClassVar

from llmq.base.dtypes import F32
from llmq.base.step_inputs import ARRAYS, SCORES, Input
from llmq.base.tensor import Tensor
from llmq.model.losses.loss import Loss, LossContext, Rows
from llmq.ops.loss import grpo
from llmq.ops.loss.grpo import Samples
from llmq.options.groups.optim import OptimOptions
from llmq.ref.loss.grpo import CAPPED, PER_DOCUMENT, PER_TOKEN, SEQUENCE, SUMS, TOKEN, Form


class Grpo(Loss):
    """GRPO: the loss of a token is minus its advantage times a ratio, clipped to bounds: its
    probability over its probability under the sampling model. The loss is the mean over documents
    of the mean over a document's trained tokens. With beta, the divergence from a reference model
    is added: the ratio times exp(g) - g - 1, where g is the reference's log-probability ("scores")
    minus the model's.

    Reported numbers are means over tokens: ratio; clipped, the share of tokens whose ratio is out
    of bounds; drift, |log-probability - log-probability when sampled|; kl, with beta, the
    divergence from the reference; entropy, -log-probability, an estimate if the model itself
    sampled at temperature 1."""

    name = "grpo"
    sums = SUMS
    ahead = True
    validated = shown = ("clipped",)
    kind: ClassVar[int] = TOKEN
    per: ClassVar[int] = PER_DOCUMENT

    def __init__(self, ctx: LossContext):
        super().__init__(ctx)
        shape = ctx.batch.batch_size, ctx.batch.local_seq_len
        self._weights = ctx.dev.alloc("weights", shape, F32, "Activations")
        self._sums = ctx.dev.alloc("document sums", (3, *shape), F32, "Activations")
        self.form = self._form(ctx.optim)

    @classmethod
    def inputs(cls, optim: OptimOptions) -> tuple[Input, ...]:
        """Return the inputs: advantages of target tokens, and their log-probabilities under the
        sampling model."""
        own = (Input("advantages", sidecar=ARRAYS), Input("sampled", sidecar=ARRAYS))
        return (*own, Input("scores", sidecar=SCORES)) if optim.has_reference else own

    @classmethod
    def _form(cls, optim: OptimOptions) -> Form:
        values = optim.loss_values
        low, high = 1 - values["epsilon"], 1 + values["epsilon-high"]
        return Form(cls.kind, low, high, values["beta"], cls.per, values.get("length", 0))

    @classmethod
    def guessing(cls, optim: OptimOptions, outputs: int) -> float:
        """Return infinity, because advantages, and with these the loss, have no bound."""
        return inf

    def prepare(self, rows: Rows) -> None:
        """Compute the sums over each document's tokens."""
        grpo.sums(self.dev, self._sums, self._samples(rows))

    def weights(self, rows: Rows) -> Tensor:
        grpo.weights(self.dev, self._weights, self._sums, self._samples(rows), self.form)
        return self._weights

    def add(self, stats: Tensor, rows: Rows) -> None:
        grpo.stats(self.dev, stats, self._sums, self._samples(rows), self.form)

    def _samples(self, rows: Rows) -> Samples:
        of_model = rows.targets, rows.losses, self.named["sampled"], self.named.get("scores")
        return Samples(*of_model, self.named["advantages"], rows.starts)

    @classmethod
    def numbers(cls, sums: Mapping[str, float]) -> dict[str, float]:
        names = ("clipped", "ratio", "drift", "kl", "entropy")
        return {name: sums[name] / (sums["tokens"] or nan) for name in names}


class DrGrpo(Grpo):
    """Dr. GRPO: the sum over each document is divided by the same length, so that tokens of long
    documents do not count less."""

    name = "dr-grpo"


class Dapo(Grpo):
    """DAPO: the loss is the mean over all tokens of the step, and the ratio has a larger upper
    bound."""

    name = "dapo"
    per = PER_TOKEN


class Gspo(Grpo):
    """GSPO: the tokens of a document share one ratio, the geometric mean of the tokens' ratios."""

    name = "gspo"
    kind = SEQUENCE


class Cispo(Grpo):
    """CISPO: ratios, capped at a bound, are weights without a gradient, so that every token has a
    gradient. The loss is the mean over all tokens of the step."""

    name = "cispo"
    kind = CAPPED
    per = PER_TOKEN

    @classmethod
    def _form(cls, optim: OptimOptions) -> Form:
        values = optim.loss_values
        return Form(cls.kind, 0, values["most"], values["beta"], cls.per, 0)
