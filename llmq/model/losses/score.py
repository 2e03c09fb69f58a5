"""Losses of a score head, which says one thing of each document, behind its last token."""

from collections.abc import Mapping

from llmq.base.dtypes import F32
from llmq.base.tensor import Tensor
from llmq.model.losses.cross_entropy import TokenCrossEntropy
from llmq.model.losses.loss import Rows
from llmq.model.losses.preferences import SimPo
from llmq.ops.loss import distill
from llmq.ops.loss.labels import Labels
from llmq.options.groups.batch import BatchOptions
from llmq.options.groups.optim import OptimOptions
from llmq.ref.loss.pairs import SIGMOID, Form
from llmq.runtime.device import Device


def _labels(dev: Device, batch: BatchOptions, *, linear: bool) -> Labels:
    rows = batch.micro_tokens
    return Labels(dev.alloc("hits", (rows,), F32, "Activations"), linear)


class Classes(TokenCrossEntropy):
    """Cross-entropy of documents' classes. accuracy: how often the right one is the likeliest."""

    sums = (*TokenCrossEntropy.sums, "hits")
    validated = shown = ("accuracy",)

    def __init__(
        self, dev: Device, batch: BatchOptions, optim: OptimOptions, named: Mapping[str, Tensor]
    ):
        super().__init__(dev, batch, optim, named)
        self._of_rows = _labels(dev, batch, linear=False)

    def of_rows(self) -> Labels:
        return self._of_rows

    def add(self, stats: Tensor, rows: Rows) -> None:
        super().add(stats, rows)
        distill.add(self.dev, stats, self._of_rows.hits, self.stat()["hits"])

    @classmethod
    def numbers(cls, sums: Mapping[str, float]) -> dict[str, float]:
        return {"accuracy": sums["hits"] / (sums["count"] or float("nan"))}


class Reward(SimPo):
    """Bradley and Terry's: -log sigmoid of what the chosen answer scores above the rejected one.
    Its numbers are those of all pairs; rewards are the scores."""

    kind = SIGMOID

    def __init__(
        self, dev: Device, batch: BatchOptions, optim: OptimOptions, named: Mapping[str, Tensor]
    ):
        super().__init__(dev, batch, optim, named)
        self._of_rows = _labels(dev, batch, linear=True)

    @classmethod
    def _form(cls, optim: OptimOptions) -> Form:
        return Form(cls.kind, 0, 1.0, 0.0, 0.0, 0.0)

    def of_rows(self) -> Labels:
        return self._of_rows

    @classmethod
    def numbers(cls, sums: Mapping[str, float]) -> dict[str, float]:
        found = super().numbers(sums)
        return {name: n for name, n in found.items() if not name.startswith("logp")}
