"""The choice of a next token from each row of logits, by the row's request."""

from typing import NamedTuple

import numpy as np

from llmq.base.dtypes import F32, I64
from llmq.base.tensor import Tensor
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS, FINISHED = 1024, 32  # threads of a block; rows of a block of the last kernel
PART = 8192  # token ids in a part of a row, which one block reads

_ROWS = "T[rows,padded_vocab] logits"
_SEEN = "i32[rows,(vocab + 31) // 32]? seen"
_SIZES = "i32 vocab, i32 padded_vocab, i32 parts"
_RULES = {
    "where": "vocab >= 1, vocab <= padded_vocab",
    "gpu": "padded_vocab % vector_T",
    "programmatic": True,
}
SCAN = Kernel(
    "loss/sample.cu",
    "sample_scan",
    f"out f32[rows,parts,2] stats, out i64[rows,parts] largest, {_ROWS}, f32[rows] repetition, "
    f"{_SEEN}, {_SIZES}",
    **_RULES,
)
CUT = Kernel(
    "loss/sample.cu",
    "sample_cut",
    f"out i64[rows] last, {_ROWS}, i64[rows,parts] largest, f32[rows] temperature, "
    f"i32[rows] top_k, f32[rows] top_p, f32[rows] repetition, {_SEEN}, {_SIZES}",
    **_RULES,
)
DRAW = Kernel(
    "loss/sample.cu",
    "sample_draw",
    f"out i64[rows,parts] found, {_ROWS}, i64[rows,parts] largest, i64[rows] last, "
    "f32[rows] temperature, f32[rows] min_p, f32[rows] repetition, i64[rows] seed, "
    f"i32[rows] position, {_SEEN}, {_SIZES}",
    **_RULES,
)
FINISH = Kernel(
    "loss/sample.cu",
    "sample_finish",
    f"out i32[rows] tokens, out f32[rows] logprobs, {_ROWS}, f32[rows,parts,2] stats, "
    f"i64[rows,parts] found, inout {_SEEN}, i32 rows, {_SIZES}",
    **_RULES,
)


class Requests(NamedTuple):
    """Options of each row's choice, in device tensors (rows,). Filters apply in this order.

    temperature: F32, divides the scores; 0: the highest score wins, of equal scores the lowest id.
    top_k: I32, number of ids with the highest scores that stay, of equal scores the lowest ids; 0:
    all ids. top_p: F32; the fewest likely ids stay whose probabilities, among the ids that top_k
    leaves, add up to top_p or more; at least one id stays; 1: all ids. min_p: F32; ids stay whose
    probability is at least min_p times the largest one; 0: all ids. repetition: F32; positive
    logits of seen ids are divided by this number, and negative logits are multiplied; 1: no
    penalty. seed, position: I64 and I32, from which the noise is made.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    seed: Tensor
    position: Tensor


def choose(
    dev: Device,
    tokens: Tensor,
    logprobs: Tensor,
    logits: Tensor,
    requests: Requests,
    seen: Tensor | None = None,
    *,
    vocab_size: int,
    softcap: float | None = None,
) -> None:
    """Choose a token from each row of logits. The choice is the id with the largest sum of score
    and Gumbel noise among ids that the request's filters leave: a draw from the softmax of these.

    tokens: I32 (rows,), ids; -1 if a logit is NaN or +infinity, or if all are -infinity. logprobs:
    F32 (rows,), log-probabilities of the chosen ids among all ids, without penalty, temperature and
    filters; NaN for -1. logits: (rows, padded_vocab); columns >= vocab_size are ignored. seen: I32
    (rows, ceil(vocab_size / 32)), inout; bit id % 32 of word id // 32 is 1 if the row has seen this
    id; chosen ids are added; None: no penalty. softcap: softcap * tanh(logit / softcap) replaces
    each logit; None: no cap.

    A row's choice depends on its own logits and request alone. Requests are not checked.

    Cost:    logits are read two times, and two times more for each of top_k and top_p, mostly from
             L2; four launches. Scratch: 32 bytes for each row and PART ids.
    """
    rows, padded_vocab = SCAN.dims(logits=logits)
    consts = {} if softcap is None else {"SOFTCAP": int(np.float32(softcap).view(np.uint32))}
    parts = ceil_div(vocab_size, PART)
    sizes = (vocab_size, padded_vocab, parts)
    grid = (parts, rows)
    with (
        dev.scratch("sample_stats", (rows, parts, 2), F32) as stats,
        dev.scratch("sample_largest", (rows, parts), I64) as largest,
        dev.scratch("sample_found", (rows, parts), I64) as found,
        dev.scratch("sample_last", (rows,), I64) as last,
    ):
        args = (stats, largest, logits, requests.repetition, seen, *sizes)
        dev.launch(SCAN, grid, THREADS, args, consts=consts)
        filters = (requests.temperature, requests.top_k, requests.top_p, requests.repetition)
        dev.launch(
            CUT, rows, THREADS, (last, logits, largest, *filters, seen, *sizes), consts=consts
        )
        draws = (
            requests.temperature,
            requests.min_p,
            requests.repetition,
            requests.seed,
            requests.position,
        )
        args = (found, logits, largest, last, *draws, seen, *sizes)
        dev.launch(DRAW, grid, THREADS, args, consts=consts)
        args = (tokens, logprobs, logits, stats, found, seen, rows, *sizes)
        dev.launch(FINISH, ceil_div(rows, FINISHED), FINISHED, args, consts=consts)
