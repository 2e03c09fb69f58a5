"""How a tensor is written and read in more than one form: as it is, and as fp8 codes."""

from dataclasses import dataclass
from typing import NamedTuple

from llmq.base.tensor import Tensor


class Fp8Out(NamedTuple):
    """An operation's result as FP8, with a scale that is known beforehand.

    A value x, as the BF16 or F32 result holds it, becomes x * (1 / scale), rounded to nearest even
    and clamped to the largest finite value MAX; NaN stays NaN. So x is about code * scale.

        codes       out    E4M3, E5M2 (rows, features)  or None; at least one of the two
        transposed  out    the same   (features, rows)  or None
        scale       in     F32        (1,)              positive
        saturated   inout  I32        (1,)              += the number of |x| > MAX * scale
    """

    codes: Tensor | None
    transposed: Tensor | None
    scale: Tensor
    saturated: Tensor


class ProductCodes(NamedTuple):
    """A product's result as FP8, with a scale that is known beforehand: x ~ code * scale.

    A value x of its F32 sums becomes x * factor, rounded to nearest even and clamped to the largest
    finite value MAX; NaN stays NaN. The product finds its largest |x|, which is an infinity or NaN
    where there is an infinity, and NaN where there is a NaN. The kernel that reads the codes first
    does what else is to be known of the tensor: a product cannot.

        codes      out    E4M3, E5M2 (rows, features)  or None, if no kernel reads them later
        scale      in     F32        (1,)              positive
        factor     in     F32        (1,)              1 / scale
        largest    out    F32        (1,)              the product's largest |x|
        abs_max    inout  F32        (1,)              or None; the reader raises it to `largest`
        saturated  inout  I32        (1,)              or None; if `largest` is above MAX * scale,
                                                       the reader adds the number of codes +-MAX
        found      inout  I32        (4,)              or None, but for matmul_swiglu; zeros, which
                                                       it leaves as zeros
    """

    codes: Tensor | None
    scale: Tensor
    factor: Tensor
    largest: Tensor
    abs_max: Tensor | None = None
    saturated: Tensor | None = None
    found: Tensor | None = None


Result = Tensor | ProductCodes
"""The forms in which a product has written its result."""


class OutputForms(NamedTuple):
    """The forms in which a kernel writes a tensor: as it is, its largest absolute value F32 (1,),
    as fp8."""

    out: Tensor | None
    abs_max: Tensor | None = None
    fp8: Fp8Out | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """An fp8 tensor: source ~ codes * scale, in the layouts that were asked for.

    codes: (rows, features). transposed: (features, rows). source: what was quantized, None where
    it is gone.
    """

    source: Tensor | None
    codes: Tensor | None
    transposed: Tensor | None
    scale: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8:
    """A frozen weight as signed bytes: row r ~ codes[r] * scale[r], in two layouts.

    codes: I8 (rows, features). transposed: I8 (features, rows). scale: F32 (rows,). ones: F32
    (features,), the scales of transposed's rows, where `scale` has gone into the other operand.
    """

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

    stochastic: how, if not to nearest even.
    """

    source: Tensor
    stochastic: Stochastic | None = None


Operand = Tensor | Fp8 | Int8 | Rounded


def tensor_of(x: Operand) -> Tensor:
    """The tensor itself, of an operand that is there as codes too."""
    return x if isinstance(x, Tensor) else x.source
