"""The largest logits of each row: what is kept of a teacher's distribution."""

from llmq.base.dtypes import F32
from llmq.base.tensor import Tensor
from llmq.ops.common import expect_float
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, expect

THREADS = 1024
MOST = 255  # of a row

TOP_K = Kernel(
    "top_k.cu",
    "top_k",
    args="f32* told, const T* logits, const f32* lse, i64 rows, i32 vocab, i32 padded_vocab, i32 k",
)


def top_k(dev: Device, told: Tensor, logits: Tensor, lse: Tensor, vocab_size: int) -> None:
    """Find the k largest logits of each row; of equal ones the first columns.

    Args (X is BF16 or F32):
        told    out  F32 (rows, 2 k)  their columns, ascending, as the bits of I32, and logit - lse;
                                      k at most MOST and vocab_size
        logits  in   X   (rows, Vp)   columns >= vocab_size are ignored
        lse     in   F32 (rows,)      log-sum-exp of the rows

    Cost:    one launch, each row read 33 times, from the cache where it holds some rows.
    """
    expect_float("top_k", "logits", logits)
    rows, padded_vocab = logits.shape
    k = told.shape[-1] // 2
    if not 0 < k <= min(MOST, vocab_size) or vocab_size > padded_vocab:
        raise ValueError(f"top_k: k must be in 1..{MOST} and at most {vocab_size}, got {k}")
    expect("top_k", "told", told, F32, (rows, 2 * k))
    expect("top_k", "lse", lse, F32, (rows,))
    dev.launch(TOP_K, rows, THREADS, (told, logits, lse, rows, vocab_size, padded_vocab, k))
