"""Scoring of tasks: requests for log-likelihoods of tokens, and metrics of log-likelihoods.

Encoding and metrics follow lm-eval for Hugging Face models. Context and continuation are encoded
together, and split at the number of tokens of the context alone. A long sequence loses its
beginning.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from llmq.base.errors import ConfigError, DataError
from llmq.data.tokens import MASKED_TARGET
from llmq.text.guarded import process_of
from llmq.text.tasks import CLASSES, PAIRS, TEXT, Pair, Question, Task, Text
from llmq.text.tokenize import encode_records
from llmq.text.tokenizer import Tokenizer

RECORDS = 200  # number of records that a process encodes at a time


class Request(NamedTuple):
    """Request for the log-likelihood of the last `count` of `tokens`, int32 (n,); 0 < count < n."""

    tokens: np.ndarray
    count: int


class Asked(NamedTuple):
    """Requests of a task, in order; item i of the task has the requests [starts[i], starts[i + 1]).
    cut: number of requests that have lost their beginning."""

    task: Task
    requests: list[Request]
    starts: list[int]
    cut: int

    def cut_lines(self, longest: str) -> list[str]:
        """A warning about cut requests; [] if no request is cut. longest: name of the exceeded
        length, for the warning."""
        if self.cut == 0:
            return []
        of_all = f"{self.cut} of its {len(self.requests)} sequences"
        return [f"{self.task.name}: {of_all} are too long for {longest} and lose their beginning"]


class Encoder:
    """Encoder of tasks as requests. longest: maximum number of inputs of a sequence. labels: number
    of labels of the model's score head; 0: no score head. cut: number of requests of the last task
    that have lost their beginning."""

    def __init__(self, tokenizer: Tokenizer, longest: int, labels: int = 0):
        self.tokenizer, self.longest, self.labels, self.cut = tokenizer, longest, labels, 0
        self._prefix = tokenizer.prefix_id
        self._prefix_text = None if self._prefix is None else tokenizer.decode([self._prefix])

    def ask(self, task: Task) -> Asked:
        """Encode a task as requests. DataError for an item that cannot be scored; ConfigError for a
        task that does not fit the score head."""
        requests: list[Request] = []
        starts, self.cut = [0], 0
        own = {PAIRS: self.labels == 1, CLASSES: self.labels > 1}
        if not own.get(task.kind, self.labels == 0):
            what = f"a score head of {self.labels} labels" if self.labels else "no score head"
            raise ConfigError(
                f"task {task.name}: the model has {what}, and --task classes=FILE is for one of "
                "several labels, pairs=FILE for one of one label, other tasks for none"
            )
        ways = {TEXT: self._texts, CLASSES: self._classes, PAIRS: self._pairs}
        for of_item in ways.get(task.kind, self._questions)(task):
            requests += of_item
            starts.append(len(requests))
        return Asked(task, requests, starts, self.cut)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of texts, int32 (n,) each, with the tokens that transformers adds; no tokens are
        added to a text that already begins with the prefix token's text."""
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
                context = choice.context.rstrip()  # blanks belong to the continuation's first token
                blanks = choice.context[len(context) :]
                pairs.append((context, blanks + choice.continuation))
        whole = iter(self.encode([context + more for context, more in pairs]))
        alone = dict.fromkeys(context for context, _ in pairs)
        alone = dict(zip(alone, map(len, self.encode([*alone])), strict=True))
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
        self.cut += len(tokens) > self.longest + 1
        return Request(tokens[-(self.longest + 1) :], count)

    def _classes(self, task: Task) -> Iterator[list[Request]]:
        """Requests for each item, one for each label: the label is the target behind the text."""
        questions: tuple[Question, ...] = task.items
        texts = [question.choices[0].context for question in questions]
        for question, ids in zip(questions, self.encode(texts), strict=True):
            if not len(ids):
                raise DataError(f"{question.where}: the text has no tokens")
            if not 0 <= question.gold < self.labels:
                raise DataError(
                    f"{question.where}: label {question.gold} is none of the model's 0 to "
                    f"{self.labels - 1}"
                )
            self.cut += len(ids) > self.longest
            ids = ids[-self.longest :]
            yield [Request(np.append(ids, np.int32(k)), 1) for k in range(self.labels)]

    def _pairs(self, task: Task) -> Iterator[list[Request]]:
        """Requests for each pair, one for each of its two answers."""
        pairs: tuple[Pair, ...] = task.items
        yield from self.of_records(PAIRS, [(pair.record, pair.where) for pair in pairs])

    def of_records(
        self, form: str, records: Sequence[tuple[bytes, str]]
    ) -> Iterator[list[Request]]:
        """Requests for each record: one for each label behind each document that `encode_records`
        makes of the record."""
        for first in range(0, len(records), RECORDS):
            part = records[first : first + RECORDS]
            encoded = process_of(self.tokenizer).call(encode_records, form, part)
            for documents in encoded:
                self.cut += sum(len(ids) > self.longest for ids in documents)
                own = [ids[-self.longest :] for ids in documents]
                labels = range(self.labels)
                yield [Request(np.append(ids, np.int32(k)), 1) for ids in own for k in labels]

    def _texts(self, task: Task) -> Iterator[list[Request]]:
        """Requests that predict every token once, in windows of `longest` inputs; the first window
        begins with the prefix token. The last window is as long as the others, and overlaps the
        window before."""
        items: tuple[Text, ...] = task.items
        for ids in self.encode([item.text for item in items]):
            yield self.windows(ids)

    def windows(self, ids: np.ndarray) -> list[Request]:
        """Requests that predict every token of a text once, in the windows of `_texts`. ids: token
        ids, int32 (n,)."""
        if self._prefix is None:
            raise DataError("the tokenizer has no token that begins a text: it cannot score texts")
        tokens = np.concatenate([np.array([self._prefix], np.int32), ids])
        windows, done = [], 0
        while done < len(ids):
            count = min(len(ids) - done, self.longest)
            done += count
            start = max(0, done - self.longest)
            windows.append(Request(tokens[start : done + 1], count))
        return windows


