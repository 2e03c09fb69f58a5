"""The product of two matrices with what follows it: the one place that chooses the kernels.

`product` takes a kernel that does both where `ops/product/routes.py` has one for the device,
formats and sizes. Else the library computes the product, and the epilogue's own kernels follow,
with the scratch that they need. Everybody else says what is computed, and never asks how.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from llmq.base.dtypes import BF16, E4M3_HALF, F32, I8, I32, DType
from llmq.base.operand import (
    STORE,
    Activated,
    ActivatedGradient,
    Adapters,
    DropoutMask,
    Epilogue,
    Fp8,
    Fp8Out,
    Int8,
    Mxfp4,
    Nf4,
    Operand,
    ProductCodes,
    ProductOutput,
    Result,
    Rounded,
    tensor_of,
    turned,
)
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops.experts import grouped
from llmq.ops.pointwise import gelu, reduce, swiglu
from llmq.ops.pointwise.elementwise import dropout
from llmq.ops.product import adapter, matmul_fused, skinny
from llmq.ops.product.matmul import matmul, matmul_fp8, matmul_int8
from llmq.ops.product.routes import Route, Sizes, taken
from llmq.ops.quantize import fp8_scale, quantize_int8
from llmq.runtime.device import Device

Multiply = Callable[..., None]
"""Enqueues a product alone, with what is added to it: (out, bias=, accumulate=, addend=)."""

ACTIVATIONS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "swiglu": (swiglu.forward, swiglu.backward),
    "geglu": (partial(swiglu.forward, gelu=True), partial(swiglu.backward, gelu=True)),
    "gelu": (gelu.forward, gelu.backward),
    "relu2": (partial(gelu.forward, relu2=True), partial(gelu.backward, relu2=True)),
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
    alpha: float = 1.0

    @property
    def added(self) -> dict[str, Tensor]:
        """The matrix that the library's product adds."""
        both = {"bias": self.bias, "addend": self.addend}
        return {name: tensor for name, tensor in both.items() if tensor is not None}

    @property
    def library(self) -> Multiply:
        """The product alone, times alpha, by a kernel that has no other epilogue."""
        if self.few_rows:
            return partial(skinny.skinny, self.dev, a=self.a, b=self.b, alpha=self.alpha)
        if isinstance(self.b, Nf4 | Mxfp4):
            return partial(skinny.coded, self.dev, a=self.a, b=self.b, alpha=self.alpha)
        if isinstance(self.b, Tensor):
            laid = {"trans_a": self.trans_a, "trans_b": self.trans_b}
            return partial(matmul, self.dev, a=self.a, b=self.b, **laid, alpha=self.alpha)
        if self.half:
            return partial(_matmul_half, self)
        if isinstance(self.b, Fp8):
            operands = {"a": self.left, "b": self.right, "fast_accumulation": self.fast}
            operands |= dict(zip(("scale_a", "scale_b"), self.scales, strict=True))
            return partial(matmul_fp8, self.dev, **operands, alpha=self.alpha)
        return partial(_matmul_rounded if isinstance(self.b, Rounded) else _matmul_int8, self)

    @property
    def few_rows(self) -> bool:
        """Whether the product is one of tensors with so few rows that weights' memory limits it."""
        forward = self.trans_b and not self.trans_a and isinstance(self.b, Tensor)
        return forward and skinny.takes(self.dev, self.a, self.b)

    @property
    def half(self) -> bool:
        """Whether its sums are in half precision, which codes and permission say. That kernel has
        no alpha."""
        is_fp8 = self.fast and isinstance(self.b, Fp8) and self.alpha == 1
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

    def route_of(self, epilogue: Epilogue, out: Result | ProductOutput) -> Route | None:
        """The route of this product with its activation; None: two kernels, which are faster where
        a product writes codes, or an activation's gradient reads them. No kernel computes an
        activation of a product times alpha."""
        if isinstance(epilogue, Activated) and epilogue.name in GATED and self.alpha == 1:
            coded = out.codes is not None if isinstance(out, ProductOutput) else _is_coded(out)
            return None if coded else self.route("glu")
        if isinstance(epilogue, ActivatedGradient) and epilogue.name in GATED:
            return None if _is_coded(epilogue.up) else self.route("glu_grad")
        return None

    def sizes(self, kind: str, out: DType | None) -> Sizes | None:
        """Those that a route goes by; None: no kernel of ours has such operands."""
        if isinstance(self.b, Int8 | Mxfp4 | Nf4 | Rounded) or self.right.dtype is E4M3_HALF:
            return None
        adapters, left, right = self.adapters, self.left, self.right
        if adapters is not None and not (adapters.at_once and adapters.hidden.dtype == BF16):
            return None
        last = self.trans_b or isinstance(self.b, Fp8)
        M, K = left.shape[::-1] if self.trans_a and left is self.a else left.shape
        N = right.shape[0 if last else 1] // (2 if kind == "glu" else 1)
        rank = 0 if adapters is None else adapters.hidden.shape[1]
        return Sizes(M, N, K, left.dtype, out, rank)


