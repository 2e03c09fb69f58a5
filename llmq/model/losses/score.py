"""Losses of a score head, which scores each document after its last token."""

from collections.abc import Mapping

from llmq.base.dtypes import F32
from llmq.base.tensor import Tensor
from llmq.model.losses.cross_entropy import TokenCrossEntropy
from llmq.model.losses.loss import LossContext, Rows
from llmq.model.losses.preferences import SimPo
from llmq.ops.loss import distill
from llmq.ops.loss.labels import Labels
from llmq.options.groups.optim import OptimOptions
from llmq.ref.loss.pairs import SIGMOID, Form


def _labels(ctx: LossContext, *, linear: bool) -> Labels:
    hits = ctx.dev.alloc("hits", (ctx.batch.micro_tokens,), F32, "Activations")
    return Labels(hits, linear)


class Classes(TokenCrossEntropy):
    """Cross-entropy of the classes of documents. accuracy: the share of documents for which the
    right class is the likeliest."""

    sums = (*TokenCrossEntropy.sums, "hits")
    validated = shown = ("accuracy",)

    def __init__(self, ctx: LossContext):
        super().__init__(ctx)
        self._of_rows = _labels(ctx, linear=False)

    def of_rows(self) -> Labels:
        return self._of_rows

    def add(self, stats: Tensor, rows: Rows) -> None:
        super().add(stats, rows)
        distill.add(self.dev, stats, self._of_rows.hits, self.stat()["hits"])

    @classmethod
    def numbers(cls, sums: Mapping[str, float]) -> dict[str, float]:
        return {"accuracy": sums["hits"] / (sums["count"] or float("nan"))}


class Reward(SimPo):
    """Bradley-Terry loss: -log sigmoid(score of the chosen answer - score of the rejected answer).
    Reported numbers: the numbers of Preferences, with scores as rewards."""

    kind = SIGMOID

    def __init__(self, ctx: LossContext):
        super().__init__(ctx)
        self._of_rows = _labels(ctx, linear=True)

    @classmethod
    def _form(cls, optim: OptimOptions) -> Form:
        return Form(cls.kind, 0, 1.0, 0.0, 0.0, 0.0)

    def of_rows(self) -> Labels:
        return self._of_rows

    @classmethod
    def numbers(cls, sums: Mapping[str, float]) -> dict[str, float]:
        found = super().numbers(sums)
        return {name: n for name, n in found.items() if not name.startswith("logp")}