# ------------------------------------------------------------------------------------------------
# Batches


class _Sequence(NamedTuple):
    """Inputs, int32 (n,), and the requests with these inputs, each behind its index among all
    requests."""

    inputs: np.ndarray
    asked: list[tuple[int, Request]]


class Batch(NamedTuple):
    """Sequences that are computed together. shape: (B, T), rows and tokens of a row. placed: each
    sequence with its row and its first position in the row."""

    placed: list[tuple[_Sequence, int, int]]
    shape: tuple[int, int]

    @property
    def count(self) -> int:
        """Number of rounds. A round has one request of each sequence; a sequence has several
        requests if these differ only in their last token."""
        return max(len(sequence.asked) for sequence, _, _ in self.placed)

    def inputs(self) -> np.ndarray:
        """Token ids, int32 (B, T)."""
        inputs = np.zeros(self.shape, np.int32)
        for sequence, b, first in self.placed:
            inputs[b, first : first + len(sequence.inputs)] = sequence.inputs
        return inputs

    def starts(self) -> np.ndarray:
        """Starts of documents, int32 (B, T), as in base.batch.Batch: a sequence is a document."""
        starts = np.zeros(self.shape, np.int32)
        for sequence, b, first in self.placed:
            starts[b, first:] = first
            end = first + len(sequence.inputs)
            starts[b, end:] = end
        return starts

    def targets(self, number: int) -> np.ndarray:
        """Targets of round `number`, int32 (B, T); -100 at positions without a target."""
        targets = np.full(self.shape, MASKED_TARGET, np.int32)
        for _, request, part in self._asked(number):
            targets[part] = request.tokens[-request.count :]
        return targets

    def likelihoods(self, number: int, losses: np.ndarray) -> dict[int, float]:
        """Log-likelihoods in nats of the requests of round `number`, by index. losses: loss of each
        target in nats, float32 (B, T)."""
        return {i: -losses[part].sum(dtype=np.float64) for i, _, part in self._asked(number)}

    def are_greedy(self, number: int, likeliest: np.ndarray) -> dict[int, bool]:
        """For each request of round `number`, by index: True if its tokens are the likeliest ones.
        likeliest: likeliest id at each position, int32 (B, T)."""
        return {
            i: np.array_equal(likeliest[part], request.tokens[-request.count :])
            for i, request, part in self._asked(number)
        }

    def _asked(self, number: int) -> Iterator[tuple[int, Request, tuple[int, slice]]]:
        """Each request of round `number`: its index, the request, and (row, positions) of its
        targets."""
        for sequence, b, first in self.placed:
            if number < len(sequence.asked):
                index, request = sequence.asked[number]
                end = first + len(sequence.inputs)
                yield index, request, (b, slice(end - request.count, end))


