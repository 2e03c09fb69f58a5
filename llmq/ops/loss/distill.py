"""Distillation from a teacher's largest probabilities; all other tokens count as one event.

Hinton et al., Distilling the Knowledge in a Neural Network, 2015; reverse divergence: Gu et al.,
MiniLLM, 2024.
"""

from __future__ import annotations

from typing import NamedTuple

from llmq.base.tensor import Tensor
from llmq.ops.common import LogitRows
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel

THREADS, ADD_THREADS, TOP_THREADS = 512, 1024, 1024
MOST = 256  # largest k of DISTILL
MOST_TOP = 255  # largest k of TOP_K

DISTILL = Kernel(
    "loss/distill.cu",
    "distill",
    "inout T[rows,padded_vocab] logits, out f32[rows] losses, out f32[rows] lse, out f32[rows] kl, "
    "i32[rows] targets, f32[rows,2*k] teacher, i64 rows, i32 vocab, i32 padded_vocab, i32 k, "
    "i32 reverse, i32 gradient, f32 mixture, f32 temperature",
    where=f"k >= 1, k <= {MOST}, k <= vocab, vocab <= padded_vocab",
)
ADD = Kernel(
    "loss/distill.cu",
    "distill_add",
    "inout f64[statistics] stats, f32[rows] kl, i64 rows, i32 index",
)
TOP_K = Kernel(
    "loss/distill.cu",
    "top_k",
    "out f32[rows,2*k] top, T[rows,padded_vocab] logits, f32[rows] lse, i64 rows, i32 vocab, "
    "i32 padded_vocab, i32 k",
    where=f"k >= 1, k <= {MOST_TOP}, k <= vocab, vocab <= padded_vocab",
)


class Teacher(NamedTuple):
    """A teacher's predictions for rows, and the form of the loss. logprobs: F32 (rows, 2 k), k
    token ids as the bits of I32, then the ids' log-probabilities at temperature 1. kl: F32 (rows,),
    written: the divergences. mixture: share of the target's cross-entropy in the loss, 0 to 1.
    temperature: more than 0. reverse: True for the divergence of the model from the teacher."""

    logprobs: Tensor
    kl: Tensor
    mixture: float
    temperature: float
    reverse: bool

    def rows(self, start: int, stop: int) -> Teacher:
        """The teacher of these rows alone."""
        return self._replace(logprobs=self.logprobs.rows(start, stop), kl=self.kl.rows(start, stop))

    def launch(self, dev: Device, rows: LogitRows, *, gradient: bool = True) -> None:
        """Replace logits by the gradient of the loss in cu/loss/distill.cu. rows.weights: not used.

        losses: mixture * cross-entropy + (1 - mixture) * temperature^2 * divergence. lse:
        log-sum-exp at temperature 1. Masked rows have loss and gradient 0. Columns >= vocab_size
        are ignored on entry, and 0 on return. gradient: False leaves logits as they are.

        Cost:    logits read three times and written once.
        """
        count, padded_vocab = DISTILL.dims(logits=rows.logits)
        tensors = (*rows[:3], self.kl, rows.targets, self.logprobs)
        sizes = (count, rows.vocab_size, padded_vocab, self.logprobs.shape[-1] // 2)
        numbers = (int(self.reverse), int(gradient), self.mixture, self.temperature)
        dev.launch(DISTILL, count, THREADS, (*tensors, *sizes, *numbers))


def add(dev: Device, stats: Tensor, kl: Tensor, index: int) -> None:
    """Add the divergences kl (rows,), 0 in masked rows, to stats[index], in a fixed order."""
    dev.launch(ADD, 1, ADD_THREADS, (stats, kl, kl.size, index))


def top_k(dev: Device, top: Tensor, logits: Tensor, lse: Tensor, vocab_size: int) -> None:
    """Find the k largest logits of each row; of equal logits, those in the first columns.

    top: F32 (rows, 2 k): k columns, ascending, as the bits of I32, then logit - lse of each.
    logits: columns >= vocab_size are ignored. lse: log-sum-exp of the rows.

    Cost:    one launch, each row read 33 times, mostly from the cache.
    """
    rows, padded_vocab = TOP_K.dims(logits=logits)
    k = top.shape[-1] // 2
    dev.launch(TOP_K, rows, TOP_THREADS, (top, logits, lse, rows, vocab_size, padded_vocab, k))
