"""The inputs of a training step on the device, and the declaration of inputs other than tokens and
targets."""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import numpy as np

from llmq.base.dtypes import F32, DType
from llmq.base.tensor import Tensor

TOKEN, TARGET, ROW = "token", "target", "row"

PAIRS = "pairs"
"""Sidecar (data stored beside tokens) of document pairs: for each token 1 + the first position of
the other document."""
SCORES = "scores"
"""Sidecar of scores: `.scores` files in the folder of --scores (`llmq/data/scores.py`)."""
WEIGHTS = "weights"
"""Sidecar of messages' weights, which a token file holds behind its tokens."""
ARRAYS = "arrays"
"""Sidecar of an array: `FILE.NAME.npy` beside the token file FILE.bin has an element for each
token."""


class Input(NamedTuple):
    """An array that a loss or an architecture reads for each micro-batch, beside tokens and
    targets.

    name: the key in `Batch.named` and `StepInputs.named`. dtype: the elements' format. shape: shape
    of one element; () for a number. per: TOKEN or TARGET for an array (B, T, *shape), ROW for an
    array (B, *shape); B sequences have T tokens. Read from token files, TOKEN takes the element of
    the input token, and TARGET the element of the token to predict, 0 where masked. sidecar: the
    sidecar that holds the elements; None: only the caller of `Trainer.step` can pass the array.
    """

    name: str
    dtype: DType = F32
    shape: tuple[int, ...] = ()
    per: str = TARGET
    sidecar: str | None = None

    @property
    def in_files(self) -> bool:
        """True if token files can hold the input in a sidecar."""
        return self.sidecar is not None

    def batch_shape(self, B: int, T: int) -> tuple[int, ...]:
        """Return the shape of the array for B sequences of T tokens."""
        return (B, *self.shape) if self.per == ROW else (B, T, *self.shape)

    def words(self, B: int, T: int) -> int:
        """Return the number of 4-byte words of the array for B sequences of T tokens."""
        return -(-prod(self.batch_shape(B, T)) * self.dtype.itemsize // 4)

    def zeros(self, B: int, T: int) -> np.ndarray:
        """Return an array of zeros for B sequences of T tokens."""
        return np.zeros(self.batch_shape(B, T), self.dtype.numpy)


class StepInputs(NamedTuple):
    """The inputs of a micro-step on the device, for B sequences of T tokens.

    tokens: the token ids, I32 (B, T). targets: the ids to predict, I32 (B, T), negative if masked;
    None if no loss is computed. first_key: I32 (B, T), the start of each query's document
    (`Batch.starts`), before which the query sees no key; None: 0 everywhere. named: inputs that the
    loss and the architecture declare (`Input`), by name; empty for scoring and generation.
    """

    tokens: Tensor
    targets: Tensor | None = None
    first_key: Tensor | None = None
    named: Mapping[str, Tensor] = {}
