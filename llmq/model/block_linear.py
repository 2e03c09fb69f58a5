"""Matrix products of blocks, including the products of their adapters.

    h = dropout(x) @ A^T           y = x @ W^T + h @ B^T
    d_h = d_y @ B                  d_x = d_y @ W + dropout(d_h @ A)
    d_B = d_y^T @ h                d_A = d_h^T @ dropout(x)

`ops/product/product.py` decides whether one kernel computes both terms and an epilogue.

A is (R, in_features), and B is (out_features, R) and includes the scaling. A and B join the
adapters of all rows of a matrix; `ops/product/adapter.py` explains this layout, and magnitudes
(DoRA). With magnitudes, backward recomputes y. The small product h is kept for backward. W is
frozen and gets no gradient.
"""

from contextlib import ExitStack
from typing import NamedTuple

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import F32
from llmq.base.operand import (
    STORE,
    Adapters,
    Epilogue,
    Magnitudes,
    Operand,
    ProductOutput,
    Result,
    tensor_of,
)
from llmq.base.tensor import Tensor
from llmq.formats.operands import BACKWARD, FORWARD, WEIGHT, Operands
from llmq.model.activations import LayerContext
from llmq.model.adapters import Dropout, blocks_of, expanded, output_gradients, width_of
from llmq.model.parameters import PartWeights
from llmq.ops.pointwise import reduce
from llmq.ops.product import adapter
from llmq.ops.product.matmul import matmul
from llmq.ops.product.product import accepts_addend, product, weight_gradient
from llmq.options.adapters import Adapted, adapted_in_layers, adapters_of
from llmq.options.options import StepOptions
from llmq.runtime.device import Device


class _Parts(NamedTuple):
    """The adapters of one matrix in one layer. times_alpha: `matrix` with scales multiplied by the
    alpha of its product. salt: a number of the matrix for random numbers of dropout. hidden: h
    (rows, R). norms: F32 (out_features,), the norms of the rows of W + B A (DoRA); None without
    magnitudes."""

    matrix: Adapted
    times_alpha: Adapted
    salt: int
    hidden: Tensor
    norms: Tensor | None


