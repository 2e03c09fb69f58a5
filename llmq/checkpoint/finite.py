"""Checks of weights before an export: NaN and infinity, and tensors that training never changed."""

from collections.abc import Callable, Sequence

import numpy as np

from llmq.base.errors import ModelError
from llmq.state.params import Param

SHOWN = 8  # names of tensors in a line


def all_finite(values: np.ndarray) -> bool:
    """True if all F32, F16 or BF16 values are finite. Compares bit patterns as integers, which is
    several times faster than reading the values from a file."""
    size = values.dtype.itemsize
    infinity = int(np.array(np.inf, values.dtype).view(f"u{size}"))
    negative = infinity + (1 << (8 * size - 1))
    return values.view(f"i{size}").max() < infinity and values.view(f"u{size}").max() < negative


def finite(read: Callable[[Param], np.ndarray]) -> Callable[[Param], np.ndarray]:
    """A reader of whole parameters that raises ModelError if a parameter holds NaN or infinity."""

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
    """True if a moment of a tensor has a nonzero element: moments start as zeros.

    read(start, stop): elements of the moment, which has `size`. Reads a short prefix first, which
    decides for nearly all tensors.
    """
    start, length = 0, 1 << 12
    while start < size:
        stop = min(start + length, size)
        if read(start, stop).astype(np.float32).any():
            return True
        start, length = stop, min(16 * length, 1 << 22)
    return False


def unmoved_lines(names: Sequence[str], count: int) -> list[str]:
    """A line that names the trained tensors, of `count`, that have not moved; [] without names."""
    if not names:
        return []
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" * (len(names) > SHOWN))
    return [
        f"{len(names)} of {count} trained tensors have not moved, no gradient reached them: {shown}"
    ]
