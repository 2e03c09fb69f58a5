"""Weights that are no finite numbers: found before they become a model for others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmq.base.errors import ModelError
from llmq.state.params import Param


def all_finite(values: np.ndarray) -> bool:
    """Whether all of these F32, F16 or BF16 values are finite. By the bits, at several times the
    speed at which files are read."""
    size = values.dtype.itemsize
    infinity = int(np.array(np.inf, values.dtype).view(f"u{size}"))
    negative = infinity + (1 << (8 * size - 1))
    return values.view(f"i{size}").max() < infinity and values.view(f"u{size}").max() < negative


def finite(read: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """A reader of whole parameters that raises ModelError where one holds NaN or infinity.

    read: of a parameter, and a group of a checkpoint.
    """

    def checked(param: Param, group: str = "weights") -> np.ndarray:
        values = read(param, group)
        if not all_finite(values):
            raise ModelError(
                f"{param.name} holds NaN or infinity: no model is written, what is there stays; "
                "take an earlier checkpoint (llmq export), or write it all the same with --force"
            )
        return values

    return checked
