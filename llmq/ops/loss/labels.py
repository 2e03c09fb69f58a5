"""A score head's logits behind the last token of a document: the losses of labels.

Without a softmax the loss is the label's logit with another sign, so that its "log-probability" is
a score, which losses of pairs compare: Bradley and Terry, Rank Analysis of Incomplete Block
Designs, 1952.
"""

from __future__ import annotations

from typing import NamedTuple

from llmq.base.dtypes import F32, I32
from llmq.base.tensor import Tensor
from llmq.ops.common import expect_float
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

WARPS = 8  # rows of a block

LABELS = Kernel(
    "loss/labels.cu",
    "labels",
    args="inout T* logits, f32* losses, f32* lse, f32* hits, const i32* targets, "
    "const f32*? weights, i64 rows, i32 vocab, i32 padded_vocab, i32 linear, i32 gradient",
)


class Labels(NamedTuple):
    """How rows learn their labels. hits: F32 (rows,), where it goes whether each row's largest
    logit is that of its label. linear: logits are scores, and no logarithms of probabilities."""

    hits: Tensor
    linear: bool

    def rows(self, start: int, stop: int) -> Labels:
        """Those of these rows alone."""
        return self._replace(hits=self.hits.rows(start, stop))

    def launch(
        self,
        dev: Device,
        logits: Tensor,
        losses: Tensor,
        lse: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        vocab_size: int,
        *,
        gradient: bool,
    ) -> None:
        """Replaces logits by the gradient of the losses, as cu/loss/labels.cu has it.

        Args (X is BF16 or F32):
            logits   inout  X   (rows, Vp)  columns >= vocab_size are ignored on entry; with a
                                            gradient they are 0 on return, else all stay as they are
            losses   out    F32 (rows,)     0 for masked rows
            lse      out    F32 (rows,)     log-sum-exp of the row; 0 where masked or linear
            targets  in     I32 (rows,)     the label; negative: masked, gradient 0
            weights  in     F32 (rows,)     of the gradients; None: all are 1

        Cost:    logits read twice and written once.
        """
        expect_float("labels", "logits", logits)
        rows, padded_vocab = logits.shape
        if not 0 < vocab_size <= padded_vocab:
            raise ValueError(f"labels: {vocab_size} columns, but rows have {padded_vocab}")
        for name, tensor in (("losses", losses), ("lse", lse), ("hits", self.hits)):
            expect("labels", name, tensor, F32, (rows,))
        expect("labels", "targets", targets, I32, (rows,))
        if weights is not None:
            expect("labels", "weights", weights, F32, (rows,))
        args = (logits, losses, lse, self.hits, targets, weights, rows, vocab_size, padded_vocab)
        how = (int(self.linear), int(gradient))
        dev.launch(LABELS, ceil_div(rows, WARPS), 32 * WARPS, (*args, *how))
