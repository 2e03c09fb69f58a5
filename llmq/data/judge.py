"""From log-likelihoods to numbers: accuracy, perplexity, bits per byte, as lm-eval defines them."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np

from llmq.data.scoring import Asked


class Score(NamedTuple):
    """One number of a task. stderr: of the mean over items, None for what is no mean. count: of
    items. Both value and stderr are NaN where a log-likelihood is not a finite number."""

    task: str
    metric: str
    value: float
    stderr: float | None
    count: int


def judge(asked: Asked, likelihoods: np.ndarray) -> list[Score]:
    """The task's metrics from log-likelihoods F64 (requests,) in nats."""
    task, count = asked.task, len(asked.task.items)
    finite = bool(np.isfinite(likelihoods).all())
    if task.is_text:
        values = _of_texts(asked, float(likelihoods.sum())) if finite else {}
        return [Score(task.name, m, values.get(m, math.nan), None, count) for m in task.metrics]
    hits = _hits(asked, likelihoods)
    scores = []
    for metric in task.metrics:
        value, stderr = mean_and_error(hits[metric]) if finite else (math.nan, math.nan)
        scores.append(Score(task.name, metric, value, stderr, count))
    return scores


def _hits(asked: Asked, likelihoods: np.ndarray) -> dict[str, np.ndarray]:
    """For each question whether the likeliest answer is right, by metric."""
    hits: dict[str, list[bool]] = {"acc": [], "acc_norm": []}
    for i, question in enumerate(asked.task.items):
        values = likelihoods[asked.starts[i] : asked.starts[i + 1]]
        lengths = np.array([choice.length for choice in question.choices], np.float64)
        with np.errstate(divide="ignore"):  # an empty answer is infinitely unlikely
            normalized = values / lengths
        hits["acc"].append(int(values.argmax()) == question.gold)
        hits["acc_norm"].append(int(normalized.argmax()) == question.gold)
    return {metric: np.array(of_all, np.float64) for metric, of_all in hits.items()}


def mean_and_error(values: np.ndarray) -> tuple[float, float | None]:
    """The mean and its standard error, None for a single value."""
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return float(values.mean()), error


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
