"""Operands of a product, as they are and as codes, and its epilogue: the terms added to it and the
function that follows. `llmq.ops.product` computes it all.

Sizes of epilogues are those of the product: out (M, N).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

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


class ProductCodes(NamedTuple):
    """A product's result as FP8, with a scale that is known beforehand: x ~ code * scale.

    A value x of its F32 sums becomes x * factor, rounded to nearest even and clamped to the largest
    finite value MAX; NaN stays NaN. The product finds its largest |x|, which is an infinity or NaN
    where there is an infinity, and NaN where there is a NaN. The kernel that reads the codes first
    does what else is to be known of the tensor: a product cannot.

        codes      out    E4M3, E5M2 (rows, features)
        scale      in     F32        (1,)              positive
        factor     in     F32        (1,)              1 / scale
        largest    out    F32        (1,)              the product's largest |x|
        abs_max    inout  F32        (1,)              or None; the reader raises it to `largest`
        saturated  inout  I32        (1,)              or None; if `largest` is above MAX * scale,
                                                       the reader adds the number of codes +-MAX
    """

    codes: Tensor
    scale: Tensor
    factor: Tensor
    largest: Tensor
    abs_max: Tensor | None = None
    saturated: Tensor | None = None


Result = Tensor | ProductCodes
"""The forms in which a product has written its result."""


class OutputForms(NamedTuple):
    """The forms in which a kernel writes a tensor: as it is, its largest absolute value F32 (1,),
    as fp8.

    settle: None, unless the scale of fp8 follows from that largest value. It enqueues what makes
    the scale, and of the tensor, if it is given, the codes: a kernel writes the tensor before it,
    or looks for the largest value before it and writes the codes after it.
    """

    out: Tensor | None
    abs_max: Tensor | None = None
    fp8: Fp8Out | None = None
    settle: Callable[[Tensor | None], None] | None = None


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


@dataclass(frozen=True, slots=True)
class Adapters:
    """A second product, hidden @ tail^T, that is added to the first one.

    hidden: (M, R). made: computes hidden, for as long as the context that it returns, whose value
    is the tail: (N, R), or (R, N) where b is not transposed. added: adds the second product
    (M, N) to out, where an operation of its own (dropout) does that; None: it is summed as it is.
    finished: what becomes of the sum in out before an epilogue (DoRA); None: nothing.
    """

    hidden: Tensor
    made: Callable[[], AbstractContextManager[Tensor]]
    added: Callable[[Tensor, Tensor], None] | None = None
    finished: Callable[[Tensor], None] | None = None

    @property
    def at_once(self) -> bool:
        """Whether one kernel may compute both products."""
        return self.added is None and self.finished is None


def _as_it_lies(out: Tensor, multiply: Callable[[Result], None]) -> Result:
    multiply(out)
    return out


def _once(launch: Callable[[], None]) -> None:
    launch()


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """The tensors that a product hands to the kernel of an activation, where no kernel is both.

    place: gives its memory, kept or scratch that lives as long as the stack that it is given. kept:
    that memory if somebody reads it later, so that it is written in any case; else None.
    result: has the product written to memory, in the format of the tensor, and returns that.
    written: enqueues the kernel that reads it. coded: whether the product is written as codes, of
    which no kernel behind it is a part.
    """

    place: Callable[[ExitStack], Tensor]
    kept: Tensor | None = None
    result: Callable[[Tensor | None, Callable[[Result | None], None]], Result | None] = _as_it_lies
    written: Callable[[Callable[[], None]], None] = _once
    coded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """The sum of a product and of what is added to it is stored as it is: out is a Tensor, or codes
    of a product of fp8 codes without addend and adapters."""

    kind: ClassVar[str] = "store"


STORE = Epilogue()


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSum(Epilogue):
    """A weight's gradient: out is an Accumulator. A BF16 one gets the product's BF16 result added
    with stochastic rounding: inside the library's product small contributions would be lost."""

    kind: ClassVar[str] = "gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Activated(Epilogue):
    """An activation of the product: out is Handed. A gated one is of [up | gate], (M, 2F). name: of
    ACTIVATIONS. to: where it is written, (M, F). None: the product is written alone, with the bits
    that it has with the activation behind it; out is then as of STORE."""

    kind: ClassVar[str] = "glu"
    name: str
    to: OutputForms | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivatedGradient(Epilogue):
    """The gradient of an activation, whose result the product is the gradient of: out is Handed.
    up: what the activation is of. to: its gradient, like up, which may be the same memory. again:
    where the activation is written once more, (M, F)."""

    kind: ClassVar[str] = "glu_grad"
    name: str
    up: Result
    to: OutputForms
    again: OutputForms


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy(Epilogue):
    """The losses of logits (M, N), which out is; N is at least vocab_size.

    losses, lse: F32 (M,). targets: I32 (M,). gradient: whether out becomes the gradient of the
    logits, or codes, if they are given, with code_scale. weights: F32 (M,), by which the gradient's
    rows are multiplied; None: all are 1.
    softcap: as of ops.cross_entropy.
    """

    kind: ClassVar[str] = "cross_entropy"
    losses: Tensor
    lse: Tensor
    targets: Tensor
    vocab_size: int
    z_loss: float = 0.0
    gradient: bool = True
    weights: Tensor | None = None
    codes: Tensor | None = None
    code_scale: float = 1.0
    softcap: float | None = None
