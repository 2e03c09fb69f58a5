"""Distillation from a teacher model's token distributions (`ops/loss/distill.py`)."""

from collections.abc import Mapping

from llmq.base.dtypes import F32
from llmq.base.step_inputs import SCORES, Input
from llmq.base.tensor import Tensor
from llmq.model.losses.cross_entropy import TokenCrossEntropy
from llmq.model.losses.loss import LossContext, Rows
from llmq.ops.loss import distill
from llmq.ops.loss.distill import Teacher
from llmq.options.groups.optim import OptimOptions


class Distillation(TokenCrossEntropy):
    """A mixture of cross-entropy and of a divergence from the teacher's probabilities. The teacher
    gives the k largest probabilities for each token; all other tokens count as one event. Reported
    numbers: kl, the mean divergence in nats, at the temperature; loss_1k, the mean mixture at the
    first 1024 positions of sequences."""

    name = "kd"
    sums = (*TokenCrossEntropy.sums, "kl")
    validated = ("loss_1k", "kl")
    shown = ("kl",)

    def __init__(self, ctx: LossContext):
        super().__init__(ctx)
        rows, values = ctx.batch.micro_tokens, ctx.optim.loss_values
        self._teacher = Teacher(
            logprobs=ctx.named["scores"].view(rows, 2 * values["top-k"]),
            kl=ctx.dev.alloc("kl", (rows,), F32, "Activations"),
            mixture=values["mixture"],
            temperature=values["temperature"],
            reverse=values["divergence"] == "reverse",
        )

    @classmethod
    def inputs(cls, optim: OptimOptions) -> tuple[Input, ...]:
        """Return the input: for each token, k token ids as the bits of F32, then the
        log-probabilities of these ids."""
        return (Input("scores", shape=(2 * optim.loss_values["top-k"],), sidecar=SCORES),)

    def of_rows(self) -> Teacher:
        return self._teacher

    def add(self, stats: Tensor, rows: Rows) -> None:
        super().add(stats, rows)
        distill.add(self.dev, stats, self._teacher.kl, self.stat()["kl"])

    @classmethod
    def numbers(cls, sums: Mapping[str, float]) -> dict[str, float]:
        return super().numbers(sums) | {"kl": sums["kl"] / (sums["count"] or float("nan"))}
