"""The declaration of a loss, from which gradients, statistics and reports follow."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import log
from typing import ClassVar, NamedTuple

from llmq.base.dtypes import STATS
from llmq.base.step_inputs import Input
from llmq.base.tensor import Tensor
from llmq.ops.loss.distill import Teacher
from llmq.ops.loss.labels import Labels
from llmq.options.groups.batch import BatchOptions
from llmq.options.groups.optim import OptimOptions
from llmq.runtime.device import Device


class Rows(NamedTuple):
    """The head's results for a micro-batch, (B, T) each. targets: I32, negative if masked. losses:
    F32, each token's cross-entropy, 0 if masked. lse: F32, the log-sum-exp of each token's logits.
    starts: I32, the first position of each token's document; None: each row is one document."""

    targets: Tensor
    losses: Tensor
    lse: Tensor
    starts: Tensor | None = None


class LossContext(NamedTuple):
    """Tools of a loss: the device, normalized options, and a micro-batch's tensors of the loss's
    `inputs`, by name."""

    dev: Device
    batch: BatchOptions
    optim: OptimOptions
    named: Mapping[str, Tensor]


class Loss(ABC):
    """The objective of a run: a weighted sum of rows' losses, divided by a count.

    The gradient of row r is weights[r] times the gradient of the token's cross-entropy (z-loss
    included), 0 if the target is masked. The step divides gradients by the statistic "count";
    "loss" / "count" is the reported loss, which the guard against divergence judges.

    name: the word of --loss with an LM head. sums: names of the loss's statistics, added over
    micro-batches and ranks. maxima: sums that are maxima over micro-batches and ranks, at least 0.
    ahead: True if weights need the losses of the whole micro-batch, so that the head computes
    logits twice. largest: the largest absolute value of a weight, for an fp8 head: it clamps
    gradients beyond this weight, and rounds weights that are no powers of two to within 1/8.
    validated: the numbers that validations report, too. shown: the validated numbers beside the
    loss on the console.
    """

    name: ClassVar[str]
    sums: ClassVar[tuple[str, ...]] = ()
    maxima: ClassVar[tuple[str, ...]] = ()
    ahead: ClassVar[bool] = False
    largest: ClassVar[float] = 1.0
    validated: ClassVar[tuple[str, ...]] = ()
    shown: ClassVar[tuple[str, ...]] = ()

    def __init__(self, ctx: LossContext):
        self.dev, self.named = ctx.dev, ctx.named

    @classmethod
    def inputs(cls, optim: OptimOptions) -> tuple[Input, ...]:
        """The arrays that the loss reads of each batch beside tokens and targets."""
        return ()

    def of_rows(self) -> Teacher | Labels | None:
        """The operation that computes losses and gradients of the B*T rows instead of
        cross-entropy; None: cross-entropy. A Teacher's rows are never weighted. This method
        launches nothing."""
        return None

    @classmethod
    def guessing(cls, optim: OptimOptions, outputs: int) -> float:
        """The loss of an untrained model. outputs: number of logits of a row. In a run's first
        steps the guard judges losses by a multiple of this value."""
        return log(outputs)

    @classmethod
    def stat(cls) -> dict[str, int]:
        """Index of each statistic of a step; statistics of all losses come first."""
        return {name: index for index, name in enumerate((*STATS, *cls.sums))}

    def prepare(self, rows: Rows) -> None:  # noqa: B027 - most have nothing
        """Compute sums over the micro-batch that `weights` and `add` read; called once before both
        if `ahead`. May only launch kernels, and collectives on all ranks."""

    def weights(self, rows: Rows) -> Tensor | None:
        """Factors of the tokens' gradients, F32 (B, T); None: all are 1. May only launch kernels.
        rows: losses and lse are the previous micro-batch's, unless `ahead`."""
        return None

    def divisor(self) -> Tensor | None:
        """Weights of targets, F32 (B, T), whose sum is "count"; None: all are 1, or "count" is no
        sum over targets."""
        return None

    @abstractmethod
    def add(self, stats: Tensor, rows: Rows) -> None:
        """Add a micro-batch to the statistics, F64 as `stat` says; may only launch kernels."""

    @classmethod
    def numbers(cls, sums: Mapping[str, float]) -> dict[str, float]:
        """The numbers that reports show beside the loss, by name, from the sums of a step or a
        validation."""
        return {}
