"""The inputs of a step on the device, and the declaration of inputs beside tokens and targets."""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import numpy as np

from llmq.base.dtypes import F32, DType
from llmq.base.tensor import Tensor

TOKEN, TARGET, ROW = "token", "target", "row"

PAIRS = "pairs"
"""Sidecar of pairs of documents: for each token 1 + the first position of the other document."""
SCORES = "scores"
"""Sidecar of `.scores` files, in the folder of --scores (`llmq/data/scores.py`)."""
WEIGHTS = "weights"
"""Sidecar of messages' weights, which token files hold behind their tokens."""
ARRAYS = "arrays"
"""Sidecar `FILE.NAME.npy` beside the token file FILE.bin, an element for each of its tokens."""


class Input(NamedTuple):
    """An array of each micro-batch that a loss or an architecture reads beside tokens and targets.

    name: key in `Batch.named` and `StepInputs.named`. dtype: the elements' format. shape: shape of
    one element, () for a number. per: TOKEN or TARGET: an array (B, T, *shape); ROW: an array (B,
    *shape). From token files, TOKEN gets the input token's element, and TARGET the element of the
    token to predict, 0 where masked. sidecar: the part of token files that has the elements; None:
    only the caller of `Trainer.step` can bring the array.
    """

    name: str
    dtype: DType = F32
    shape: tuple[int, ...] = ()
    per: str = TARGET
    sidecar: str | None = None

    @property
    def in_files(self) -> bool:
        """True if token files may have the input."""
        return self.sidecar is not None

    def batch_shape(self, B: int, T: int) -> tuple[int, ...]:
        """Return the shape of a micro-batch's array."""
        return (B, *self.shape) if self.per == ROW else (B, T, *self.shape)

    def words(self, B: int, T: int) -> int:
        """Return the number of 4-byte words of a micro-batch's array."""
        return -(-prod(self.batch_shape(B, T)) * self.dtype.itemsize // 4)

    def zeros(self, B: int, T: int) -> np.ndarray:
        """Return a micro-batch's array of zeros."""
        return np.zeros(self.batch_shape(B, T), self.dtype.numpy)


class StepInputs(NamedTuple):
    """The inputs of a micro-step on the device.

    tokens: I32 (B, T). targets: I32 (B, T), negative if masked; None if no loss is computed.
    first_key: I32 (B, T), the first position that each query sees, where its document starts
    (`Batch.starts`); None: 0 everywhere. named: inputs that the loss and the architecture declare
    (`Input`), by name; empty for scoring and generation.
    """

    tokens: Tensor
    targets: Tensor | None = None
    first_key: Tensor | None = None
    named: Mapping[str, Tensor] = {}
