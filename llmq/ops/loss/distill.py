"""A model learns from a teacher's largest probabilities, of which the rest counts as one event.

Hinton et al., Distilling the Knowledge in a Neural Network, 2015; with the reverse divergence Gu et
al., MiniLLM, 2024.
"""

from __future__ import annotations

from typing import NamedTuple

from llmq.base.dtypes import F32, F64, I32
from llmq.base.tensor import Tensor
from llmq.ops.common import expect_float
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, expect

THREADS, ADD_THREADS, TOLD_THREADS = 512, 1024, 1024
MOST = 256  # columns of a teacher's row
MOST_TOLD = 255  # of a row that becomes a teacher's

DISTILL = Kernel(
    "loss/distill.cu",
    "distill",
    args="inout T* logits, f32* losses, f32* lse, f32* kl, const i32* targets, "
    "const f32* teacher, i64 rows, i32 vocab, i32 padded_vocab, i32 k, i32 reverse, i32 gradient, "
    "f32 mixture, f32 temperature",
)
ADD = Kernel(
    "loss/distill.cu", "distill_add", args="inout f64* stats, const f32* kl, i64 rows, i32 index"
)
TOP_K = Kernel(
    "loss/distill.cu",
    "top_k",
    args="f32* told, const T* logits, const f32* lse, i64 rows, i32 vocab, i32 padded_vocab, i32 k",
)


class Teacher(NamedTuple):
    """A teacher of rows, and how they learn from it. told: F32 (rows, 2 k), k columns as the bits
    of I32, and their log-probabilities at temperature 1. kl: F32 (rows,), where the divergences go.
    mixture: of the target's cross-entropy in the loss, 0 to 1. temperature: more than 0. reverse:
    the divergence of the model from the teacher."""

    told: Tensor
    kl: Tensor
    mixture: float
    temperature: float
    reverse: bool

    def rows(self, start: int, stop: int) -> Teacher:
        """The teacher of these rows alone."""
        return self._replace(told=self.told.rows(start, stop), kl=self.kl.rows(start, stop))

    def launch(
        self,
        dev: Device,
        logits: Tensor,
        losses: Tensor,
        lse: Tensor,
        targets: Tensor,
        weights: None,
        vocab_size: int,
        *,
        gradient: bool = True,
    ) -> None:
        """Replaces logits by the gradient of the loss, as cu/loss/distill.cu has it.

        Args (X is BF16 or F32):
            logits   inout  X   (rows, Vp)  columns >= vocab_size are ignored on entry; with a
                                            gradient they are 0 on return, else all stay as they are
            losses   out    F32 (rows,)     mixture * cross-entropy
                                            + (1 - mixture) * temperature^2 * divergence; masked 0
            lse      out    F32 (rows,)     log-sum-exp of the row at temperature 1
            targets  in     I32 (rows,)     negative: masked, gradient 0
            weights                         rows have none

        Cost:    logits read three times and written once.
        """
        expect_float("distill", "logits", logits)
        rows, padded_vocab = logits.shape
        k = self.told.shape[-1] // 2
        if not 0 < k <= min(MOST, vocab_size) or vocab_size > padded_vocab:
            raise ValueError(f"distill: k must be in 1..{MOST} and at most {vocab_size}, got {k}")
        expect("distill", "told", self.told, F32, (rows, 2 * k))
        for name, tensor in (("kl", self.kl), ("losses", losses), ("lse", lse)):
            expect("distill", name, tensor, F32, (rows,))
        expect("distill", "targets", targets, I32, (rows,))
        numbers = (int(self.reverse), int(gradient), self.mixture, self.temperature)
        args = (logits, losses, lse, self.kl, targets, self.told, rows, vocab_size, padded_vocab)
        dev.launch(DISTILL, rows, THREADS, (*args, k, *numbers))


def add(dev: Device, stats: Tensor, kl: Tensor, index: int) -> None:
    """Add the divergences of rows to one of the statistics, in a fixed order.

    Args:
        stats  inout  F64 (s,)
        kl     in     F32 (rows,)  0 where masked
    """
    expect("distill.add", "stats", stats, F64, stats.shape)
    expect("distill.add", "kl", kl, F32, (kl.size,))
    dev.launch(ADD, 1, ADD_THREADS, (stats, kl, kl.size, index))


def top_k(dev: Device, told: Tensor, logits: Tensor, lse: Tensor, vocab_size: int) -> None:
    """Find the k largest logits of each row; of equal ones the first columns.

    Args (X is BF16 or F32):
        told    out  F32 (rows, 2 k)  their columns, ascending, as the bits of I32, and logit - lse;
                                      k at most MOST_TOLD and vocab_size
        logits  in   X   (rows, Vp)   columns >= vocab_size are ignored
        lse     in   F32 (rows,)      log-sum-exp of the rows

    Cost:    one launch, each row read 33 times, from the cache where it holds some rows.
    """
    expect_float("top_k", "logits", logits)
    rows, padded_vocab = logits.shape
    k = told.shape[-1] // 2
    if not 0 < k <= min(MOST_TOLD, vocab_size) or vocab_size > padded_vocab:
        raise ValueError(f"top_k: k must be in 1..{MOST_TOLD} and at most {vocab_size}, got {k}")
    expect("top_k", "told", told, F32, (rows, 2 * k))
    expect("top_k", "lse", lse, F32, (rows,))
    dev.launch(TOP_K, rows, TOLD_THREADS, (told, logits, lse, rows, vocab_size, padded_vocab, k))
