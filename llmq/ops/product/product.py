"""Matrix products with an epilogue: the one place that chooses their kernels.

`product` launches one fused kernel if `ops/product/routes.py` has a route for the device, formats
and sizes. Else the library computes the product, and the epilogue's own kernels follow, with the
scratch that they need.
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
    Coded,
    DropoutMask,
    Epilogue,
    Fp8,
    Int8,
    Int8Rows,
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
"""Function (out, bias=, accumulate=, addend=) that enqueues a product without an epilogue."""

ACTIVATIONS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "swiglu": (swiglu.forward, swiglu.backward),
    "geglu": (partial(swiglu.forward, gelu=True), partial(swiglu.backward, gelu=True)),
    "gelu": (gelu.forward, gelu.backward),
    "relu2": (partial(gelu.forward, relu2=True), partial(gelu.backward, relu2=True)),
}
GATED = ("swiglu", "geglu")


class _Terms(NamedTuple):
    """Operands and addends of `product`."""

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
        """bias and addend by name, without those that are None."""
        both = {"bias": self.bias, "addend": self.addend}
        return {name: tensor for name, tensor in both.items() if tensor is not None}

    @property
    def library(self) -> Multiply:
        """Function that enqueues the product times alpha by a kernel without an epilogue."""
        if self.few_rows:
            return partial(skinny.skinny, self.dev, a=self.a, b=self.b, alpha=self.alpha)
        if isinstance(self.b, Coded):
            return partial(skinny.coded, self.dev, a=self.a, b=self.b, alpha=self.alpha)
        if isinstance(self.b, Tensor):
            return partial(
                matmul, self.dev, a=self.a, b=self.b, trans_a=self.trans_a, trans_b=self.trans_b,
                alpha=self.alpha,
            )  # fmt: skip
        if self.half:
            return partial(_matmul_half, self)
        if isinstance(self.b, Fp8):
            return partial(
                matmul_fp8, self.dev, a=self.left, b=self.right, scale_a=self.a.scale,
                scale_b=self.b.scale, fast_accumulation=self.fast, alpha=self.alpha,
            )  # fmt: skip
        if isinstance(self.b, Int8Rows):
            return partial(
                matmul_int8, self.dev, a=self.a.codes, b=self.b.codes, scale_a=self.a.scale,
                scale_b=self.b.scale, alpha=self.alpha,
            )  # fmt: skip
        return partial(_matmul_rounded if isinstance(self.b, Rounded) else _matmul_int8, self)

    @property
    def few_rows(self) -> bool:
        """True if skinny.skinny computes the product, because it has few rows and reading the
        weight takes most of the time."""
        forward = self.trans_b and not self.trans_a and isinstance(self.b, Tensor)
        return forward and skinny.takes(self.dev, self.a, self.b)

    @property
    def half(self) -> bool:
        """True if sums are in half precision: codes are E4M3_HALF, fast is True, and alpha is 1."""
        is_fp8 = self.fast and isinstance(self.b, Fp8) and self.alpha == 1
        return is_fp8 and self.left.dtype is self.right.dtype is E4M3_HALF

    @property
    def left(self) -> Tensor:
        """The tensor of operand a that kernels read: of fp8 codes, the layout with K last."""
        if not isinstance(self.a, Fp8):
            return self.a
        return self.a.transposed if self.trans_a else self.a.codes

    @property
    def right(self) -> Tensor:
        """The tensor of operand b that kernels read: of fp8 codes, the layout with K last."""
        if not isinstance(self.b, Fp8):
            return self.b
        return self.b.codes if self.trans_b else self.b.transposed

    @property
    def scales(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Scales of the fp8 codes a and b; None for other operands."""
        return (self.a.scale, self.b.scale) if isinstance(self.b, Fp8) else (None, None)

    def route(self, kind: str, out: DType | None = None) -> Route | None:
        """The route of this product with an epilogue or with "adapters"; None: separate kernels."""
        sizes = self.sizes(kind, out)
        route = None if sizes is None else taken(self.dev, kind, sizes, fast=self.fast)
        # A bias comes before an activation.
        return None if route and self.bias is not None and not route.bias else route

    def route_of(self, epilogue: Epilogue, out: Result | ProductOutput) -> Route | None:
        """The route of this product with its activation; None: two kernels, which are faster if the
        product writes codes or the activation's gradient reads codes. Fused forward has no
        alpha."""
        if isinstance(epilogue, Activated) and epilogue.name in GATED and self.alpha == 1:
            coded = out.codes is not None if isinstance(out, ProductOutput) else _is_coded(out)
            return None if coded else self.route("glu")
        if isinstance(epilogue, ActivatedGradient) and epilogue.name in GATED:
            return None if _is_coded(epilogue.up) else self.route("glu_grad")
        return None

    def sizes(self, kind: str, out: DType | None) -> Sizes | None:
        """Sizes for the choice of a route; None: no fused kernel has these operands."""
        coded = Int8 | Int8Rows | Rounded | Coded
        if isinstance(self.b, coded) or self.right.dtype is E4M3_HALF:
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
    """out = epilogue(alpha * a @ op(b) + hidden @ tail^T + bias + addend).

    Sums are F32. Without a fused kernel alpha * a @ op(b) + bias + addend is rounded before the
    adapters' product is added. out: (M,N), the product before an activation. a: (M,K). b: (K,N), or
    (N,K) with trans_b. Operands are tensors, tensors to be quantized here, or codes; only b may be
    `Int8` or `Coded`. bias: (N,), in out's dtype; BF16 for fp8 codes. addend: (M,N), in out's
    dtype but not in its memory; see `accepts_addend`. fast: see `matmul_fp8`.
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
            activate(dev, result, epilogue)


def weight_gradient(
    dev: Device, out: Accumulator, a: Operand, b: Operand, *, fast: bool = False, alpha: float = 1.0
) -> None:
    """out (M,N) = or += alpha * a^T @ b. a: (K,M), b: (K,N), operands as in `product`.

    For a BF16 out, the product is rounded to BF16 and added with stochastic rounding. The library's
    accumulation rounds to nearest, which loses small contributions. fast: see `matmul_fp8`.
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
    """out[r] = x[r] @ op(w[e]) + bias[e] + h[r] @ op(tail[e]) for rows sorted by expert, see
    `grouped.grouped_matmul`; x and w are tensors or codes. adapters: h (R, r) and tail (E, N, r),
    or (E, r, N) without trans_b. fast: see `matmul_fp8`."""
    terms = _Terms(dev, x, w, False, trans_b, None, bias, None, fast)
    if isinstance(w, Coded):
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
        matmul_fused.grouped(
            dev, out, left, right, starts, *low, *scales, transposed=not trans_b, bias=bias
        )
    else:
        grouped.grouped_matmul(
            dev, out, left, right, starts, *scales, trans_b=trans_b or isinstance(w, Fp8),
            bias=bias, half=terms.half,
        )  # fmt: skip
    if adapters is not None and not joined:
        grouped.grouped_matmul(dev, out, *adapters, starts, trans_b=trans_b, addend=out)


