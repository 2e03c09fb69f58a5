"""What one micro-step reads: tokens, what follows each, and where its document starts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    """One micro-batch; arrays are int32 (B, T).

    inputs   token ids
    targets  the ids to predict; -100 where nothing is predicted
    starts   for each position the first position of its row that belongs to the same document:
             attention sees nothing before it, and RoPE counts from it. 0 <= starts[b, t] <= t,
             never falling along a row. None: every row is one document.
    """

    inputs: np.ndarray
    targets: np.ndarray
    starts: np.ndarray | None = None
