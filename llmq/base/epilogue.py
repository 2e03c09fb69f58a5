"""An epilogue: the terms added to a product of two matrices and the function that follows;
`llmq.ops.product` computes it all.

Sizes are those of the product: out (M, N).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import ClassVar

from llmq.base.operand import OutputForms, Result
from llmq.base.tensor import Tensor


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
    written: enqueues the kernel that reads it. ready: whether the product is written only once.
    """

    place: Callable[[ExitStack], Tensor]
    kept: Tensor | None = None
    result: Callable[[Tensor | None, Callable[[Result | None], None]], Result | None] = _as_it_lies
    written: Callable[[Callable[[], None]], None] = _once
    ready: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """The sum of a product and of what is added to it is stored as it is: out is a Tensor, or codes
    of a product of fp8 codes without addend and adapters."""

    kind: ClassVar[str] = "store"


STORE = Epilogue()


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSum(Epilogue):
    """A weight's gradient: out is an Accumulator.

    A BF16 accumulator cannot add inside the library's product, which would round to nearest every
    time and lose small contributions: it gets the product's BF16 result added with stochastic
    rounding.
    """

    kind: ClassVar[str] = "gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Activated(Epilogue):
    """An activation of the product: out is Handed. A gated one is of [up | gate], (M, 2F).

    name: of ACTIVATIONS. to: where it is written, (M, F). None: the product is written alone, with
    the bits that it has with the activation behind it; out is then as of STORE.
    """

    kind: ClassVar[str] = "glu"
    name: str
    to: OutputForms | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivatedGradient(Epilogue):
    """The gradient of an activation, whose result the product is the gradient of: out is Handed.

    up: what the activation is of. to: its gradient, like up, which may be the same memory. again:
    where the activation is written once more, (M, F).
    """

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
    factors: F32 (M,), and `route` says where they are needed: a row of the gradient is then that of
    out times its factor. scale_a: whether a's rows are multiplied by them.
    """

    kind: ClassVar[str] = "exp"
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
    factors: Tensor | None = None
    scale_a: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFactors(Epilogue):
    """The product's rows times factors, F32 (M,)."""

    kind: ClassVar[str] = "rows"
    factors: Tensor
