"""Operands of a product, as they are and as codes, and its epilogue: the terms added to it and the
function that follows. `llmq.ops.product.product` computes it all.

Sizes of epilogues are those of the product: out (M, N).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from llmq.base.dtypes import DType
from llmq.base.tensor import Tensor

CODES_MULTIPLE = 16
"""Codes that products take at a time, 16 bytes: their sums are over multiples of so many."""


def turned(shape: tuple[int, int]) -> tuple[int, int]:
    """The shape (features, rows) of a matrix's transposed codes, with as many zeros behind the rows
    as fill whole 16 bytes: a product over rows adds nothing there."""
    rows, features = shape
    return features, -(-rows // CODES_MULTIPLE) * CODES_MULTIPLE


class Fp8Out(NamedTuple):
    """An operation's result as FP8, with a scale that is known beforehand.

    A value x, as the BF16 or F32 result holds it, becomes x * (1 / scale), rounded to nearest even
    and clamped to the largest finite value MAX; NaN stays NaN. So x is about code * scale.

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
    """The first delayed scale of a tensor, which has no history yet: the kernel writes the tensor
    once with any scale to find its largest |x|, this scale is made, and the kernel runs again.

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
    """A product's result as FP8, with a scale that is known beforehand: x ~ code * scale.

    A value x of the product's F32 sums becomes x * factor, rounded to nearest even and clamped to
    the largest finite value MAX; NaN stays NaN. The product finds its largest |x|, which is an
    infinity or NaN where there is an infinity, and NaN where there is a NaN. The kernel that reads
    the codes first records the tensor's statistics: a product cannot.

        codes      out    E4M3, E5M2 (rows, features)  None until `product` has taken memory
        scale      in     F32        (1,)              positive
        factor     in     F32        (1,)              1 / scale
        largest    out    F32        (1,)              the product's largest |x|
        abs_max    inout  F32        (1,)              or None; the reader raises it to `largest`
        saturated  inout  I32        (1,)              or None; if `largest` is above MAX * scale,
                                                       the reader adds the number of codes +-MAX
        first                                          None where the scale is known
    """

    codes: Tensor | None
    scale: Tensor
    factor: Tensor
    largest: Tensor
    abs_max: Tensor | None = None
    saturated: Tensor | None = None
    first: FirstScale | None = None


Result = Tensor | ProductCodes
"""A product's result as the product has written it."""


@dataclass(slots=True)
class OutBuffers:
    """The memory that a kernel writes for a tensor which products read later.

    name     names the tensor for its number format
    tensor   out    BF16, F32 (rows, features)  or None, where codes are enough
    abs_max  inout  F32 (1,)                    or None; raised to the largest |x|
    fp8      out    codes                       or None; their scale is known before the launch
    pending  out    codes                       or None; their scale follows from abs_max.
             `Operands.finalize` makes them of the tensor, unless the launcher has computed the
             tensor twice: then it has written the codes itself and sets this None
    first                                       None, unless `fp8` has no scale yet
    operand  what products read, as far as its memory is there before the launch
    scratch  ends with `finalize`; None: the tensor lives on
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
"""The buffers of a tensor that nobody needs."""


@dataclass(frozen=True, slots=True)
class ProductOutput:
    """The result of a product in front of an activation, where no kernel computes both.

    name, shape, dtype: of that result. tensor: memory of it that somebody reads later, so that it
    is written in any case; None: `product` takes scratch where it needs it. codes: the product
    writes codes with this scale; None: it writes the tensor.
    """

    name: str
    shape: tuple[int, int]
    dtype: DType
    tensor: Tensor | None = None
    codes: ProductCodes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """An fp8 tensor: source ~ codes * scale, in the layouts that were asked for. codes: (rows,
    features). transposed: as `turned` has it. source: what was quantized, None where it is gone."""

    source: Tensor | None
    codes: Tensor | None
    transposed: Tensor | None
    scale: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8:
    """A frozen weight as signed bytes: row r ~ codes[r] * scale[r], in two layouts. codes: I8
    (rows, features). transposed: I8 (features, rows). scale: F32 (rows,). ones: F32 (features,),
    the scales of transposed's rows, where `scale` has gone into the other operand."""

    codes: Tensor
    transposed: Tensor
    scale: Tensor
    ones: Tensor