def product(
    dev: Device,
    out: Result | ProductOutput,
    a: Operand,
    b: Operand,
    *,
    trans_b: bool = False,
    adapters: Adapters | None = None,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    epilogue: Epilogue = STORE,
    fast: bool = False,
    alpha: float = 1.0,
) -> None:
    """out = alpha * a @ op(b) + hidden @ tail^T + bias + addend, and the epilogue of that sum.

    Sums are F32. Where no kernel of ours is taken, the first product is rounded, with bias and
    addend in it, before the adapters' is added. out: (M,N), in the form that the epilogue says. a:
    (M,K), b: (K,N), or (N,K) with trans_b: tensors, also to be rounded, or codes in the layouts
    that are multiplied; b alone is signed bytes, or 4 bit. bias: (N,), like out, of fp8 codes BF16.
    addend: (M,N), like out, other memory; only where `accepts_addend`. fast: as of `matmul_fp8`.
    """
    terms = _Terms(dev, a, b, False, trans_b, adapters, bias, addend, fast, alpha)
    to = getattr(epilogue, "to", None)  # buffers of the activation, or of its gradient
    fused, gelu = terms.route_of(epilogue, out) is not None, epilogue.name == "geglu"
    with ExitStack() as temps:
        result = None if fused and to else _memory_of(dev, temps, out, epilogue)
        one = fused or (adapters is not None and terms.route("adapters", result.dtype) is not None)
        if not one and _is_coded(result):
            _multiply_to_codes(terms, result)
        elif not one:
            terms.library(result, **terms.added)
        hidden, tail, blocks, *_ = adapters or (None,) * 3
        if blocks is not None:
            tail = temps.enter_context(dev.scratch("lora_b", blocks[:2], tail.dtype))
            adapter.expand(dev, tail, adapters.tail, blocks.spans, blocks.scales)
        if fused and isinstance(epilogue, ActivatedGradient):
            matmul_fused.swiglu_backward(
                dev, to.tensor, terms.left, terms.right, epilogue.up, hidden, tail, *terms.scales,
                gelu=gelu, abs_max=to.abs_max, fp8=to.fp8, alpha=alpha,
                out=epilogue.again.tensor, out_fp8=epilogue.again.fp8,
            )  # fmt: skip
        elif fused and to:
            matmul_fused.swiglu(
                dev, out.tensor, to.tensor, terms.left, terms.right, hidden, tail, *terms.scales,
                gelu=gelu, abs_max=to.abs_max, fp8=to.fp8,
            )  # fmt: skip
        elif one:
            matmul_fused.adapted(
                dev, result, terms.left, terms.right, hidden, tail, *terms.scales,
                bias=bias, addend=addend, transposed=not trans_b, alpha=alpha,
            )  # fmt: skip
        elif adapters is not None and adapters.dropout is not None:
            add_dropped(dev, result, hidden, tail, adapters.dropout, trans_b=trans_b)
        elif adapters is not None:
            matmul(dev, result, hidden, tail, trans_b=trans_b, accumulate=True)
        if adapters is not None and adapters.magnitudes is not None:
            adapter.scale(dev, result, result, *adapters.magnitudes)
        if to and not fused:
            _activate(dev, result, epilogue)


def weight_gradient(
    dev: Device,
    out: Accumulator,
    a: Operand,
    b: Operand,
    *,
    fast: bool = False,
    alpha: float = 1.0,
) -> None:
    """out (M,N) = or += alpha * a^T @ b, of a (K,M) and b (K,N), as operands that `product` takes.

    A BF16 sum gets the product's BF16 result added with stochastic rounding: inside the library's
    product small contributions would be lost. fast: as of `product`.
    """
    terms = _Terms(dev, a, b, True, False, None, None, None, fast, alpha)
    target = out.tensor
    if terms.route("gradient", target.dtype) is not None:
        operands = (terms.left, terms.right, *terms.scales)
        matmul_fused.gradient(dev, out, *operands, fast_accumulation=fast, alpha=alpha)
    elif not out.accumulate:
        terms.library(target)
    elif target.dtype == F32:
        terms.library(target, accumulate=True)
    else:
        with dev.scratch("d_weight", target.shape, target.dtype) as part:
            terms.library(part)
            reduce.sum_parts(dev, out, [part])


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
    if isinstance(w, Nf4 | Mxfp4):
        skinny.coded(dev, out, x, w, starts, bias=bias)
        if adapters is not None:
            grouped.grouped_matmul(dev, out, *adapters, starts, trans_b=trans_b, addend=out)
        return
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


