"""The choice of a next token from each row of logits, as its request says."""

from typing import NamedTuple

import numpy as np

from llmq.base.dtypes import F32, I64
from llmq.base.tensor import Tensor
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS, FINISHED = 1024, 32  # threads of a block; of the last kernel, rows
PART = 8192  # ids of a row's part

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
    """How each row chooses, in tensors of the device (rows,).

    temperature: F32, of the scores; 0: the highest one, the lowest id of equal ones. top_k: I32,
    so many ids of the highest scores are left, of equal ones the lowest; 0: all. top_p: F32, of
    these the fewest of the highest whose probability, among those that top_k leaves, is at least
    that; one is always left; 1: all. min_p: F32, of these the ones at least so many times as likely
    as the likeliest; 0: all. repetition: F32, of ids that were seen positive logits are divided by
    it, and negative ones multiplied; 1: none. seed: I64, and position: I32, make the noise.
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
    """Choose a token from each row of logits: the largest sum of score and Gumbel noise of those
    ids that the request's filters leave, which is a draw from their softmax.

    tokens: I32 (rows,), ids; -1 where a logit is NaN or +infinity, or all are -infinity. logprobs:
    F32 (rows,), the logarithms of the chosen ids' probabilities among all, without penalty,
    temperature and filters; NaN for -1. logits: (rows, padded_vocab); columns >= vocab_size are
    ignored. seen: I32 (rows, ceil(vocab_size / 32)), bit id % 32 of word id // 32 says whether an
    id was there before; the chosen ones are added; None: nothing is penalized. softcap: softcap *
    tanh(logit / softcap) counts in the place of each logit; None: itself.

    A row depends on its own logits and request alone. Requests are not checked.

    Cost:    the logits are read two times, and two times more for each of top_k and top_p, mostly
             from L2; four launches. Scratch: 32 bytes for each row and PART ids.
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
