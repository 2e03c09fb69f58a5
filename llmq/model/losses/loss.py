"""The base class of losses; gradients, statistics and reports follow from a loss's declaration."""

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
    """Results of the head for a micro-batch, (B, T) each. targets: I32, negative for masked tokens.
    losses: F32, each token's cross-entropy, 0 for masked tokens. lse: F32, the log-sum-exp of each
    token's logits. starts: I32, the first position of each token's document; None if each row is
    one document."""

    targets: Tensor
    losses: Tensor
    lse: Tensor
    starts: Tensor | None = None


class LossContext(NamedTuple):
    """Objects that a loss uses: the device, options with defaults filled in, and a micro-batch's
    tensors of the loss's `inputs`, by name."""

    dev: Device
    batch: BatchOptions
    optim: OptimOptions
    named: Mapping[str, Tensor]


class Loss(ABC):
    """The objective of a run: a weighted sum of tokens' losses, divided by a count.

    The gradient of token r is weights[r] times the gradient of the token's cross-entropy (z-loss
    included), 0 if the target is masked. The step divides gradients by the statistic "count"; the
    reported loss is "loss" / "count", which is also checked for divergence.

    name: the value of --loss with an LM head. sums: names of the loss's statistics, which are added
    over micro-batches and ranks. maxima: names in `sums` of statistics, at least 0, whose maximum
    is taken over micro-batches and ranks. ahead: True if weights need the losses of the whole
    micro-batch; the head then computes logits twice. largest: the largest absolute weight, for an
    fp8 head, which clamps gradients beyond this weight, and rounds weights that are no powers of
    two to within 1/8. validated: the numbers that validations also report. shown: the validated
    numbers that the console shows beside the loss.
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
        """Return the arrays that the loss reads from each batch, besides tokens and targets."""
        return ()

    def of_rows(self) -> Teacher | Labels | None:
        """Return the operation that computes losses and gradients of the B*T tokens in place of
        cross-entropy; None for cross-entropy. The tokens of a Teacher have no weights. This method
        launches no kernels."""
        return None

    @classmethod
    def guessing(cls, optim: OptimOptions, outputs: int) -> float:
        """Return the loss of an untrained model. outputs: number of logits per row. In a run's
        first steps, a loss beyond a multiple of this value counts as divergence."""
        return log(outputs)

    @classmethod
    def stat(cls) -> dict[str, int]:
        """Return the index of each statistic of a step; statistics that all losses have come
        first."""
        return {name: index for index, name in enumerate((*STATS, *cls.sums))}

    def prepare(self, rows: Rows) -> None:  # noqa: B027 - most have nothing
        """Compute sums over the micro-batch that `weights` and `add` read; called once before both
        methods if `ahead` is True. The method may only launch kernels, and collectives on all
        ranks."""

    def weights(self, rows: Rows) -> Tensor | None:
        """Return the factors of the tokens' gradients, F32 (B, T); None if all factors are 1. The
        method may only launch kernels. rows: the losses and lse belong to the previous micro-batch,
        unless `ahead` is True."""
        return None

    def divisor(self) -> Tensor | None:
        """Return weights of targets, F32 (B, T), whose sum is "count"; None if all weights are 1,
        or "count" is no sum over targets."""
        return None

    @abstractmethod
    def add(self, stats: Tensor, rows: Rows) -> None:
        """Add a micro-batch to the statistics, F64 in the order of `stat`; the method may only
        launch kernels."""

    @classmethod
    def numbers(cls, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers that reports show beside the loss, by name, from the sums of a step or
        a validation."""
        return {}