def _matmul_rounded(terms: _Terms, out: Tensor, **added: Any) -> None:
    """A product of tensors as signed bytes, which are made here with a scale for each row of a and
    for each column of b."""
    dev, a, b = terms.dev, terms.a, terms.b
    a_shape = turned(a.source.shape) if terms.trans_a else a.source.shape
    b_shape = b.source.shape if terms.trans_b else turned(b.source.shape)
    make_a = quantize_int8.columns if terms.trans_a else quantize_int8.rows
    make_b = quantize_int8.rows if terms.trans_b else quantize_int8.columns
    with (
        dev.scratch("int8_codes", a_shape, I8) as left,
        dev.scratch("int8_scales", a_shape[:1], F32) as scale_a,
    ):
        make_a(dev, left, scale_a, a.source, stochastic=a.stochastic)
        with (
            dev.scratch("int8_codes", b_shape, I8) as right,
            dev.scratch("int8_scales", b_shape[:1], F32) as scale_b,
        ):
            make_b(dev, right, scale_b, b.source, stochastic=b.stochastic)
            matmul_int8(dev, out, left, right, scale_a, scale_b, alpha=terms.alpha, **added)


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
            ones, alpha = weight.ones, terms.alpha
            matmul_int8(dev, out, codes, weight.transposed, scale, ones, alpha=alpha)
            return
        mask, index = scratch("outliers.mask", F32, columns), scratch("outliers", I32, most)
        largest = scratch("column_max", F32, columns)
        quantize_int8.largest_of_columns(dev, largest, x)
        quantize_int8.select_outliers(dev, mask, index, largest, quantize_int8.THRESHOLD)
        codes, scale = scratch("x.q", I8, rows, columns), scratch("x.scale", F32, rows)
        quantize_int8.rows(dev, codes, scale, x, factors=mask)
        how = {"alpha": terms.alpha}
        matmul_int8(dev, out, codes, weight.codes, scale, weight.scale, **how, **added)
        large = scratch("x.outliers", x.dtype, rows, most)
        part = scratch("weight.outliers", x.dtype, out.shape[1], most)
        quantize_int8.take_outliers(dev, large, x, index)
        quantize_int8.outlier_weight(dev, part, weight.codes, weight.scale, index)
        matmul(dev, out, large, part, trans_b=True, accumulate=True, **how)


def _matmul_half(terms: _Terms, out: Tensor, *, bias: Tensor | None = None, **added: Any) -> None:
    """By the kernel for experts' rows, of which one has all."""
    left, right, row = terms.left, terms.right, bias and bias.view(1, bias.size)
    operands = left, right.view(1, *right.shape), None, *terms.scales
    grouped.grouped_matmul(terms.dev, out, *operands, trans_b=True, bias=row, half=True, **added)


def _memory_of(
    dev: Device, temps: ExitStack, out: Result | ProductOutput, epilogue: Epilogue
) -> Result:
    """The memory of the product without its activation: the caller's, or scratch."""
    if not isinstance(out, ProductOutput):
        return out
    memory = out.tensor
    if memory is None and isinstance(epilogue, ActivatedGradient):
        # The activation may go where its gradient is, which is not needed again.
        memory = epilogue.again.tensor
    if memory is None:
        memory = temps.enter_context(dev.scratch(out.name, out.shape, out.dtype))
    return memory if out.codes is None else out.codes._replace(codes=memory)


def _multiply_to_codes(terms: _Terms, out: ProductCodes) -> None:
    """The library's product as codes: twice, until there is a first scale."""
    terms.library(out, **terms.added)
    if out.first is not None:
        fp8_scale.update(terms.dev, *out.first[:-1], factors=out.first.factor)
        terms.library(out, **terms.added)


def add_dropped(
    dev: Device, out: Tensor, hidden: Tensor, tail: Tensor, mask: DropoutMask, *, trans_b: bool
) -> None:
    """out (M,N) += the elements of hidden (M,R) @ op(tail) that dropout leaves. tail: (R,N), or
    (N,R) with trans_b."""
    probability, salt, sequences, scalars = mask
    with dev.scratch("d_dropped", out.shape, out.dtype) as second:
        matmul(dev, second, hidden, tail, trans_b=trans_b)
        dropout(
            dev, out, second, scalars,
            probability=probability, salt=salt, sequences=sequences, add=True,
        )  # fmt: skip


def _activate(dev: Device, x: Result, epilogue: Activated | ActivatedGradient) -> None:
    """The activation of x, or the gradient of the activation whose gradient x is."""
    (forward, backward), to = ACTIVATIONS[epilogue.name], epilogue.to
    if isinstance(epilogue, Activated):
        forward(dev, to.tensor, x, abs_max=to.abs_max, fp8=to.fp8)
        return
    up, again = epilogue.up, {"out": epilogue.again.tensor, "out_fp8": epilogue.again.fp8}
    if to.pending is not None and epilogue.name in GATED:
        # Computed twice: that moves fewer bytes than writing a tensor and quantizing it.
        backward(dev, None, x, up, abs_max=to.abs_max)
        fp8_scale.now(dev, to.pending.scale, to.abs_max, _dtype_of(to.pending))
        backward(dev, None, x, up, fp8=to.pending, **again)
        to.pending = None
        return
    backward(dev, to.tensor, x, up, abs_max=to.abs_max, fp8=to.fp8, **again)
    if to.first is not None:
        fp8_scale.update(dev, *to.first[:-1], factors=to.first.factor)
        backward(dev, to.tensor, x, up, abs_max=to.abs_max, fp8=to.fp8, **again)


def _is_coded(result: Result) -> bool:
    return isinstance(result, ProductCodes)


def _dtype_of(codes: Fp8Out) -> DType:
    return (codes.codes or codes.transposed).dtype
