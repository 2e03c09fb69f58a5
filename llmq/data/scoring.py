"""What a model is asked about tasks: sequences of tokens, and which of them it is to predict.

Texts are encoded as lm-eval encodes them for models of Hugging Face: context and continuation
together, cut where the context alone ends, with what the tokenizer adds; what is too long loses its
beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """The requests of a task's items, in order; item i has those from starts[i] to starts[i+1].

    cut: how many requests have lost their beginning.
    """

    task: Task
    requests: list[Request]
    starts: list[int]
    cut: int

    def cut_lines(self, longest: str) -> list[str]:
        """What to warn of. longest: what they are too long for."""
        if self.cut == 0:
            return []
        of_all = f"{self.cut} of its {len(self.requests)} sequences"
        return [f"{self.task.name}: {of_all} are too long for {longest} and lose their beginning"]


class Encoder:
    """Texts to requests. longest: inputs of the model that a sequence may have."""

    def __init__(self, tokenizer: Tokenizer, longest: int):
        self.tokenizer, self.longest = tokenizer, longest
        self._prefix = tokenizer.prefix_id
        self._prefix_text = None if self._prefix is None else tokenizer.decode([self._prefix])

    def ask(self, task: Task) -> Asked:
        """DataError for an item that cannot be scored, such as an answer that is too long."""
        requests: list[Request] = []
        starts, self._cut = [0], 0
        for found in self._texts(task) if task.is_text else self._questions(task):
            requests += found
            starts.append(len(requests))
        return Asked(task, requests, starts, self._cut)

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
        self._cut += len(tokens) > self.longest + 1
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


class _Row(NamedTuple):
    """inputs: int32 (n,). asked: requests, by their index, whose inputs these are."""

    inputs: np.ndarray
    asked: list[tuple[int, Request]]


class Batch(NamedTuple):
    """Sequences that are computed at once, padded on the right. shape: (B, T)."""

    rows: list[_Row]
    shape: tuple[int, int]

    @property
    def count(self) -> int:
        """Of the rounds: several where continuations differ in their last token only."""
        return max(len(row.asked) for row in self.rows)

    def inputs(self) -> np.ndarray:
        """int32 (B, T)."""
        inputs = np.zeros(self.shape, np.int32)
        for b, row in enumerate(self.rows):
            inputs[b, : len(row.inputs)] = row.inputs
        return inputs

    def targets(self, number: int) -> np.ndarray:
        """int32 (B, T) of one of the rounds, -100 where nothing is asked."""
        targets = np.full(self.shape, MASKED_TARGET, np.int32)
        for b, row in enumerate(self.rows):
            if number < len(row.asked):
                tokens, count = row.asked[number][1]
                end = len(tokens) - 1
                targets[b, end - count : end] = tokens[-count:]
        return targets

    def add_up(self, out: np.ndarray, number: int, losses: np.ndarray) -> None:
        """Into out (requests,) F64 the log-likelihoods of a round. losses: F32 (B, T)."""
        for b, row in enumerate(self.rows):
            if number < len(row.asked):
                index, (tokens, count) = row.asked[number]
                end = len(tokens) - 1
                out[index] = -losses[b, end - count : end].sum(dtype=np.float64)


def make_batches(
    requests: Sequence[Request], shape: Callable[[int, int], tuple[int, int]]
) -> list[Batch]:
    """All requests, the longest first. shape: (B, T) for the longest length that is left, and the
    number of sequences that are.

    Requests that have the same inputs, such as the letters behind a question, share a row.
    """
    rows: dict[bytes, _Row] = {}
    for index, request in enumerate(requests):
        inputs = request.tokens[:-1]
        rows.setdefault(inputs.tobytes(), _Row(inputs, [])).asked.append((index, request))
    left = sorted(rows.values(), key=lambda row: -len(row.inputs))
    batches, first = [], 0
    while first < len(left):
        B, T = shape(len(left[first].inputs), len(left) - first)
        batches.append(Batch(left[first : first + B], (B, T)))
        first += B
    return batches
