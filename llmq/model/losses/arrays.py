"""Losses that a user's class computes on arrays: NumPy arrays on the CPU, CuPy arrays on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from llmq.base.dtypes import F32
from llmq.base.step_inputs import ARRAYS, Input
from llmq.base.tensor import Tensor
from llmq.model.losses.cross_entropy import TokenCrossEntropy
from llmq.model.losses.loss import LossContext, Rows
from llmq.ops.common import LogitRows
from llmq.ops.loss import cross_entropy
from llmq.options.groups.optim import OptimOptions
from llmq.runtime.device import Device


class ArrayLoss(TokenCrossEntropy):
    """Base class of a user's loss: a subclass with a `name` overrides `row_weights`, `of_logits` or
    both, and is passed to `llmq.Trainer(loss=...)`.

    The methods compute with `xp`, which is NumPy on the CPU and CuPy on a GPU. A GPU captures the
    launches of these methods once, and replays the launches for every micro-batch: no branch may
    depend on an element, and no call may wait for the GPU. Memory plans do not include the memory
    that CuPy allocates for results. The reported loss is the mean over trained tokens of each
    token's loss times its weight.

    name: the value of --loss that selects the class. arrays: names of float32 arrays (B, T) that
    come with each batch, in `Batch.named` or in files FILE.NAME.npy beside token files. ahead: True
    if `row_weights` reads losses; the head then computes its logits twice. largest: the largest
    absolute weight, which an fp8 head must know (`Loss`).
    """

    arrays: ClassVar[tuple[str, ...]] = ()

    def row_weights(self, xp: ModuleType, targets: Any, losses: Any, **arrays: Any) -> Any:
        """Return the factor of each token's gradient, float32 (B, T), of any sign.

        targets: int32 (B, T); negative for masked tokens, whose weights are ignored. losses:
        float32 (B, T), each token's loss; None unless `ahead` is True. arrays: float32 (B, T) by
        name.
        """
        raise NotImplementedError

    def of_logits(self, xp: ModuleType, logits: Any, targets: Any, **arrays: Any) -> tuple:
        """Return losses, float32 (rows,), and their gradients with respect to the logits, float32
        (rows, V), for some rows of the micro-batch. Without this method, losses are cross-entropy.

        logits: float32 (rows, V). targets: int32 (rows,); 0 in masked rows, whose results are
        ignored. arrays: float32 (rows,) by name.
        """
        raise NotImplementedError

    # -- called by the head and the step ----------------------------------------------------------

    @classmethod
    def overrides(cls, method: str) -> bool:
        """Return True if the subclass overrides this method."""
        return getattr(cls, method) is not getattr(ArrayLoss, method)

    def __init__(self, ctx: LossContext):
        super().__init__(ctx)
        shape, self._weights = (ctx.batch.batch_size, ctx.batch.local_seq_len), None
        if self.overrides("row_weights"):
            self._weights = ctx.dev.alloc("row_weights", shape, F32, "Activations")
        self._rows = None
        if self.overrides("of_logits"):
            self._rows = ArrayRows(
                self, [self.named[n].view(ctx.batch.micro_tokens) for n in self.arrays]
            )

    @classmethod
    def inputs(cls, optim: OptimOptions) -> tuple[Input, ...]:
        return tuple(Input(name, sidecar=ARRAYS) for name in cls.arrays)

    @classmethod
    def guessing(cls, optim: OptimOptions, outputs: int) -> float:
        """Return infinity, because a user's loss has no bound."""
        return inf

    def weights(self, rows: Rows) -> Tensor | None:
        """Return the weights of tokens, from one call of row_weights."""
        if self._weights is None:
            return None

        def weigh(xp: ModuleType, weights: Any, targets: Any, losses: Any, *arrays: Any) -> None:
            named = dict(zip(self.arrays, arrays, strict=True))
            weights[...] = self.row_weights(xp, targets, losses if self.ahead else None, **named)

        named = [self.named[name] for name in self.arrays]
        self.dev.compute(weigh, self._weights, rows.targets, rows.losses, *named)
        return self._weights

    def of_rows(self) -> ArrayRows | None:
        return self._rows

    def add(self, stats: Tensor, rows: Rows) -> None:
        """Add the losses times the weights to the statistics, in validations, too."""
        weights = self.weights(rows)
        cross_entropy.stats(self.dev, stats, rows.losses, rows.lse, rows.targets, weights)


class ArrayRows(NamedTuple):
    """The losses of rows that `ArrayLoss.of_logits` computes. arrays: F32 (rows,) each, in the
    order of the loss's `arrays`."""

    loss: ArrayLoss
    arrays: Sequence[Tensor]

    def rows(self, start: int, stop: int) -> ArrayRows:
        """Return the losses of rows [start, stop) only."""
        return self._replace(arrays=[array.rows(start, stop) for array in self.arrays])

    def launch(self, dev: Device, rows: LogitRows, *, gradient: bool) -> None:
        """Replace logits by the gradient of the losses times the weights, 0 in masked rows and in
        columns >= vocab_size. If `gradient` is False, the logits stay. lse: the log-sum-exp of the
        row's logits."""
        names, wide, vocab_size = self.loss.arrays, rows.logits.dtype is F32, rows.vocab_size

        def work(xp: ModuleType, logits: Any, losses: Any, lse: Any, targets: Any, *more: Any):
            named, factors = dict(zip(names, more, strict=False)), more[len(names) :]
            values = (logits if wide else widened(xp, logits))[:, :vocab_size]
            real, top = targets >= 0, values.max(axis=1)
            sums = xp.exp(values - top[:, None]).sum(axis=1)
            lse[...] = xp.where(real, top + xp.log(sums), 0)
            found, slopes = self.loss.of_logits(xp, values, xp.maximum(targets, 0), **named)
            losses[...] = xp.where(real, found, 0)
            if gradient:
                counted = xp.where(real, *factors, 0) if factors else real
                slopes = xp.where(real[:, None], slopes * counted[:, None], 0).astype(xp.float32)
                logits[:, :vocab_size] = slopes if wide else rounded(xp, slopes)
                logits[:, vocab_size:] = 0

        weights = [] if rows.weights is None else [rows.weights]
        dev.compute(work, *rows[:4], *self.arrays, *weights)


def widened(xp: ModuleType, bits: Any) -> Any:
    """Return the float32 numbers of BF16 numbers that are given as uint16 bits."""
    return (bits.astype(xp.uint32) << 16).view(xp.float32)


def rounded(xp: ModuleType, values: Any) -> Any:
    """Return the uint16 bits of the BF16 numbers nearest to float32 numbers; NaN stays NaN."""
    bits = values.view(xp.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return xp.where(xp.isnan(values), 0x7FC0, nearest).astype(xp.uint16)
