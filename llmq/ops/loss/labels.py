"""A score head's logits behind the last token of a document: the losses of labels.

Without a softmax the loss is the label's logit with another sign, so that its "log-probability" is
a score, which losses of pairs compare: Bradley and Terry, Rank Analysis of Incomplete Block
Designs, 1952.
"""

from __future__ import annotations

from typing import NamedTuple

from llmq.base.tensor import Tensor
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

WARPS = 8  # rows of a block

LABELS = Kernel(
    "loss/labels.cu",
    "labels",
    "inout T[rows,padded_vocab] logits, out f32[rows] losses, out f32[rows] lse, "
    "out f32[rows] hits, i32[rows] targets, f32[rows]? weights, i64 rows, i32 vocab, "
    "i32 padded_vocab, i32 linear, i32 gradient",
    where="vocab >= 1, vocab <= padded_vocab",
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

        targets: the label; negative: masked, with a loss and gradient of 0. lse: log-sum-exp of the
        row; 0 where masked or linear. weights: of the gradients; None: all are 1. Columns >=
        vocab_size are ignored on entry; with a gradient they are 0 on return, else logits stay.

        Cost:    logits read twice and written once.
        """
        rows, padded_vocab = LABELS.dims(logits=logits)
        args = (logits, losses, lse, self.hits, targets, weights, rows, vocab_size, padded_vocab)
        how = (int(self.linear), int(gradient))
        dev.launch(LABELS, ceil_div(rows, WARPS), 32 * WARPS, (*args, *how))