def _sequences(requests: Sequence[Request]) -> list[_Sequence]:
    """Sequences of all requests, the longest first. Requests with equal inputs, such as answers of
    one letter, share a sequence."""
    sequences: dict[bytes, _Sequence] = {}
    for index, request in enumerate(requests):
        inputs = request.tokens[:-1]
        sequence = sequences.setdefault(inputs.tobytes(), _Sequence(inputs, []))
        sequence.asked.append((index, request))
    return sorted(sequences.values(), key=lambda sequence: -len(sequence.inputs))


def make_batches(
    requests: Sequence[Request], shape: Callable[[int, int], tuple[int, int]]
) -> list[Batch]:
    """Batches of all requests, the longest first, with a row for each sequence. shape: function of
    (length, n) that returns (B, T) for n remaining sequences, the longest with `length` inputs."""
    left, batches, first = _sequences(requests), [], 0
    while first < len(left):
        B, T = shape(len(left[first].inputs), len(left) - first)
        rows = left[first : first + B]
        batches.append(Batch([(sequence, b, 0) for b, sequence in enumerate(rows)], (B, T)))
        first += B
    return batches


def pack_batches(requests: Sequence[Request], shape: tuple[int, int]) -> list[Batch]:
    """Batches of all requests, the longest first, with as many sequences in a row as fit, for
    masked documents. shape: (B, T)."""
    B, T = shape
    batches: list[Batch] = []
    row, at = -1, T  # number of the row over all batches, and place of the next sequence
    for sequence in _sequences(requests):
        if at + len(sequence.inputs) > T:
            row, at = row + 1, 0
        if row == B * len(batches):
            batches.append(Batch([], shape))
        batches[-1].placed.append((sequence, row % B, at))
        at += len(sequence.inputs)
    return batches


def check_ids(requests: Sequence[Request], vocab_size: int) -> None:
    """Raise ConfigError for an id that is not in the model's vocabulary."""
    most = max((int(request.tokens.max()) for request in requests), default=0)
    if most >= vocab_size:
        raise ConfigError(
            f"token {most} of a task is outside the model's vocabulary of {vocab_size}: the "
            "tokenizer does not belong to the model"
        )


class Score(NamedTuple):
    """Metric of a task. stderr: standard error of `value` if this is a mean over items, else None.
    count: number of items. value and stderr are NaN if a log-likelihood is not finite."""

    task: str
    metric: str
    value: float
    stderr: float | None
    count: int


def judge(asked: Asked, likelihoods: np.ndarray) -> list[Score]:
    """Metrics of a task from log-likelihoods, float64 (requests,), in nats."""
    task, count = asked.task, len(asked.task.items)
    finite = bool(np.isfinite(likelihoods).all())
    if task.is_text:
        values = _of_texts(asked, float(likelihoods.sum())) if finite else {}
        return [Score(task.name, m, values.get(m, math.nan), None, count) for m in task.metrics]
    hits = _hits(asked, likelihoods)
    scores = []
    for metric in task.metrics:
        values, stderr = hits[metric] if finite else np.full(count, math.nan), None
        if count > 1:
            stderr = float(values.std(ddof=1)) / math.sqrt(count)
        scores.append(Score(task.name, metric, float(values.mean()), stderr, count))
    return scores


def _hits(asked: Asked, likelihoods: np.ndarray) -> dict[str, np.ndarray]:
    """Hits by metric, float64 (questions,): 1 if the likeliest answer is right, else 0."""
    hits: dict[str, list[bool]] = {"acc": [], "acc_norm": []}
    for i, question in enumerate(asked.task.items):
        values = likelihoods[asked.starts[i] : asked.starts[i + 1]]
        lengths = np.array([choice.length for choice in question.choices], np.float64)
        with np.errstate(divide="ignore"):  # an empty answer is infinitely unlikely
            normalized = values / lengths
        hits["acc"].append(int(values.argmax()) == question.gold)
        hits["acc_norm"].append(int(normalized.argmax()) == question.gold)
    return {metric: np.array(of_all, np.float64) for metric, of_all in hits.items()}


def _of_texts(asked: Asked, likelihood: float) -> dict[str, float]:
    texts = [item.text for item in asked.task.items]
    words = sum(len(re.split(r"\s+", text)) for text in texts)
    size = sum(len(text.encode()) for text in texts)
    tokens = sum(request.count for request in asked.requests)
    return {
        "perplexity": _exp(-likelihood / tokens),
        "word_perplexity": _exp(-likelihood / words),
        "byte_perplexity": _exp(-likelihood / size),
        "bits_per_byte": -likelihood / size / math.log(2),
    }


def _exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf
