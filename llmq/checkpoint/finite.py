"""Checks of weights before an export: NaN and infinity, and tensors that training never changed."""

from collections.abc import Callable, Sequence

import numpy as np

from llmq.base.errors import ModelError
from llmq.state.params import Param

SHOWN = 8  # most names of tensors in a line


def all_finite(values: np.ndarray) -> bool:
    """True if all F32, F16 or BF16 values are finite. The function compares bit patterns as
    integers, several times faster than a file can be read."""
    size = values.dtype.itemsize
    infinity = int(np.array(np.inf, values.dtype).view(f"u{size}"))
    negative = infinity + (1 << (8 * size - 1))
    return values.view(f"i{size}").max() < infinity and values.view(f"u{size}").max() < negative


def finite(read: Callable[[Param], np.ndarray]) -> Callable[[Param], np.ndarray]:
    """Return a function like `read`, a reader of whole parameters, that raises ModelError if a
    parameter holds NaN or infinity."""

    def checked(param: Param) -> np.ndarray:
        values = read(param)
        if not all_finite(values):
            raise ModelError(
                f"{param.name} holds NaN or infinity: no model is written, what is there stays; "
                "take an earlier checkpoint (llmq export), or write it all the same with --force"
            )
        return values

    return checked


def reached(read: Callable[[int, int], np.ndarray], size: int) -> bool:
    """True if a moment of a tensor has a nonzero element, so that a gradient has reached the
    tensor: moments start as zeros.

    read(start, stop): function that returns elements [start, stop) of the moment, which has `size`
    elements. A short prefix is read first, and decides for nearly all tensors.
    """
    start, length = 0, 1 << 12
    while start < size:
        stop = min(start + length, size)
        if read(start, stop).astype(np.float32).any():
            return True
        start, length = stop, min(16 * length, 1 << 22)
    return False


def unmoved_lines(names: Sequence[str], count: int) -> list[str]:
    """Return one line for the user about trained tensors that have not moved; [] without names.
    names: these tensors. count: number of all trained tensors."""
    if not names:
        return []
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" * (len(names) > SHOWN))
    return [
        f"{len(names)} of {count} trained tensors have not moved, no gradient reached them: {shown}"
    ]
