"""Losses of a score head, whose logits after a document's last token belong to labels or are
scores.

A score is a logit without a softmax: its loss is -logit, so that losses of pairs compare scores as
if they were log-probabilities (Bradley and Terry, Rank Analysis of Incomplete Block Designs, 1952).
"""

from __future__ import annotations

from typing import NamedTuple

from llmq.base.tensor import Tensor
from llmq.ops.common import LogitRows
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

WARPS = 8  # warps of a block, each with one row

LABELS = Kernel(
    "loss/labels.cu",
    "labels",
    "inout T[rows,padded_vocab] logits, out f32[rows] losses, out f32[rows] lse, "
    "out f32[rows] hits, i32[rows] targets, f32[rows]? weights, i64 rows, i32 vocab, "
    "i32 padded_vocab, i32 linear, i32 gradient",
    where="vocab >= 1, vocab <= padded_vocab",
)


class Labels(NamedTuple):
    """The loss of labels. hits: F32 (rows,), written: 1 if a row's label has the largest logit.
    linear: True if logits are scores, without a softmax."""

    hits: Tensor
    linear: bool

    def rows(self, start: int, stop: int) -> Labels:
        """The labels of these rows alone."""
        return self._replace(hits=self.hits.rows(start, stop))

    def launch(self, dev: Device, rows: LogitRows, *, gradient: bool) -> None:
        """Replace logits by the gradient of the losses in cu/loss/labels.cu.

        targets: labels. lse: log-sum-exp of the row; 0 if the row is masked, or if linear. Masked
        rows have loss and gradient 0. Columns >= vocab_size are ignored on entry, and 0 on return.
        gradient: False leaves logits as they are.

        Cost:    logits read twice and written once.
        """
        count, padded_vocab = LABELS.dims(logits=rows.logits)
        tensors = (*rows[:3], self.hits, rows.targets, rows.weights)
        sizes = (count, rows.vocab_size, padded_vocab)
        args = (*tensors, *sizes, int(self.linear), int(gradient))
        dev.launch(LABELS, ceil_div(count, WARPS), 32 * WARPS, args)
