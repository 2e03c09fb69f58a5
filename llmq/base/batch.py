"""The input of one micro-step: tokens, what follows each, and where its document starts."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

FILLER_TARGET = -101
"""Target of a filler token on the device; router losses ignore tokens with this target."""


class Batch(NamedTuple):
    """One micro-batch; arrays are int32 (B, T).

    inputs   token ids
    targets  the ids to predict; -100 where nothing is predicted
    starts   for each position the first position of its row that belongs to the same document:
             attention sees nothing before it, and RoPE counts from it. 0 <= starts[b, t] <= t,
             never falling along a row. None: every row is one document.
    padding  how many of its positions fill rows up, or repeat what is counted elsewhere: reports
             do not count them. Such a position is a document of its own, and masked.
    named    arrays that the loss or the architecture declares (`Input`), by name; or None. Pairs of
             documents have "partner": 1 + the first position of the other one, negative in a
             document that is not to be preferred, 0 outside of pairs
    lengths  int32 (B,): tokens of documents in each row, or None where documents own every token.
             Later tokens are filler, as padding of an attention mask is in transformers; router
             losses ignore filler
    """

    inputs: np.ndarray
    targets: np.ndarray
    starts: np.ndarray | None = None
    padding: int = 0
    named: Mapping[str, np.ndarray] | None = None
    lengths: np.ndarray | None = None
