"""MXFP4 files of gpt-oss: experts as codes of four bits, 32 of which share a power of two.

NAME_blocks   U8 (experts, out, in / 32, 16), two codes a byte, the first in the lower bits
NAME_scales   U8 (experts, out, in / 32), exponents from 127 on

NAME is a parameter (experts, in, out), whose columns lie in the rows of codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from llmq.base.errors import LlmqError
from llmq.checkpoint.coded.matrix import CodedMatrix, Stored, stored_values
from llmq.ref.mxfp4 import BLOCK, mxfp4_decode

_CODES, _SCALES = "_blocks", "_scales"


def decode_mxfp4(tensors: dict[str, Any], config: Mapping[str, Any]) -> None:
    for stored in [name for name in tensors if name.endswith(_CODES)]:
        name, codes = stored.removesuffix(_CODES), tensors.pop(stored)
        scales = tensors.pop(name + _SCALES, None)
        if scales is None or codes.shape != (*scales.shape, BLOCK // 2) or len(codes.shape) != 4:
            raise LlmqError(f"'{codes.path}': {stored} has no {name + _SCALES} of its shape")
        tensors[name] = _Experts(codes, scales)


class _Experts(CodedMatrix):
    """Its values are BF16 numbers."""

    dtype = "BF16"

    def __init__(self, codes: Stored, scales: Stored):
        count, self._height, blocks, _ = codes.shape
        columns = blocks * BLOCK

        def decode(start: int, stop: int) -> np.ndarray:
            pairs, exponents = (
                stored_values(x, start * blocks * each, stop * blocks * each)
                for x, each in ((codes, BLOCK // 2), (scales, 1))
            )
            out = np.empty((stop - start, columns), np.float32)
            mxfp4_decode(out, pairs, exponents, out.size)
            return out

        super().__init__(codes, (count, columns, self._height), decode)

    def pieces(self) -> Iterator[tuple[slice, np.ndarray]]:
        """An expert at a time."""
        for first in range(self.shape[0]):
            rows = self.rows(first * self._height, (first + 1) * self._height)
            yield slice(first, first + 1), rows.T[None]

    def rows(self, start: int, stop: int, *, transposed: bool = True) -> np.ndarray:
        """These rows of all experts', as `HfTensor.rows` counts them."""
        self._codes.check_length()
        return self._decode(start, stop)
