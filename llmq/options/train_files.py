"""--train-file: glob patterns, each with a weight or none of them.

A weight stands behind the last colon, `data/a.bin:0.7`. A name that exists is taken literally, so
that a colon in it does no harm; `data/a:1:0.5` gives the file `data/a:1` a weight.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from llmq.base.errors import ConfigError


def split_weight(text: str) -> tuple[str, float | None]:
    """A pattern and its weight, None if it has none. ConfigError for one that is not positive."""
    pattern, colon, number = text.rpartition(":")
    if not colon or not pattern or os.path.exists(os.path.expanduser(text)):
        return text, None
    try:
        weight = float(number)
    except ValueError:  # a name with a colon
        return text, None
    if not (math.isfinite(weight) and weight > 0):
        raise ConfigError(
            f"--train-file: the weight of {pattern} must be more than 0, got {number}"
        )
    return pattern, weight


def split_weights(texts: Sequence[str]) -> tuple[list[str], tuple[float, ...] | None]:
    """All patterns, and their weights; None if there are none, or only one pattern.

    ConfigError if only some have one.
    """
    pairs = [split_weight(text) for text in texts]
    lacking = [pattern for pattern, weight in pairs if weight is None]
    if 0 < len(lacking) < len(pairs):
        raise ConfigError(
            f"--train-file: {lacking[0]} has no weight, others have one: give all of them one, or "
            "none"
        )
    weights = tuple(weight for _, weight in pairs if weight is not None)
    return [pattern for pattern, _ in pairs], weights if len(weights) > 1 else None
