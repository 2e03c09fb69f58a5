"""How a block's matrices lie as codes with scales: one run of bytes for each slab and format.

    e4m3    | codes of all matrices | a scale for each matrix |
    int8    | codes of all matrices | a scale for each row of a matrix |
    nf4     | of each module: codes, codes of scales, groups, mean | ... | scale of fp8 codes | ...

A rank's part of it, and the parts that are gathered and streamed, are parts of these bytes,
wherever a tensor ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from llmq.base.dtypes import F32, I8, NF4, U8, DType
from llmq.base.tensor import Tensor
from llmq.ops import nf4
from llmq.runtime.arena import align_up
from llmq.state.params import Param, Slab

REGION_ALIGN = 256  # bytes: as tensors of an arena, for the fastest products
PACKED_ALIGN = 256  # of each rank's part


class Region(NamedTuple):
    """A tensor inside of the bytes, at this offset."""

    offset: int
    shape: tuple[int, ...]
    dtype: DType

    def of(self, packed: Tensor, name: str) -> Tensor:
        """It, in bytes that begin with those of the slab."""
        return Tensor(name, self.shape, self.dtype, packed.storage, packed.offset + self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Elements [first, first + size) of a parameter, which have scales of their own.

    tensors: by what they are: "codes", "scale", or of NF4 "codes", "scale_codes", "groups", "mean",
    and "scale", which is that of the whole parameter's fp8 codes, if they are made of these.
    """

    param: Param
    first: int
    size: int
    tensors: Mapping[str, Region]

    def named(self, packed: Tensor) -> dict[str, Tensor]:
        """Its tensors, in the bytes of the slab."""
        return {name: region.of(packed, name) for name, region in self.tensors.items()}


class Layout:
    """The layout of one slab in one format. nbytes: of all, a multiple of PACKED_ALIGN for each
    rank."""

    def __init__(self, slab: Slab, dtype: DType, shards: int = 1):
        """dtype: E4M3, I8 or NF4."""
        self.slab, self.dtype = slab, dtype
        self._used = 0
        self.spans = tuple(self._nf4(slab) if dtype == NF4 else self._of_matrices(slab))
        self.nbytes = align_up(self._used, PACKED_ALIGN * shards)

    def _region(self, shape: tuple[int, ...], dtype: DType) -> Region:
        found = Region(align_up(self._used, REGION_ALIGN), shape, dtype)
        self._used = found.offset + math.prod(shape) * dtype.itemsize
        return found

    def _of_matrices(self, slab: Slab) -> list[Span]:
        codes = [self._region(param.shape, self.dtype) for param in slab.params]
        return [
            Span(
                param=param,
                first=0,
                size=param.size,
                tensors={"codes": region, "scale": self._region(self._scales(param), F32)},
            )
            for param, region in zip(slab.params, codes, strict=True)
        ]

    def _scales(self, param: Param) -> tuple[int]:
        return (param.size // param.columns,) if self.dtype == I8 else (1,)

    def _nf4(self, slab: Slab) -> list[Span]:
        """Modules that Hugging Face names are quantized one by one, as others do it."""
        spans = []
        for param in slab.params:
            columns, scale = param.columns, self._region((1,), F32)
            for part in param.hf:
                size = (part.stop - part.start) * columns
                half, blocks, groups = nf4.sizes(size)
                tensors = {
                    "codes": self._region((half,), U8),
                    "scale_codes": self._region((blocks,), U8),
                    "groups": self._region((groups,), F32),
                    "mean": self._region((1,), F32),
                    "scale": scale,
                }
                first = part.start * columns
                spans.append(Span(param=param, first=first, size=size, tensors=tensors))
        return spans
