"""Weights as a run with --base-dtype computed with them: made to codes, and back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmq.formats import FORMATS
from llmq.options.option_types import QUANTIZED
from llmq.state.params import Param


def as_kept(read: Callable[[Param], np.ndarray], dtype: str | None) -> Callable[..., np.ndarray]:
    """Reads parameters as they are in a base of this format, F32; None, bf16, fp32: as they are.

    read: a parameter of a weight table in its shape.
    """
    if dtype not in QUANTIZED:
        return read

    def read_kept(param: Param) -> np.ndarray:
        values = read(param)
        if not param.block.startswith("layers.") or param.kind != "matrix" or param.of_adapter:
            return values
        return FORMATS[dtype].rounded(param, values.reshape(-1)).reshape(param.shape)

    return read_kept