class Stochastic(NamedTuple):
    """Rounding up or down with the probabilities that make the mean right.

    An element's random number follows from the step's seed and number, the salt, the number in the
    step of the sequence that its row is of (of so many rows), and its place there: it does not
    matter which rank or micro-step has the sequence. scalars: StepScalars, I32 (16,).
    """

    scalars: Tensor
    salt: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """A tensor that a product rounds to signed bytes, with one scale for what it sums over.
    stochastic: how, if not to nearest even."""

    source: Tensor
    stochastic: Stochastic | None = None


Operand = Tensor | Fp8 | Int8 | Rounded


def tensor_of(x: Operand) -> Tensor:
    """The tensor itself, of an operand that is there as codes too."""
    return x if isinstance(x, Tensor) else x.source


class AdapterBlocks(NamedTuple):
    """The places of several adapters' B in one matrix (N, R): see `ops.product.adapter.expand`.
    rows: N. columns: R. spans: of rows, one for each adapter. scales: as many factors."""

    rows: int
    columns: int
    spans: tuple[tuple[int, int], ...]
    scales: tuple[float, ...]


class DropoutMask(NamedTuple):
    """The elements that dropout leaves, as `ops.pointwise.elementwise.dropout` draws them. scalars:
    StepScalars, I32 (16,). sequences: of a micro-batch."""

    probability: float
    salt: int
    sequences: int
    scalars: Tensor


class Magnitudes(NamedTuple):
    """Factors of a sum's columns (DoRA): magnitudes / norms, F32 (N,) both, and the bias (N,) that
    is added behind them, or None."""

    norms: Tensor
    magnitudes: Tensor
    bias: Tensor | None


class Adapters(NamedTuple):
    """A second product, hidden @ tail^T, that is added to the first one.

    hidden      in  (M, R)
    tail        in  (N, R), or (R, N) where b is not transposed; with blocks (n, rank)
    blocks      how tail is expanded to (N, R) before the product; None: it is that
    dropout     the second product's elements that are added; None: all
    magnitudes  factors of the whole sum's columns; None: none
    """

    hidden: Tensor
    tail: Tensor
    blocks: AdapterBlocks | None = None
    dropout: DropoutMask | None = None
    magnitudes: Magnitudes | None = None

    @property
    def at_once(self) -> bool:
        """True if one kernel may compute both products."""
        return self.dropout is None and self.magnitudes is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """The sum of a product and its addends is stored as it is: out is a Tensor, or ProductCodes of
    a product of fp8 codes without addend and adapters."""

    kind: ClassVar[str] = "store"
    name: str = ""


STORE = Epilogue()


@dataclass(frozen=True, slots=True, kw_only=True)
class Activated(Epilogue):
    """An activation of the product, whose out is a ProductOutput. A gated one is of [up | gate],
    (M, 2F). name: of ACTIVATIONS. to: buffers of the activation, (M, F). None: the product is
    written alone, with the bits that it has with the activation behind it; out is then as of
    STORE."""

    kind: ClassVar[str] = "glu"
    name: str
    to: OutBuffers | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivatedGradient(Epilogue):
    """The gradient of an activation, of whose result the product is the gradient: out is a
    ProductOutput. up: the activation's input. to: buffers of up's gradient, which may be up's
    memory. again: buffers of the activation, written once more, (M, F); NOWHERE: nobody needs
    it."""

    kind: ClassVar[str] = "glu_grad"
    name: str
    up: Result
    to: OutBuffers
    again: OutBuffers
