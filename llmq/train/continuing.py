"""Texts that the weights of a run continue, in the memory that the run has for an evaluation.

Each new token is a forward pass over whole rows, in which all texts go on at once. That is slower
than with a key-value cache, but it needs neither memory nor a second copy of the weights, and it
works on any number of ranks, with every way to divide and to offload a model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.batch import Batch
from llmq.base.errors import LlmqError
from llmq.data.detokenize import continuation
from llmq.data.tokenizer import load_tokenizer
from llmq.data.tokens import MASKED_TARGET
from llmq.runtime.processes import processes
from llmq.train.rank import Rank
from llmq.train.ranks import Ranks
from llmq.train.sampling import Choice, choose_token, prompt_ids


def continue_text(
    ranks: Ranks,
    shape: tuple[int, int],
    model: ModelConfig,
    source: Path | str | None,
    prompt: str,
    how: Choice,
) -> str:
    """The prompt and its continuation, which ends at T tokens. source: of the tokenizer.

    LlmqError where the prompt does not go, or the tokenizer is not known.
    """
    if source is None:
        raise LlmqError(
            "it is not known which tokenizer made the training data, so there is no text of its "
            "ids: `llmq tokenize` notes it beside the token files"
        )
    tokenizer = load_tokenizer(source)
    ids = prompt_ids(tokenizer, model, prompt, seq_len=shape[1])
    rng = np.random.default_rng([how.seed, 0])  # as the first of `llmq sample`
    rule = {"temperature": how.temperature, "top_k": how.top_k, "top_p": how.top_p}
    (new,) = continue_texts(
        *(ranks, shape, [ids], how.max_new_tokens),
        lambda _, logits: choose_token(logits, rng, **rule),
        {tokenizer.eos_id, *model.eos_token_ids},
    )
    return prompt + continuation(tokenizer, ids if prompt else [], new)


def continue_texts(
    ranks: Ranks,
    shape: tuple[int, int],
    prompts: list[list[int]],
    count: int,
    choose: Callable[[int, np.ndarray], int],
    ends: Collection[int | None],
    stopped: Callable[[], bool] = lambda: False,
) -> list[list[int]] | None:
    """New ids behind each prompt, at most `count`; None once stopped() says yes.

    shape: (B, T) of the run; a prompt has at least one id and less than T. choose(i, logits): the
    next id of the i-th text, from logits F32 (V,). ends: ids that end a text, and are left out.
    """
    texts = [list(ids) for ids in prompts]
    left = list(range(len(prompts)))
    for _ in range(count):
        left = [i for i in left if len(texts[i]) < shape[1]]
        logits = _next_logits(ranks, shape, [texts[i] for i in left], stopped)
        if logits is None:
            return None
        pairs = list(zip(left, logits, strict=True))
        # All go on with the same ids, whatever their processors make of the logits.
        chosen = processes().on_first(lambda pairs=pairs: {i: choose(i, x) for i, x in pairs})
        left = [i for i in left if chosen[i] not in ends]
        for i in left:
            texts[i].append(chosen[i])
        if not left:
            break
    return [text[len(ids) :] for text, ids in zip(texts, prompts, strict=True)]


def _next_logits(
    ranks: Ranks, shape: tuple[int, int], texts: list[list[int]], stopped: Callable[[], bool]
) -> list[np.ndarray] | None:
    """F32 (V,) behind each text."""
    B, T = shape
    groups = [texts[first : first + B] for first in range(0, len(texts), B)]
    found: dict[int, np.ndarray] = {}

    def make(group: list[list[int]]) -> Batch:
        inputs = np.zeros(shape, np.int32)
        for b, text in enumerate(group):
            inputs[b, : len(text)] = text
        return Batch(inputs, np.full(shape, MASKED_TARGET, np.int32))

    def work(rank: Rank, index: int, batch: Batch) -> None:
        of_group = groups[index] if index >= 0 else []
        rows = [b * T + len(text) - 1 for b, text in enumerate(of_group)]
        logits = rank.step.next_logits(batch, rows)
        if index >= 0:
            found[index] = logits

    if not ranks.share("sample", [partial(make, group) for group in groups], work, stopped):
        return None
    for of_process in processes().gather(found):
        found |= of_process
    return [row for index in range(len(groups)) for row in found[index]]
