"""Distillation: each token's distribution is to be that of a teacher (`ops/loss/distill.py`)."""

from collections.abc import Mapping

from llmq.base.dtypes import F32
from llmq.base.step_inputs import SCORES, Input
from llmq.base.tensor import Tensor
from llmq.model.losses.cross_entropy import TokenCrossEntropy
from llmq.model.losses.loss import Rows
from llmq.ops.loss import distill
from llmq.ops.loss.distill import Teacher
from llmq.options.groups.batch import BatchOptions
from llmq.options.groups.optim import OptimOptions
from llmq.runtime.device import Device


class Distillation(TokenCrossEntropy):
    """A mixture of the targets' cross-entropy and of a divergence from the teacher's probabilities.
    The teacher tells its k largest ones of each token, and all others count as one. kl: the mean
    divergence, in nats, at the temperature. loss_1k is that of the mixture."""

    name = "kd"
    sums = (*TokenCrossEntropy.sums, "kl")
    validated = ("loss_1k", "kl")
    shown = ("kl",)

    def __init__(
        self, dev: Device, batch: BatchOptions, optim: OptimOptions, named: Mapping[str, Tensor]
    ):
        super().__init__(dev, batch, optim, named)
        rows, values = batch.micro_tokens, optim.loss_values
        self._teacher = Teacher(
            logprobs=named["scores"].view(rows, 2 * values["top-k"]),
            kl=dev.alloc("kl", (rows,), F32, "Activations"),
            mixture=values["mixture"],
            temperature=values["temperature"],
            reverse=values["divergence"] == "reverse",
        )

    @classmethod
    def inputs(cls, optim: OptimOptions) -> tuple[Input, ...]:
        """Token ids as the bits of F32, then their log-probabilities."""
        return (Input("scores", shape=(2 * optim.loss_values["top-k"],), sidecar=SCORES),)

    def of_rows(self) -> Teacher:
        return self._teacher

    def add(self, stats: Tensor, rows: Rows) -> None:
        super().add(stats, rows)
        distill.add(self.dev, stats, self._teacher.kl, self.stat()["kl"])

    @classmethod
    def numbers(cls, sums: Mapping[str, float]) -> dict[str, float]:
        return super().numbers(sums) | {"kl": sums["kl"] / (sums["count"] or float("nan"))}
