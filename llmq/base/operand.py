"""Operands of a product, as tensors and as codes, and the product's epilogue: the terms added to a
product and the function that follows. `llmq.ops.product.product` computes product and epilogue.

Sizes are those of the product's output (M, N), summed over K.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from llmq.base.dtypes import DType
from llmq.base.tensor import Tensor

CODES_MULTIPLE = 16
"""Number of 1-byte codes that products read at a time; the summed dimension is a multiple of this
number."""


def turned(shape: tuple[int, int]) -> tuple[int, int]:
    """Return the shape (features, rows) of a matrix's transposed codes, with rows rounded up to a
    multiple of 16. The codes of the added rows are zeros, which add nothing to a product that sums
    over rows."""
    rows, features = shape
    return features, -(-rows // CODES_MULTIPLE) * CODES_MULTIPLE


class Fp8Out(NamedTuple):
    """Buffers for an operation's result as FP8 codes, with a scale that is known before the launch.

    A value x of the BF16 or F32 result becomes x * (1 / scale), rounded to nearest even and clamped
    to the largest finite value MAX; NaN stays NaN. So x is about code * scale.

        codes       out    E4M3, E5M2 (rows, features)  or None; at least one of the two
        transposed  out    the same   turned((rows, features)), or None; codes of zeros behind rows
        scale       in     F32        (1,)              positive
        saturated   inout  I32        (1,)              += the number of |x| > MAX * scale
    """

    codes: Tensor | None
    transposed: Tensor | None
    scale: Tensor
    saturated: Tensor


class FirstScale(NamedTuple):
    """Buffers for the first delayed scale of a tensor that has no history of maxima. The kernel
    writes the tensor once with any scale to find its largest |x|; then `fp8_scale.update` makes the
    scale, and the kernel runs again.

        scale    out    F32 (1,4)
        history  inout  F32 (1,1)   scratch of `fp8_scale.update`
        limit    in     F32 (1,)
        largest  in     F32 (1,4)   the largest |x|, which the first launch has recorded
        factor   out    F32 (1,4)   1 / scale
    """

    scale: Tensor
    history: Tensor
    limit: Tensor
    largest: Tensor
    factor: Tensor


class ProductCodes(NamedTuple):
    """Buffers for a product's result as FP8 codes, with a scale that is known before the launch: x
    ~ code * scale.

    A value x of the product's F32 sums becomes x * factor, rounded to nearest even and clamped to
    the largest finite value MAX; NaN stays NaN. The product finds the largest |x|, which is an
    infinity or NaN if one x is an infinity, and NaN if one x is NaN. The product cannot record the
    tensor's statistics, so the first kernel that reads the codes does.

        codes      out    E4M3, E5M2 (rows, features)  None until `product` has taken memory
        scale      in     F32        (1,)              positive
        factor     in     F32        (1,)              1 / scale
        largest    out    F32        (1,)              the product's largest |x|
        abs_max    inout  F32        (1,)              or None; the reader raises it to `largest`
        saturated  inout  I32        (1,)              or None; if `largest` is above MAX * scale,
                                                       the reader adds the number of codes +-MAX
        first                                          None if the scale is known
    """

    codes: Tensor | None
    scale: Tensor
    factor: Tensor
    largest: Tensor
    abs_max: Tensor | None = None
    saturated: Tensor | None = None
    first: FirstScale | None = None


Result = Tensor | ProductCodes
"""A product's output: the tensor, or the codes that the product has written instead."""


@dataclass(slots=True)
class OutBuffers:
    """Memory that a kernel writes for a tensor which later products read.

    name     of the tensor, for its number format
    tensor   out    BF16, F32 (rows, features)  or None, where codes are enough
    abs_max  inout  F32 (1,)                    or None; raised to the largest |x|
    fp8      out    codes                       or None; their scale is known before the launch
    pending  out    codes                       or None; their scale follows from abs_max.
             `Operands.finalize` makes the codes from the tensor. A launcher that computes the
             tensor twice writes the codes itself, and sets pending to None
    first                                       None, unless `fp8` has no scale yet
    operand  the operand for products, if its memory exists before the launch; else None
    scratch  closed by `finalize`; None: the tensor is kept
    """

    name: str
    tensor: Tensor | None
    abs_max: Tensor | None = None
    fp8: Fp8Out | None = None
    pending: Fp8Out | None = None
    first: FirstScale | None = None
    operand: Operand | None = None
    scratch: ExitStack | None = None


NOWHERE = OutBuffers("", None)
"""Buffers of a tensor that is not needed."""


@dataclass(frozen=True, slots=True)
class ProductOutput:
    """The output of a product before an activation, if no kernel computes both product and
    activation.

    name, shape, dtype: name, shape and dtype of the output. tensor: memory that the product always
    writes, because the backward reads it later; None lets `product` take scratch memory. codes:
    buffers of the codes that the product writes; None: the product writes the tensor.
    """

    name: str
    shape: tuple[int, int]
    dtype: DType
    tensor: Tensor | None = None
    codes: ProductCodes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """An fp8 tensor in the requested layouts: source ~ codes * scale. codes: the codes, (rows,
    features). transposed: the transposed codes, whose shape is `turned`. source: the quantized
    tensor; None if it no longer exists."""

    source: Tensor | None
    codes: Tensor | None
    transposed: Tensor | None
    scale: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8:
    """A frozen weight as int8 codes in two layouts: row r ~ codes[r] * scale[r]. codes: I8 (rows,
    features). transposed: I8 (features, rows). scale: F32 (rows,). ones: F32 (features,), scales of
    transposed's rows when `scale` is multiplied into the other operand."""

    codes: Tensor
    transposed: Tensor
    scale: Tensor
    ones: Tensor