def grouped_gradient(dev: Device, d_w: Accumulator, d_y: Tensor, x: Tensor, starts: Tensor) -> None:
    """Gradient of experts' matrices, see `grouped.grouped_gradient`."""
    (R, N), K = d_y.shape, x.shape[1]
    sizes = Sizes(N, K, R, x.dtype, d_w.tensor.dtype)
    kernels = grouped if taken(dev, "grouped_grad", sizes) is None else matmul_fused
    kernels.grouped_gradient(dev, d_w, d_y, x, starts)


def accepts_addend(
    dev: Device, out: Tensor, dtype: DType, K: int, hidden: Tensor | None, *, fast: bool
) -> bool:
    """True if a product of an operand (M, K) in this dtype takes an addend.

    False for int8, and for adapters whose product has its own launch: the residual stream would be
    rounded before this product is added. hidden: (M, R) of the adapters; None: no adapters."""
    if hidden is None or dtype == I8:
        return dtype != I8
    sizes = Sizes(*out.shape, K, dtype, out.dtype, hidden.shape[1])
    return hidden.dtype == BF16 and taken(dev, "adapters", sizes, fast=fast) is not None


def _matmul_rounded(terms: _Terms, out: Tensor, **added: Any) -> None:
    """int8 product of tensors, which are quantized here with a scale for each row of op(a) and each
    column of op(b)."""
    dev, a, b = terms.dev, terms.a, terms.b
    a_shape = turned(a.source.shape) if terms.trans_a else a.source.shape
    b_shape = b.source.shape if terms.trans_b else turned(b.source.shape)
    quantize_a = quantize_int8.columns if terms.trans_a else quantize_int8.rows
    quantize_b = quantize_int8.rows if terms.trans_b else quantize_int8.columns
    with (
        dev.scratch("int8_codes", a_shape, I8) as left,
        dev.scratch("int8_scales", a_shape[:1], F32) as scale_a,
    ):
        quantize_a(dev, left, scale_a, a.source, stochastic=a.stochastic)
        with (
            dev.scratch("int8_codes", b_shape, I8) as right,
            dev.scratch("int8_scales", b_shape[:1], F32) as scale_b,
        ):
            quantize_b(dev, right, scale_b, b.source, stochastic=b.stochastic)
            matmul_int8(dev, out, left, right, scale_a, scale_b, alpha=terms.alpha, **added)


