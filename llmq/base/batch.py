"""The input of one micro-step: tokens, targets, and where documents start."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

FILLER_TARGET = -101
"""Target of a filler token (a token behind a row's documents) on the device; router losses ignore
tokens with this target."""


class Batch(NamedTuple):
    """One micro-batch; arrays are int32 (B, T): B sequences, or rows, of T tokens.

    inputs   token ids
    targets  the ids to predict; -100 where nothing is predicted
    starts   for each position the first position of its document in the row: attention sees nothing
             before it, and RoPE counts from it. 0 <= starts[b, t] <= t, non-decreasing in a row.
             With None, every row is one document.
    padding  number of positions that fill rows up, or repeat positions counted elsewhere: reports
             do not count them. Such a position is a masked document of one token.
    named    arrays that the loss or the architecture declares (`Input`), by name; or None. Pairs of
             documents have "partner": 1 + the first position of the other document, negative in a
             rejected document, 0 outside of pairs
    lengths  int32 (B,): tokens of documents in each row, or None where documents own every token.
             Later tokens are filler, like positions that transformers' attention_mask hides; router
             losses ignore filler
    """

    inputs: np.ndarray
    targets: np.ndarray
    starts: np.ndarray | None = None
    padding: int = 0
    named: Mapping[str, np.ndarray] | None = None
    lengths: np.ndarray | None = None
