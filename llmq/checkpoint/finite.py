"""Weights that training has damaged or not reached: found before they are a model for others."""

from collections.abc import Callable, Sequence

import numpy as np

from llmq.base.errors import ModelError
from llmq.state.params import Param

SHOWN = 8  # names of tensors in a line


def all_finite(values: np.ndarray) -> bool:
    """Whether all of these F32, F16 or BF16 values are finite. By the bits, at several times the
    speed at which files are read."""
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
    """Whether training has moved a tensor, by one of its moments, which are zero at the start.

    read: elements [start, stop) of `size`. The first few tell this of nearly all tensors.
    """
    start, length = 0, 1 << 12
    while start < size:
        stop = min(start + length, size)
        if read(start, stop).astype(np.float32).any():
            return True
        start, length = stop, min(16 * length, 1 << 22)
    return False


def unmoved_lines(names: Sequence[str], count: int) -> list[str]:
    """The finding that training has not moved these of `count` trained tensors; none without."""
    if not names:
        return []
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" * (len(names) > SHOWN))
    return [
        f"{len(names)} of {count} trained tensors have not moved, no gradient reached them: {shown}"
    ]