class BlockLinear:
    """The matrix products of all blocks. A method finds a matrix by the layer (`ctx.layer`) and by
    the key in the layer."""

    def __init__(
        self,
        dev: Device,
        config: ModelConfig,
        options: StepOptions,
        operands: Operands,
        scalars: Tensor | None,
    ):
        """operands: the maker of the products' operands in a number format. scalars: the
        StepScalars, which adapters read; None without adapters."""
        self.dev, self.config, self.operands = dev, config, operands
        every = [(layer, m) for layer in range(config.num_layers) for m in config.matrices(layer)]
        self._matrices = {(layer, matrix.key): matrix for layer, matrix in every}
        # Routed experts have this factor in their weights, so that only the product of the shared
        # expert needs it.
        self._alphas = {
            (layer, half.output or "shared_down"): config.residual_multiplier * half.factor
            for layer in range(config.num_layers)
            for half in config.halves(layer)
        }
        self._numbers = {which: number for number, which in enumerate(self._matrices)}
        self.dropout = Dropout(dev, options, scalars)
        self._rows = options.batch.micro_tokens
        self._parts: dict[tuple[int, str], _Parts] = {}
        self._d_hidden: Tensor | None = None
        adapters = adapters_of(options.model)
        if adapters is None:
            return
        widest = 0
        for layer, matrix in adapted_in_layers(config, adapters):
            if matrix.groups > 1:
                continue  # adapters of experts are in ExpertLinear
            width, name = width_of(matrix), matrix.key
            hidden = dev.alloc(
                f"{name}_hidden.{layer}", (self._rows, width), operands.dtype, "Activations"
            )
            norms = None
            if adapters.dora:
                norms = dev.alloc(f"{name}_norms.{layer}", matrix.shape[:1], F32, "Activations")
            times_alpha = matrix.times(self._alpha(layer, name))
            self._parts[layer, name] = _Parts(matrix, times_alpha, len(self._parts), hidden, norms)
            widest = max(widest, width)
        # All matrices share this memory, because gradients of a matrix follow directly after the
        # gradient of its input.
        self._d_hidden = dev.alloc(
            "d_hidden", (self._rows * widest,), operands.dtype, "Activations"
        )

    def _alpha(self, layer: int, key: str) -> float:
        """Return the factor of a matrix's product: the residual multiplier for the last matrix of a
        half, else 1."""
        return self._alphas.get((layer, key), 1.0)

    def accepts_addend(self, layer: int, key: str, out: Tensor) -> bool:
        """Return True if forward supports an addend for an output like `out`."""
        parts, features = self._parts.get((layer, key)), self._matrices[layer, key].shape[1]
        if parts is not None and parts.norms is not None:
            return False
        hidden, fast = parts and parts.hidden, FORWARD in self.operands.fast
        return accepts_addend(self.dev, out, self.operands.multiplied, features, hidden, fast=fast)

    def forward(
        self,
        ctx: LayerContext,
        key: str,
        out: Result | ProductOutput,
        x: Operand,
        addend: Tensor | None = None,
        *,
        epilogue: Epilogue = STORE,
    ) -> None:
        """Compute out (rows, out_features) = alpha * (x (rows, in_features) @ weight^T + adapters)
        + bias + addend. alpha: the residual multiplier for the last matrix of a half, else 1.
        addend: a tensor of the shape of out in other memory; must be None unless `accepts_addend`
        returns True. No product with adapters writes codes. In passes without backward, the number
        of rows may differ from a micro-step's."""
        w, bias, parts, adapters = ctx.w, ctx.w.bias(key), self._of(ctx, key), None
        with ExitStack() as outer:
            if parts is not None:
                (a, b), magnitudes, hidden = w.adapters(key), None, parts.hidden
                if (rows := tensor_of(x).shape[0]) != hidden.shape[0]:
                    shape = (rows, hidden.shape[1])
                    hidden = outer.enter_context(self.dev.scratch("hidden", shape, hidden.dtype))
                with ExitStack() as temps:
                    dropped = self.dropout.of(temps, tensor_of(x), parts.salt)
                    matmul(self.dev, hidden, dropped, a, trans_b=True)
                if parts.norms is not None:
                    self._measure(parts, key, w)
                    magnitudes, bias = Magnitudes(parts.norms, w.magnitudes(key), bias), None
                blocks = blocks_of(parts.times_alpha, b)
                adapters = Adapters(hidden, b, blocks, magnitudes=magnitudes)
            x, weight = self._pair(outer, FORWARD, ctx, key, x, w[key])
            product(
                self.dev, out, x, weight, trans_b=True, bias=bias, adapters=adapters,
                addend=addend, epilogue=epilogue, fast=FORWARD in self.operands.fast,
                alpha=self._alpha(ctx.layer.index, key),
            )  # fmt: skip

    def _pair(
        self, temps: ExitStack, which: str, ctx: LayerContext, key: str, a: Operand, b: Operand
    ) -> tuple[Operand, Operand]:
        of = ctx.layer.index, key
        return self.operands.pair(temps, which, a, b, self._matrices[of], self._numbers[of])

    def _of(self, ctx: LayerContext, key: str) -> _Parts | None:
        return self._parts.get((ctx.layer.index, key))

    def _measure(self, parts: _Parts, key: str, w: PartWeights) -> None:
        (a, b), matrix = w.adapters(key), parts.matrix
        adapter.norms(self.dev, parts.norms, w[key], a, b, matrix.spans, matrix.scales)

    def begin_magnitudes(self, layer: int, w: PartWeights) -> None:
        """Set the magnitudes (DoRA) of a layer's matrices to the norms of the matrices' rows."""
        for (of_layer, key), parts in self._parts.items():
            if of_layer == layer:
                self._measure(parts, key, w)
                self.dev.copy(w.magnitudes(key), parts.norms)

    def input_gradient(
        self,
        ctx: LayerContext,
        key: str,
        d_x: Result | ProductOutput | None,
        d_out: Operand,
        *,
        epilogue: Epilogue = STORE,
    ) -> None:
        """Compute d_x (rows, in_features) from d_out (rows, out_features), times forward's alpha,
        and the gradient of the adapters' B. d_x: None if no gradient of the input is wanted."""
        w, parts, adapters = ctx.w, self._of(ctx, key), None
        with ExitStack() as temps:
            if parts is not None:
                if parts.norms is not None:  # the gradient of the sum of both products
                    d_sum = temps.enter_context(self.dev.scratch("d_sum", d_out.shape, d_out.dtype))
                    adapter.scale(self.dev, d_sum, d_out, parts.norms, w.magnitudes(key))
                    d_out = d_sum
                (a, b), (_, d_b) = w.adapters(key), ctx.g.adapters(key)
                d_hidden, d_y = self._d_hidden_of(parts), tensor_of(d_out)
                matrix = parts.times_alpha
                output_gradients(self.dev, matrix, d_hidden, d_b, d_y, parts.hidden, b)
                adapters = Adapters(d_hidden, a, dropout=self.dropout.mask(parts.salt))
            if d_x is not None:
                d_out, weight = self._pair(temps, BACKWARD, ctx, key, d_out, w[key])
                product(
                    self.dev, d_x, d_out, weight, adapters=adapters, epilogue=epilogue,
                    fast=BACKWARD in self.operands.fast, alpha=self._alpha(ctx.layer.index, key),
                )  # fmt: skip

    def needs_input(self, ctx: LayerContext, key: str) -> bool:
        """Return True if weight_gradients needs the input x."""
        return key in ctx.g or self._of(ctx, key) is not None

    def weight_gradients(
        self, ctx: LayerContext, key: str, d_out: Operand, x: Operand | None, *, bias: bool = True
    ) -> None:
        """Compute the wanted gradients of the weight, the bias, and the adapters' A and magnitudes.
        Call input_gradient before this method; x may be None unless `needs_input` returns True.
        bias: False if other code computes the bias's gradient."""
        dev, g, parts = self.dev, ctx.g, self._of(ctx, key)
        if key in g:
            alpha = self._alpha(ctx.layer.index, key)
            with ExitStack() as temps:
                a, b = self._pair(temps, WEIGHT, ctx, key, d_out, x)
                weight_gradient(dev, g[key], a, b, fast=WEIGHT in self.operands.fast, alpha=alpha)
        d_bias = g.bias(key) if bias else None
        if d_bias is not None:
            reduce.bias_gradient(dev, d_bias, tensor_of(d_out))
        if parts is None:
            return
        d_a, _ = g.adapters(key)
        if d_a is not None:
            with ExitStack() as temps:
                dropped = self.dropout.of(temps, tensor_of(x), parts.salt)
                weight_gradient(dev, d_a, self._d_hidden_of(parts), dropped)
        if g.magnitudes(key) is not None:
            self._magnitude_gradient(ctx, key, d_out, x)

    def _magnitude_gradient(self, ctx: LayerContext, key: str, d_out: Tensor, x: Operand) -> None:
        """Compute the gradient of DoRA's magnitudes. The sum of both products is recomputed,
        because forward has overwritten the sum with a scaled or rotated copy, or added the sum to
        the stream."""
        dev, w, parts = self.dev, ctx.w, self._of(ctx, key)
        with ExitStack() as temps:
            x, weight = self._pair(temps, FORWARD, ctx, key, x, w[key])
            both = temps.enter_context(dev.scratch("sum", d_out.shape, d_out.dtype))
            tail = expanded(dev, temps, parts.times_alpha, w.adapters(key)[1])
            fast, alpha = FORWARD in self.operands.fast, self._alpha(ctx.layer.index, key)
            product(dev, both, x, weight, trans_b=True, fast=fast, alpha=alpha)
            matmul(dev, both, parts.hidden, tail, trans_b=True, accumulate=True)
            adapter.magnitude_gradient(dev, both, both, d_out, parts.norms)
            reduce.bias_gradient(dev, ctx.g.magnitudes(key), both)

    def _d_hidden_of(self, parts: _Parts) -> Tensor:
        return self._d_hidden.rows(0, parts.hidden.size).view(*parts.hidden.shape)