def _matmul_int8(terms: _Terms, out: Tensor, **added: Any) -> None:
    """int8 products with a frozen weight, whose codes have a scale for each row.

        x @ weight^T     codes of x have a scale for each token; outliers, which are columns with an
                         element beyond THRESHOLD, are multiplied in x's dtype
        d_out @ weight   d_out is multiplied by the scales of the weight's rows, and then gets codes
                         with a scale for each token

    Outliers depend on x alone, so that recomputation has the same bits.
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
            matmul_int8(dev, out, codes, weight.transposed, scale, weight.ones, alpha=terms.alpha)
            return
        mask, index = scratch("outliers.mask", F32, columns), scratch("outliers", I32, most)
        largest = scratch("column_max", F32, columns)
        quantize_int8.largest_of_columns(dev, largest, x)
        quantize_int8.select_outliers(dev, mask, index, largest, quantize_int8.THRESHOLD)
        codes, scale = scratch("x.q", I8, rows, columns), scratch("x.scale", F32, rows)
        quantize_int8.rows(dev, codes, scale, x, factors=mask)
        alpha = terms.alpha
        matmul_int8(dev, out, codes, weight.codes, scale, weight.scale, alpha=alpha, **added)
        large = scratch("x.outliers", x.dtype, rows, most)
        part = scratch("weight.outliers", x.dtype, out.shape[1], most)
        quantize_int8.take_outliers(dev, large, x, index)
        quantize_int8.outlier_weight(dev, part, weight.codes, weight.scale, index)
        matmul(dev, out, large, part, trans_b=True, accumulate=True, alpha=alpha)


def _matmul_half(terms: _Terms, out: Tensor, *, bias: Tensor | None = None, **added: Any) -> None:
    """Product with sums in half precision, computed by the grouped kernel with one expert."""
    left, right, row = terms.left, terms.right, bias and bias.view(1, bias.size)
    operands = left, right.view(1, *right.shape), None, *terms.scales
    grouped.grouped_matmul(terms.dev, out, *operands, trans_b=True, bias=row, half=True, **added)


def _memory_of(
    dev: Device, temps: ExitStack, out: Result | ProductOutput, epilogue: Epilogue
) -> Result:
    """Memory for the product before its activation: the caller's memory, or scratch."""
    if not isinstance(out, ProductOutput):
        return out
    memory = out.tensor
    if memory is None and isinstance(epilogue, ActivatedGradient):
        # The activation may overwrite its own gradient.
        memory = epilogue.again.tensor
    if memory is None:
        memory = temps.enter_context(dev.scratch(out.name, out.shape, out.dtype))
    return memory if out.codes is None else out.codes._replace(codes=memory)


def _multiply_to_codes(terms: _Terms, out: ProductCodes) -> None:
    """Compute the library's product as codes. In the first step the product runs twice: first to
    measure the scale, then to make the codes."""
    terms.library(out, **terms.added)
    if out.first is not None:
        fp8_scale.update(terms.dev, *out.first[:-1], factors=out.first.factor)
        terms.library(out, **terms.added)


def add_dropped(
    dev: Device, out: Tensor, hidden: Tensor, tail: Tensor, mask: DropoutMask, *, trans_b: bool
) -> None:
    """out (M,N) += dropout(hidden (M,R) @ op(tail)). tail: (R,N), or (N,R) with trans_b."""
    with dev.scratch("d_dropped", out.shape, out.dtype) as second:
        matmul(dev, second, hidden, tail, trans_b=trans_b)
        dropout(
            dev, out, second, mask.scalars, probability=mask.probability, salt=mask.salt,
            sequences=mask.sequences, add=True,
        )  # fmt: skip


def activate(dev: Device, x: Result, epilogue: Activated | ActivatedGradient) -> None:
    """Compute an activation of x, or from x, the gradient of an activation's output, the gradient
    of its input."""
    (forward, backward), to = ACTIVATIONS[epilogue.name], epilogue.to
    if isinstance(epilogue, Activated):
        forward(dev, to.tensor, x, abs_max=to.abs_max, fp8=to.fp8)
        return
    up, again = epilogue.up, {"out": epilogue.again.tensor, "out_fp8": epilogue.again.fp8}
    if to.pending is not None and epilogue.name in GATED:
        # Two runs of the kernel move fewer bytes than writing a tensor and quantizing the tensor.
        codes = to.pending.codes or to.pending.transposed
        backward(dev, None, x, up, abs_max=to.abs_max)
        fp8_scale.now(dev, to.pending.scale, to.abs_max, codes.dtype)
        backward(dev, None, x, up, fp8=to.pending, **again)
        to.pending = None
        return
    backward(dev, to.tensor, x, up, abs_max=to.abs_max, fp8=to.fp8, **again)
    if to.first is not None:
        fp8_scale.update(dev, *to.first[:-1], factors=to.first.factor)
        backward(dev, to.tensor, x, up, abs_max=to.abs_max, fp8=to.fp8, **again)


def _is_coded(result: Result) -> bool:
    return isinstance(result, ProductCodes)
