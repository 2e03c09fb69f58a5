"""The mean cross-entropy over all tokens that are not masked."""

from collections.abc import Mapping

from llmq.base.dtypes import STATS, TOKEN_STATS
from llmq.base.tensor import Tensor
from llmq.model.losses.loss import Loss, Rows
from llmq.ops.loss import cross_entropy


class TokenCrossEntropy(Loss):
    """Cross-entropy in which each target token has the weight 1. Reported numbers: lse_max and
    lse_mean, maximum and mean of the logits' log-sum-exp; loss_1k, the mean loss of tokens at the
    first 1024 positions of sequences."""

    name = "ce"
    sums = TOKEN_STATS[len(STATS) :]
    maxima = ("lse_max",)
    validated = ("loss_1k",)

    def add(self, stats: Tensor, rows: Rows) -> None:
        cross_entropy.stats(self.dev, stats, rows.losses, rows.lse, rows.targets)

    @classmethod
    def numbers(cls, sums: Mapping[str, float]) -> dict[str, float]:
        tokens, tokens_1k = sums["count"], sums["tokens_1k"]
        return {
            "lse_max": sums["lse_max"],
            "lse_mean": sums["lse_sum"] / tokens if tokens else float("nan"),
            "loss_1k": sums["loss_1k"] / tokens_1k if tokens_1k else float("nan"),
        }
