"""The product of two matrices with what follows it: the one place that chooses the kernels.

`product` takes a kernel that does both where `ops/routes.py` has one for the device, formats and
sizes. Else the library computes the product, and the epilogue's own kernels follow, with the
scratch that they need. Everybody else says what is computed, and never asks how.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from llmq.base.dtypes import BF16, E4M3_HALF, F32, I8, I32, DType
from llmq.base.operand import (
    STORE,
    Activated,
    ActivatedGradient,
    Adapters,
    CrossEntropy,
    Epilogue,
    Fp8,
    Handed,
    Int8,
    Operand,
    OutputForms,
    ProductCodes,
    Result,
    Rounded,
    tensor_of,
    turned,
)
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops import (
    cross_entropy,
    gelu,
    grouped,
    matmul_fused,
    quantize_int8,
    reduce,
    swiglu,
)
from llmq.ops.matmul import matmul, matmul_fp8, matmul_int8
from llmq.ops.routes import Route, Sizes, taken
from llmq.runtime.device import Device

Multiply = Callable[..., None]
"""Enqueues a product alone, with what is added to it: (out, bias=, accumulate=, addend=)."""

ACTIVATIONS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "swiglu": (swiglu.forward, swiglu.backward),
    "geglu": (partial(swiglu.forward, gelu=True), partial(swiglu.backward, gelu=True)),
    "gelu": (gelu.forward, gelu.backward),
}
GATED = ("swiglu", "geglu")


class _Terms(NamedTuple):
    """A product, and what is added before it is rounded; as of `product`."""

    dev: Device
    a: Operand
    b: Operand
    trans_a: bool
    trans_b: bool
    adapters: Adapters | None
    bias: Tensor | None
    addend: Tensor | None
    fast: bool

    @property
    def added(self) -> dict[str, Tensor]:
        """The matrix that the library's product adds."""
        both = {"bias": self.bias, "addend": self.addend}
        return {name: tensor for name, tensor in both.items() if tensor is not None}

    @property
    def library(self) -> Multiply:
        """The product alone, by a kernel that has no other epilogue."""
        if isinstance(self.b, Tensor):
            laid = {"trans_a": self.trans_a, "trans_b": self.trans_b}
            return partial(matmul, self.dev, a=self.a, b=self.b, **laid)
        if self.half:
            return partial(_matmul_half, self)
        if isinstance(self.b, Fp8):
            operands = {"a": self.left, "b": self.right, "fast_accumulation": self.fast}
            scale_a, scale_b = self.scales
            return partial(matmul_fp8, self.dev, **operands, scale_a=scale_a, scale_b=scale_b)
        return partial(_matmul_rounded if isinstance(self.b, Rounded) else _matmul_int8, self)

    @property
    def half(self) -> bool:
        """Whether its sums are in half precision, which codes and permission say."""
        is_fp8 = self.fast and isinstance(self.b, Fp8)
        return is_fp8 and self.left.dtype is self.right.dtype is E4M3_HALF

    @property
    def left(self) -> Tensor:
        """The matrix that is multiplied of a: fp8 codes lie with K last."""
        if not isinstance(self.a, Fp8):
            return self.a
        return self.a.transposed if self.trans_a else self.a.codes

    @property
    def right(self) -> Tensor:
        """The matrix that is multiplied of b."""
        if not isinstance(self.b, Fp8):
            return self.b
        return self.b.codes if self.trans_b else self.b.transposed

    @property
    def scales(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Both operands' scales, of fp8 codes."""
        return (self.a.scale, self.b.scale) if isinstance(self.b, Fp8) else (None, None)

    def route(self, kind: str, out: DType | None = None) -> Route | None:
        """The route of this product with an epilogue, or of "adapters"; None: two kernels."""
        sizes = self.sizes(kind, out)
        route = None if sizes is None else taken(self.dev, kind, sizes, fast=self.fast)
        # A bias comes before an activation.
        return None if route and self.bias is not None and not route.bias else route

    def sizes(self, kind: str, out: DType | None) -> Sizes | None:
        """Those that a route goes by; None: no kernel of ours has such operands."""
        if isinstance(self.b, Int8 | Rounded) or self.right.dtype is E4M3_HALF:
            return None
        adapters, left, right = self.adapters, self.left, self.right
        if adapters is not None and not (adapters.at_once and adapters.hidden.dtype == BF16):
            return None
        last = self.trans_b or isinstance(self.b, Fp8)
        M, K = left.shape[::-1] if self.trans_a and left is self.a else left.shape
        N = right.shape[0 if last else 1] // (2 if kind == "glu" else 1)
        rank = 0 if adapters is None else adapters.hidden.shape[1]
        return Sizes(M, N, K, left.dtype, out, rank)

    @contextmanager
    def operands(self) -> Iterator[dict[str, Tensor | None]]:
        """The operands of a product of ours, by name; those of adapters live that long."""
        left, right, (scale_a, scale_b) = self.left, self.right, self.scales
        given = {"a": left, "b": right, "scale_a": scale_a, "scale_b": scale_b}
        if self.adapters is None:
            yield given
            return
        with self.adapters.made() as tail:
            yield given | {"h": self.adapters.hidden, "tail": tail}


def product(
    dev: Device,
    out: Result | Accumulator | Handed,
    a: Operand,
    b: Operand,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    adapters: Adapters | None = None,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    epilogue: Epilogue = STORE,
    fast: bool = False,
) -> None:
    """out = op(a) @ op(b) + hidden @ tail^T + bias + addend, and what the epilogue makes of it.

    Sums are F32. Where no kernel of ours is taken, the first product is rounded, with bias and
    addend in it, before the adapters' is added.

    Args (two dimensions; operands are tensors, also to be rounded, or codes in the layouts that are
    multiplied, those of signed bytes of b alone):
        out       (M,N)  in the form that the epilogue says
        a         (M,K)  (K,M) with trans_a
        b         (K,N)  (N,K) with trans_b
        bias      (N,)   like out, of fp8 codes BF16; or None
        addend    (M,N)  like out, other memory; or None, as it is unless `accepts_addend`
        fast             whether sums of fp8 codes may have fewer bits, see `matmul_fp8`
    """
    terms = _Terms(dev, a, b, trans_a, trans_b, adapters, bias, addend, fast)
    if epilogue is STORE and adapters is None:
        terms.library(out, **terms.added)
    else:
        _EPILOGUES[epilogue.kind](terms, out, epilogue)


def grouped_product(
    dev: Device,
    out: Tensor,
    x: Operand,
    w: Operand,
    starts: Tensor,
    *,
    trans_b: bool = False,
    bias: Tensor | None = None,
    adapters: tuple[Tensor, Tensor] | None = None,
    fast: bool = False,
) -> None:
    """The product of rows that are sorted by expert, as `grouped.grouped_matmul` has it: of
    tensors, or of codes. adapters: h (R, r) and each expert's tail (E, N, r), or (E, r, N) without
    trans_b, whose product is added. fast: as of `product`."""
    terms = _Terms(dev, x, w, False, trans_b, None, bias, None, fast)
    left, right, scales = terms.left, terms.right, terms.scales
    rank = 0 if adapters is None else adapters[0].shape[1]
    sizes = Sizes(*out.shape, left.shape[1], left.dtype, out.dtype, rank)
    joined = adapters is not None and taken(dev, "grouped", sizes, fast=fast) is not None
    if joined or taken(dev, "grouped", sizes._replace(rank=0), fast=fast) is not None:
        low = adapters if joined else (None, None)
        how = {"transposed": not trans_b, "bias": bias}
        matmul_fused.grouped(dev, out, left, right, starts, *low, *scales, **how)
    else:
        how = {"trans_b": trans_b or isinstance(w, Fp8), "bias": bias, "half": terms.half}
        grouped.grouped_matmul(dev, out, left, right, starts, *scales, **how)
    if adapters is not None and not joined:
        grouped.grouped_matmul(dev, out, *adapters, starts, trans_b=trans_b, addend=out)


def grouped_gradient(dev: Device, d_w: Accumulator, d_y: Tensor, x: Tensor, starts: Tensor) -> None:
    """The gradient of experts' matrices, as `grouped.grouped_gradient` has it."""
    (R, N), K = d_y.shape, x.shape[1]
    sizes = Sizes(N, K, R, x.dtype, d_w.tensor.dtype)
    kernels = grouped if taken(dev, "grouped_grad", sizes) is None else matmul_fused
    kernels.grouped_gradient(dev, d_w, d_y, x, starts)


def accepts_addend(
    dev: Device, out: Tensor, dtype: DType, K: int, hidden: Tensor | None, *, fast: bool
) -> bool:
    """Whether a product, of an operand (M, K) that is multiplied in this format, takes an addend.
    Not of signed bytes, and not beside adapters (hidden (M, R)) that are a product of their own,
    whose result would be rounded as finely as the addend, not as the first product's."""
    if hidden is None or dtype == I8:
        return dtype != I8
    sizes = Sizes(*out.shape, K, dtype, out.dtype, hidden.shape[1])
    return hidden.dtype == BF16 and taken(dev, "adapters", sizes, fast=fast) is not None


@contextmanager
def _signed(dev: Device, x: Rounded, *, columns: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Codes of x or of its transpose, I8, and the scales of their rows."""
    shape = turned(x.source.shape) if columns else x.source.shape
    make = quantize_int8.columns if columns else quantize_int8.rows
    with (
        dev.scratch("int8_codes", shape, I8) as codes,
        dev.scratch("int8_scales", shape[:1], F32) as scales,
    ):
        make(dev, codes, scales, x.source, stochastic=x.stochastic)
        yield codes, scales


def _matmul_rounded(terms: _Terms, out: Tensor, **added: Any) -> None:
    with (
        _signed(terms.dev, terms.a, columns=terms.trans_a) as (left, scale_a),
        _signed(terms.dev, terms.b, columns=not terms.trans_b) as (right, scale_b),
    ):
        matmul_int8(terms.dev, out, left, right, scale_a, scale_b, **added)


def _matmul_int8(terms: _Terms, out: Tensor, **added: Any) -> None:
    """Products of a frozen weight, whose rows have scales.

        x @ weight^T     x as codes with a scale for each token, but for its outliers: columns with
                         an element beyond THRESHOLD, which are multiplied as they are
        d_out @ weight   d_out times the scales of the weight's rows, over which it is summed, as
                         codes with a scale for each token

    The columns that are outliers follow from x alone, so that what is computed again is the same.
    """
    dev, weight, x = terms.dev, terms.b, tensor_of(terms.a)
    (rows, columns), most = x.shape, quantize_int8.MOST
    with ExitStack() as temps:

        def scratch(name: str, dtype: DType, *shape: int) -> Tensor:
            return temps.enter_context(dev.scratch(name, shape, dtype))

        if not terms.trans_b:
            codes, scale = scratch("d_out.q", I8, rows, columns), scratch("d_out.scale", F32, rows)
            stochastic = terms.a.stochastic
            quantize_int8.rows(dev, codes, scale, x, factors=weight.scale, stochastic=stochastic)
            matmul_int8(dev, out, codes, weight.transposed, scale, weight.ones)
            return
        mask, index = scratch("outliers.mask", F32, columns), scratch("outliers", I32, most)
        largest = scratch("column_max", F32, columns)
        quantize_int8.largest_of_columns(dev, largest, x)
        quantize_int8.select_outliers(dev, mask, index, largest, quantize_int8.THRESHOLD)
        codes, scale = scratch("x.q", I8, rows, columns), scratch("x.scale", F32, rows)
        quantize_int8.rows(dev, codes, scale, x, factors=mask)
        matmul_int8(dev, out, codes, weight.codes, scale, weight.scale, **added)
        large = scratch("x.outliers", x.dtype, rows, most)
        part = scratch("weight.outliers", x.dtype, out.shape[1], most)
        quantize_int8.take_outliers(dev, large, x, index)
        quantize_int8.outlier_weight(dev, part, weight.codes, weight.scale, index)
        matmul(dev, out, large, part, trans_b=True, accumulate=True)


def _matmul_half(terms: _Terms, out: Tensor, *, bias: Tensor | None = None, **added: Any) -> None:
    """By the kernel for experts' rows, of which one has all."""
    left, right, row = terms.left, terms.right, bias and bias.view(1, bias.size)
    operands = left, right.view(1, *right.shape), None, *terms.scales
    grouped.grouped_matmul(terms.dev, out, *operands, trans_b=True, bias=row, half=True, **added)


def _adapted(terms: _Terms, out: Tensor) -> None:
    """All terms by one kernel of ours."""
    added = {"bias": terms.bias, "addend": terms.addend}
    with terms.operands() as operands:
        matmul_fused.adapted(terms.dev, out, **operands, **added, transposed=not terms.trans_b)


def _store(terms: _Terms, out: Result, epilogue: Epilogue = STORE) -> None:
    adapters = terms.adapters
    if adapters is not None and terms.route("adapters", out.dtype) is not None:
        _adapted(terms, out)
        return
    terms.library(out, **terms.added)
    if adapters is None:
        return
    dev, hidden = terms.dev, adapters.hidden
    with adapters.made() as tail:
        if adapters.added is None:
            matmul(dev, out, hidden, tail, trans_b=terms.trans_b, accumulate=True)
        else:
            with dev.scratch("d_dropped", out.shape, out.dtype) as second:
                matmul(dev, second, hidden, tail, trans_b=terms.trans_b)
                adapters.added(out, second)
    if adapters.finished is not None:
        adapters.finished(out)


def _gradient(terms: _Terms, out: Accumulator, epilogue: Epilogue) -> None:
    dev, target = terms.dev, out.tensor
    if terms.route("gradient", target.dtype) is not None:
        matmul_fused.gradient(
            dev, out, terms.left, terms.right, *terms.scales, fast_accumulation=terms.fast
        )
    elif not out.accumulate:
        terms.library(target)
    elif target.dtype == F32:
        terms.library(target, accumulate=True)
    else:
        with dev.scratch("d_weight", target.shape, target.dtype) as part:
            terms.library(part)
            reduce.add(dev, out, part)


def _alone(terms: _Terms) -> Callable[[Result], None]:
    """Writes the product without its activation."""
    plain = terms.adapters is None
    return partial(terms.library, **terms.added) if plain else partial(_store, terms)


def _swiglu(terms: _Terms, to: OutputForms, name: str, up: Tensor | None) -> None:
    gelu = name == "geglu"
    with terms.operands() as operands:
        matmul_fused.swiglu(
            terms.dev, up, to.out, **operands, gelu=gelu, abs_max=to.abs_max, fp8=to.fp8
        )


def _activation(terms: _Terms, out: Handed | Result, epilogue: Activated) -> None:
    name, to = epilogue.name, epilogue.to
    coded = out.coded if isinstance(out, Handed) else isinstance(out, ProductCodes)
    route = terms.route("glu") if name in GATED and not coded else None
    if to is None:
        (_alone(terms) if route is None else partial(_adapted, terms))(out)
        return
    if route is not None:
        out.result(out.kept, partial(_swiglu, terms, to, name))
        return
    forward, _ = ACTIVATIONS[name]
    with ExitStack() as temps:
        up = out.result(out.place(temps), _alone(terms))
        out.written(partial(forward, terms.dev, to.out, up, abs_max=to.abs_max, fp8=to.fp8))


def _activation_gradient(terms: _Terms, out: Handed, epilogue: ActivatedGradient) -> None:
    name, up, to, again = epilogue.name, epilogue.up, epilogue.to, epilogue.again
    # Two kernels are faster if these are codes.
    route = terms.route("glu_grad") if name in GATED and isinstance(up, Tensor) else None
    # One that has to know its scale: gated activations are computed twice, which moves fewer bytes
    # than writing them and making codes of that.
    late = to.settle is not None
    twice = late and route is None and name in GATED
    results = {"abs_max": to.abs_max, "out": again.out, "out_fp8": again.fp8}
    results["fp8"] = None if late else to.fp8
    if route is not None:
        with terms.operands() as operands:
            how = {"up_gate": up, "gelu": name == "geglu"} | results
            matmul_fused.swiglu_backward(terms.dev, to.out, **operands, **how)
        if late:
            to.settle(to.out)
        return
    _, backward = ACTIVATIONS[name]
    with ExitStack() as temps:
        # The activation may go where its gradient is, which is not needed again.
        place = out.place(temps) if again.out is None else again.out
        d_act = out.result(place, _alone(terms))
        if twice:
            backward(terms.dev, None, d_act, up, abs_max=to.abs_max)
            to.settle(None)
            backward(terms.dev, None, d_act, up, **results | {"abs_max": None, "fp8": to.fp8})
            return
        out.written(partial(backward, terms.dev, to.out, d_act, up, **results))
        if late:
            to.settle(to.out)


def _cross_entropy(terms: _Terms, out: Tensor, epilogue: CrossEntropy) -> None:
    e, dev = epilogue, terms.dev
    _store(terms, out)
    if not e.gradient:
        args = (e.losses, e.lse, out, e.targets, e.vocab_size)
        cross_entropy.forward(dev, *args, softcap=e.softcap)
        return
    cross_entropy.forward_backward(
        dev, out, e.losses, e.lse, e.targets, e.vocab_size, e.z_loss,
        codes=e.codes, code_scale=e.code_scale, weights=e.weights, softcap=e.softcap,
    )  # fmt: skip


_EPILOGUES: dict[str, Callable[[_Terms, Any, Any], None]] = {
    "store": _store,
    "gradient": _gradient,
    "glu": _activation,
    "glu_grad": _activation_gradient,
    "cross_entropy": _cross_entropy,
}
