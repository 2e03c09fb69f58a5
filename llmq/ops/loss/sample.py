"""The choice of a next token from each row of logits, as its request says."""

from typing import NamedTuple

import numpy as np

from llmq.base.tensor import Tensor
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel

THREADS = 1024

CHOOSE = Kernel(
    "loss/sample.cu",
    "sample_choose",
    "out i32[rows] tokens, out f32[rows] logprobs, T[rows,padded_vocab] logits, "
    "f32[rows] temperature, i32[rows] top_k, f32[rows] top_p, f32[rows] min_p, "
    "f32[rows] repetition, i64[rows] seed, i32[rows] position, "
    "inout i32[rows,(vocab + 31) // 32]? seen, i32 vocab, i32 padded_vocab",
    where="padded_vocab % vector_T, vocab >= 1, vocab <= padded_vocab",
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

    Cost:    the logits are read two times for a draw, once for temperature 0, and two times more
             for each of top_k and top_p, mostly from L2; one thread block a row.
    """
    rows, padded_vocab = CHOOSE.dims(logits=logits)
    consts = {} if softcap is None else {"SOFTCAP": int(np.float32(softcap).view(np.uint32))}
    args = (tokens, logprobs, logits, *requests, seen, vocab_size, padded_vocab)
    dev.launch(CHOOSE, rows, THREADS, args, consts=consts)
