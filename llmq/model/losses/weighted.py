"""Weighted cross-entropy: weights of any sign from score files, or weights of messages."""

from collections.abc import Mapping
from math import inf, nan

from llmq.base.step_inputs import SCORES, WEIGHTS, Input
from llmq.base.tensor import Tensor
from llmq.model.losses.cross_entropy import TokenCrossEntropy
from llmq.model.losses.loss import Rows
from llmq.ops.loss import cross_entropy
from llmq.options.groups.optim import OptimOptions


class Weighted(TokenCrossEntropy):
    """Cross-entropy times a weight for each token. With advantages as weights, this loss is a
    policy gradient. The sum of weighted losses is divided by the number of trained tokens, whatever
    the weights. The number loss_1k is weighted, too."""

    name = "weighted"

    @classmethod
    def inputs(cls, optim: OptimOptions) -> tuple[Input, ...]:
        return (Input("scores", sidecar=SCORES),)

    @classmethod
    def guessing(cls, optim: OptimOptions, outputs: int) -> float:
        """Return infinity, because weights have no bound."""
        return inf

    def weights(self, rows: Rows) -> Tensor:
        return self.named["scores"]

    def add(self, stats: Tensor, rows: Rows) -> None:
        weights = self.named["scores"]
        cross_entropy.stats(self.dev, stats, rows.losses, rows.lse, rows.targets, weights)


class MessageWeights(TokenCrossEntropy):
    """Cross-entropy with a weight from 0 to 1 for each message, from the token files. The loss and
    loss_1k are weighted means over all ranks and micro-batches."""

    sums = (*TokenCrossEntropy.sums, "tokens")

    @classmethod
    def inputs(cls, optim: OptimOptions) -> tuple[Input, ...]:
        return (Input("scores", sidecar=WEIGHTS),)

    def weights(self, rows: Rows) -> Tensor:
        return self.divisor()

    def divisor(self) -> Tensor:
        return self.named["scores"]

    def add(self, stats: Tensor, rows: Rows) -> None:
        weights = self.named["scores"]
        args = (rows.losses, rows.lse, rows.targets, weights)
        cross_entropy.stats(self.dev, stats, *args, by_weight=True)

    @classmethod
    def numbers(cls, sums: Mapping[str, float]) -> dict[str, float]:
        mean = sums["lse_sum"] / (sums["tokens"] or nan)
        return super().numbers(sums) | {"lse_mean": mean}
