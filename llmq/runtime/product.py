"""One matrix product for cuBLASLt: what tells it from others, its tensors, how it is computed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from llmq.base.dtypes import E4M3, E5M2, DType
from llmq.base.tensor import Tensor


class Product(NamedTuple):
    """Everything that tells one plan from another; all matrices are contiguous."""

    M: int
    N: int
    K: int
    trans_a: bool
    trans_b: bool
    a: DType
    b: DType
    out: DType
    bias: bool
    accumulate: bool
    workspace: int  # bytes that the library may use
    fast_accumulation: bool = False  # may be used; of FP8 only
    addend: bool = False  # another matrix than out is added; not to codes
    block_scaled: bool = False  # of FP8, by scales of blocks that are one; see block_scales.py
    batch: int = 1  # products of these sizes, whose matrices lie one after another

    @property
    def fp8(self) -> bool:
        """Whether the operands are codes with scales."""
        return self.a in (E4M3, E5M2)

    @property
    def adds(self) -> bool:
        """Whether a matrix is added, be it what was in the result."""
        return self.accumulate or self.addend

    @property
    def makes_codes(self) -> bool:
        """Whether the result are codes, too."""
        return self.out in (E4M3, E5M2)

    @property
    def layouts(self) -> tuple[tuple[int, int, int], ...]:
        """Column-major (rows, columns, leading dimension) of b, a and out, in cuBLASLt's order."""
        b = (self.K, self.N) if self.trans_b else (self.N, self.K)
        a = (self.M, self.K) if self.trans_a else (self.K, self.M)
        return tuple((rows, columns, rows) for rows, columns in (b, a, (self.N, self.M)))

    def __str__(self) -> str:
        flags = "".join("t" if flag else "n" for flag in (self.trans_a, self.trans_b))
        operands = self.a.name if self.a == self.b else f"{self.a.name}*{self.b.name}"
        text = f"{self.M}x{self.N}x{self.K} {flags} {operands}->{self.out.name}"
        text += (" bias" if self.bias else "") + (" accumulate" if self.accumulate else "")
        text += (" addend" if self.addend else "") + (" fast" if self.fast_accumulation else "")
        text += " block-scaled" if self.block_scaled else ""
        text += f" batch of {self.batch}" if self.batch > 1 else ""
        return f"{text}, {self.workspace} bytes of workspace"


class Operands(NamedTuple):
    """The tensors of one call."""

    out: Tensor
    a: Tensor
    b: Tensor
    bias: Tensor | None
    addend: Tensor | None
    workspace: Tensor
    scale_a: Tensor | None = None  # of FP8 operands
    scale_b: Tensor | None = None
    factor: Tensor | None = None  # of results that are codes
    largest: Tensor | None = None
    scalars: Tensor | None = None  # alpha and beta, of block-scaled products
    alpha: float = 1.0  # factors of the product, and of what is added, of all others
    beta: float = 1.0


class Algorithm(NamedTuple):
    """How a product is computed: algorithm uint8 (64,), and whether it accumulates fast (FP8)."""

    algorithm: np.ndarray
    fast: bool

    def tobytes(self) -> bytes:
        """The bytes that are kept in the file of tuned algorithms."""
        return self.algorithm.tobytes() + bytes([self.fast])

    @classmethod
    def frombytes(cls, content: bytes) -> Algorithm:
        """The inverse of tobytes."""
        return cls(np.frombuffer(content[:-1], np.uint8), bool(content[-1]))