class Int8Rows(NamedTuple):
    """A matrix as int8 codes: row r ~ codes[r] * scale[r]. codes: I8 (rows, features); a product
    sums over features. scale: F32 (rows,)."""

    codes: Tensor
    scale: Tensor


class Nf4Run(NamedTuple):
    """Rows [first, first + rows) of a matrix (N, K), from modules of equal size, as contiguous NF4
    codes (layout: `ops.quantize.four_bits`)."""

    first: int
    rows: int
    codes: Tensor
    scale_codes: Tensor
    groups: Tensor
    mean: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Nf4:
    """A frozen weight (N, K), or the weights (E, N, K) of E experts, as NF4 codes; products of few
    rows decode the codes while reading. runs: the runs that together cover all rows; experts have
    one run. levels: F32 (256,), the values that scale_codes stand for."""

    shape: tuple[int, ...]
    runs: tuple[Nf4Run, ...]
    levels: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4:
    """The frozen weights (E, N, K) of E experts as MXFP4 codes; products of few rows decode the
    codes while reading. codes: U8 (E * N * K / 2,). exponents: U8 (E * N * K / 32,)."""

    shape: tuple[int, ...]
    codes: Tensor
    exponents: Tensor


class BytesRun(NamedTuple):
    """Rows [first, first + rows) of a matrix (N, K), from modules of of_module rows, as codes (rows
    * K,), E4M3 or I8. scales: F32, a scale for each of_scale rows of a module and each of `columns`
    parts of K; several parts have 128 columns each."""

    first: int
    rows: int
    codes: Tensor
    scales: Tensor
    of_module: int
    of_scale: int
    columns: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """A frozen weight (N, K), or the weights (E, N, K) of E experts, as 1-byte codes; products of
    few rows decode the codes while reading. runs: the runs that together cover all rows; experts
    have one run."""

    shape: tuple[int, ...]
    runs: tuple[BytesRun, ...]


class Stochastic(NamedTuple):
    """Stochastic rounding goes up or down with probabilities that keep the mean.

    The random number of an element follows from the step's seed and number, the salt, the number of
    the element's sequence in the step, and the place in this sequence. Random numbers are therefore
    the same on any rank and in any micro-step. scalars: StepScalars, I32 (16,). sequence: number of
    rows in a sequence.
    """

    scalars: Tensor
    salt: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """A tensor that a product rounds to int8 codes, with one scale for the elements that are summed
    together. stochastic: parameters of stochastic rounding; None: rounding to nearest even."""

    source: Tensor
    stochastic: Stochastic | None = None


Coded = Bytes | Mxfp4 | Nf4
"""A weight whose codes products of few rows decode."""
Operand = Tensor | Fp8 | Int8 | Int8Rows | Rounded | Coded


def tensor_of(x: Operand) -> Tensor:
    """Return an operand's tensor, even if the operand also has codes."""
    return x if isinstance(x, Tensor) else x.source


class AdapterBlocks(NamedTuple):
    """The layout of the B matrices of several adapters in one matrix (N, R), see
    `ops.product.adapter.expand`. rows: N, the number of rows. columns: R, the sum of the adapters'
    ranks. spans: each adapter's rows [start, stop). scales: each adapter's factor."""

    rows: int
    columns: int
    spans: tuple[tuple[int, int], ...]
    scales: tuple[float, ...]


class DropoutMask(NamedTuple):
    """The elements that dropout keeps, as `ops.pointwise.elementwise.dropout` computes them.
    scalars: StepScalars, I32 (16,). sequences: number of sequences in a micro-batch."""

    probability: float
    salt: int
    sequences: int
    scalars: Tensor


class Magnitudes(NamedTuple):
    """DoRA's factors of a sum's columns: magnitudes / norms, both F32 (N,). bias: the bias (N,)
    that is added after the multiplication; None without bias."""

    norms: Tensor
    magnitudes: Tensor
    bias: Tensor | None


class Adapters(NamedTuple):
    """A second product, hidden @ tail^T, that is added to the first product.

    hidden      in  (M, R)
    tail        in  (N, R), or (R, N) where b is not transposed; with blocks (n, rank)
    blocks      how tail is expanded to (N, R) before the product; None: tail has this shape
    dropout     elements of the second product that are added; None: all
    magnitudes  factors of the whole sum's columns; None: none
    """

    hidden: Tensor
    tail: Tensor
    blocks: AdapterBlocks | None = None
    dropout: DropoutMask | None = None
    magnitudes: Magnitudes | None = None

    @property
    def at_once(self) -> bool:
        """True if one kernel may compute both products at once."""
        return self.dropout is None and self.magnitudes is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """Stores the sum of a product and its addends: `out` is a Tensor, or ProductCodes if the
    product of fp8 codes has no addend and no adapters."""

    kind: ClassVar[str] = "store"
    name: str = ""


STORE = Epilogue()


@dataclass(frozen=True, slots=True, kw_only=True)
class Activated(Epilogue):
    """Stores an activation of the product; `out` is a ProductOutput. A gated activation reads [up |
    gate], (M, 2F). name: a key of ACTIVATIONS. to: buffers of the activation, (M, F); None: only
    the product is written, with the bits that the activation would read, and `out` is a Tensor or
    ProductCodes."""

    kind: ClassVar[str] = "glu"
    name: str
    to: OutBuffers | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivatedGradient(Epilogue):
    """Stores the gradient of an activation's input; the product is the gradient of the activation's
    result, and `out` is a ProductOutput. up: the activation's input. to: buffers of the gradient of
    `up`, which may share up's memory. again: buffers of the recomputed activation, (M, F); NOWHERE
    if nothing reads it."""

    kind: ClassVar[str] = "glu_grad"
    name: str
    up: Result
    to: OutBuffers
    again: OutBuffers
