"""What a model is asked about tasks: sequences of tokens, and which of them it is to predict.

Texts are encoded as lm-eval encodes them for models of Hugging Face: context and continuation
together, cut where the context alone ends, with what the tokenizer adds; what is too long loses its
beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from llmq.base.errors import DataError
from llmq.data.tasks import Question, Task, Text
from llmq.data.tokenizer import Tokenizer
from llmq.data.tokens import MASKED_TARGET


class Request(NamedTuple):
    """tokens: int32 (n,), of which the last `count` are to be predicted. 0 < count < n."""

    tokens: np.ndarray
    count: int


class Asked(NamedTuple):
    """The requests of a task's items, in order; item i has those from starts[i] to starts[i+1]."""

    task: Task
    requests: list[Request]
    starts: list[int]


class Encoder:
    """Texts to requests. longest: inputs of the model that a sequence may have."""

    def __init__(self, tokenizer: Tokenizer, longest: int):
        self.tokenizer, self.longest = tokenizer, longest
        self._prefix = tokenizer.prefix_id
        self._prefix_text = None if self._prefix is None else tokenizer.decode([self._prefix])

    def ask(self, task: Task) -> Asked:
        """DataError for an item that cannot be scored, such as an answer that is too long."""
        requests: list[Request] = []
        starts = [0]
        for found in self._texts(task) if task.is_text else self._questions(task):
            requests += found
            starts.append(len(requests))
        return Asked(task, requests, starts)

    def _with_added(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids as transformers makes them, except where a text has its first token written out."""
        before, behind = (np.array(ids, np.int32) for ids in self.tokenizer.added)
        encoded = self.tokenizer.encode_batch(texts)
        return [
            ids if self._begins(text) else np.concatenate([before, ids, behind])
            for text, ids in zip(texts, encoded, strict=True)
        ]

    def _begins(self, text: str) -> bool:
        return bool(self._prefix_text) and text.startswith(self._prefix_text)

    def _questions(self, task: Task) -> Iterator[list[Request]]:
        questions: tuple[Question, ...] = task.items
        pairs: list[tuple[str, str]] = []
        for question in questions:
            for choice in question.choices:
                context = choice.context.rstrip()  # blanks belong to the tokens behind them
                blanks = choice.context[len(context) :]
                pairs.append((context, blanks + choice.continuation))
        whole = iter(self._with_added([context + more for context, more in pairs]))
        alone = {context: 0 for context, _ in pairs}
        lengths = [len(ids) for ids in self._with_added(list(alone))]
        alone = dict(zip(alone, lengths, strict=True))
        contexts = (context for context, _ in pairs)
        for question in questions:
            yield [
                self._pair(next(whole), alone[next(contexts)], question.where)
                for _ in question.choices
            ]

    def _pair(self, tokens: np.ndarray, context: int, where: str) -> Request:
        count = len(tokens) - context
        if context == 0:
            raise DataError(f"{where}: nothing comes before the answers")
        if count <= 0:
            raise DataError(f"{where}: an answer has no tokens of its own")
        if count > self.longest:
            raise DataError(
                f"{where}: an answer has {count} tokens, more than the {self.longest} of a sequence"
            )
        return Request(tokens[-(self.longest + 1) :], count)

    def _texts(self, task: Task) -> Iterator[list[Request]]:
        """Every token is predicted once, in windows as long as may be, the first behind a prefix.

        Only the last window overlaps the one before it, so that it is as long.
        """
        if self._prefix is None:
            raise DataError("the tokenizer has no token that begins a text: it cannot score texts")
        items: tuple[Text, ...] = task.items
        for ids in self._with_added([item.text for item in items]):
            tokens = np.concatenate([np.array([self._prefix], np.int32), ids])
            windows = []
            done = 0
            while done < len(ids):
                count = min(len(ids) - done, self.longest)
                done += count
                start = max(0, done - self.longest)
                windows.append(Request(tokens[start : done + 1], count))
            yield windows


# ------------------------------------------------------------------------------------------------
# Batches


class Batch(NamedTuple):
    """Sequences that are computed at once, padded on the right.

    inputs: int32 (B, T). rounds: targets int32 (B, T) of each, -100 where nothing is asked; several
    where continuations differ in their last token only. owners: of each round, by row, the index of
    the request, -1 for none.
    """

    inputs: np.ndarray
    rounds: list[np.ndarray]
    owners: list[list[int]]


class _Row(NamedTuple):
    inputs: np.ndarray
    asked: list[tuple[int, np.ndarray]]  # request and its targets


def make_batches(
    requests: Sequence[Request], shape: Callable[[int, int], tuple[int, int]]
) -> list[Batch]:
    """All requests, the longest first. shape: (B, T) for the longest length that is left, and the
    number of sequences that are.

    Requests that have the same inputs, such as the letters behind a question, share a row.
    """
    rows: dict[bytes, _Row] = {}
    for index, (tokens, count) in enumerate(requests):
        targets = tokens[1:].copy()
        targets[: len(targets) - count] = MASKED_TARGET
        row = rows.setdefault(tokens[:-1].tobytes(), _Row(tokens[:-1], []))
        row.asked.append((index, targets))
    left = sorted(rows.values(), key=lambda row: -len(row.inputs))
    batches, first = [], 0
    while first < len(left):
        B, T = shape(len(left[first].inputs), len(left) - first)
        batches.append(_batch(left[first : first + B], B, T))
        first += B
    return batches


def _batch(rows: list[_Row], B: int, T: int) -> Batch:
    count = max(len(row.asked) for row in rows)
    inputs = np.zeros((B, T), np.int32)
    rounds = [np.full((B, T), MASKED_TARGET, np.int32) for _ in range(count)]
    owners = [[-1] * B for _ in range(count)]
    for b, row in enumerate(rows):
        inputs[b, : len(row.inputs)] = row.inputs
        for number, (index, targets) in enumerate(row.asked):
            rounds[number][b, : len(targets)] = targets
            owners[number][b] = index
    return Batch(inputs, rounds, owners)


def add_up(out: np.ndarray, batch: Batch, losses: Iterable[np.ndarray]) -> None:
    """Into out (requests,) F64 the log-likelihoods of a batch. losses: F32 (B, T) of each round."""
    for targets, owners, of_round in zip(batch.rounds, batch.owners, losses, strict=True):
        sums = np.where(targets == MASKED_TARGET, 0.0, of_round.astype(np.float64)).sum(axis=1)
        for b, index in enumerate(owners):
            if index >= 0:
                out[index] = -sums[b]
