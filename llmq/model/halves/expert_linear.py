"""Products of experts' matrices, with an adapter for each expert.

    h = x @ A^T                    y = x @ W^T + h @ (scale * B)^T
    d_h = d_y @ (scale * B)        d_x = d_y @ W + d_h @ A
    d_B = scale * d_y^T @ h        d_A = d_h^T @ x

If a matrix has two parts, up and gate, A has the rows of both parts' A, and B has separate columns
for each part (`ops/product/adapter.py`). Backward recomputes h, which is a small product.
"""

from contextlib import ExitStack
from math import prod

from llmq.base.operand import Operand, tensor_of
from llmq.base.tensor import Tensor
from llmq.formats.operands import BACKWARD, FORWARD
from llmq.model.activations import LayerContext
from llmq.model.halves.half import ModelContext
from llmq.model.parameters import PartWeights
from llmq.ops.experts.expert_rows import sum_rows
from llmq.ops.pointwise import reduce
from llmq.ops.product import adapter
from llmq.ops.product.product import grouped_gradient, grouped_product
from llmq.options.adapters import Adapted, adapted_in_layers, adapters_of


class ExpertLinear:
    """The products of all layers' experts. A method finds a matrix by its key. x, y: R rows sorted
    by expert, as `ctx.layer.saved.starts` says."""

    def __init__(self, shared: ModelContext, rows: int):
        """rows: R, the number of pairs of token and expert."""
        self.dev, adapters = shared.dev, adapters_of(shared.options.model)
        self.fast = shared.operands.fast
        every = adapted_in_layers(shared.config, adapters) if adapters is not None else ()
        self._adapted = {(layer, m.key): m for layer, m in every if m.groups > 1}
        widest = max((m.rank * _parts_of(m) for m in self._adapted.values()), default=0)
        if widest:  # all matrices share this memory
            dtype = shared.operands.dtype
            self._d_hidden = self.dev.alloc(
                "d_expert_hidden", (rows * widest,), dtype, "Activations"
            )

    def forward(self, ctx: LayerContext, key: str, y: Tensor, x: Operand) -> None:
        """Compute y (R, out) from x (R, in), and add the bias if there is one."""
        w, starts, adapters = ctx.w, ctx.layer.saved.starts, None
        a, b = w.adapters(key)
        with ExitStack() as temps:
            if a is not None:
                x_rows, experts = tensor_of(x), _by_expert(a, starts)
                h = self._hidden_memory(temps, x_rows, experts)
                grouped_product(self.dev, h, x_rows, experts, starts, trans_b=True)
                adapters = h, self._expanded(temps, ctx, key, b)
            grouped_product(
                self.dev, y, x, w[key], starts, trans_b=True, adapters=adapters,
                bias=biases_of(w, key, starts.size - 1), fast=FORWARD in self.fast,
            )  # fmt: skip

    def input_gradient(self, ctx: LayerContext, key: str, d_x: Tensor | None, d_y: Operand) -> None:
        """Compute d_x (R, in) from d_y (R, out), unless d_x is None."""
        (a, b), starts, adapters = ctx.w.adapters(key), ctx.layer.saved.starts, None
        if a is not None:
            d_h = self._d_hidden_of(ctx, key, tensor_of(d_y))
            with ExitStack() as temps:
                whole = self._expanded(temps, ctx, key, b)
                grouped_product(self.dev, d_h, tensor_of(d_y), whole, starts)
            adapters = d_h, _by_expert(a, starts)
        if d_x is not None:
            grouped_product(
                self.dev, d_x, d_y, ctx.w[key], starts, adapters=adapters,
                fast=BACKWARD in self.fast,
            )  # fmt: skip

    def trains(self, ctx: LayerContext, key: str) -> bool:
        """Return True if weight_gradients needs x and d_y as tensors."""
        return key in ctx.g or ctx.g.adapters(key)[0] is not None

    def weight_gradients(self, ctx: LayerContext, key: str, d_y: Tensor, x: Tensor) -> None:
        """Compute the wanted gradients of the matrix and of its adapters; call input_gradient
        before this method. The experts' weights may multiply x or d_y."""
        g, starts = ctx.g, ctx.layer.saved.starts
        if key in g:
            grouped_gradient(self.dev, g[key], d_y, x, starts)
        d_a, d_b = g.adapters(key)
        if d_a is not None:
            a, _ = ctx.w.adapters(key)
            of_experts = d_a._replace(tensor=_by_expert(d_a.tensor, starts))
            d_h = self._d_hidden_of(ctx, key, d_y)
            grouped_gradient(self.dev, of_experts, d_h, x, starts)
            dtype, experts = d_b.tensor.dtype, _by_expert(a, starts)
            with ExitStack() as temps:
                h = self._hidden_memory(temps, x, experts)
                grouped_product(self.dev, h, x, experts, starts, trans_b=True)
                scratch = self.dev.scratch("d_b_whole", self._shape_of_b(ctx, key), dtype)
                whole = temps.enter_context(scratch)
                part = temps.enter_context(self.dev.scratch("d_b", d_b.tensor.shape, dtype))
                target = d_b._replace(tensor=whole, accumulate=False)
                grouped_gradient(self.dev, target, d_y, h, starts)
                blocks = self._blocks(ctx, key)
                adapter.collect(self.dev, part, _below_each_other(whole), *blocks)
                reduce.sum_parts(self.dev, d_b, [part])

    def bias_gradients(self, ctx: LayerContext, key: str, d_y: Tensor, *weighed: Tensor) -> None:
        """Compute the wanted gradients of biases. weighed: weights and order of the rows; empty if
        d_y is already multiplied by the weights."""
        d, starts = ctx.g.bias(key), ctx.layer.saved.starts
        if d is not None:
            d = d._replace(tensor=d.tensor.view(starts.size - 1, d_y.shape[1]))
            sum_rows(self.dev, d, d_y, starts, *weighed)

    def _d_hidden_of(self, ctx: LayerContext, key: str, d_y: Tensor) -> Tensor:
        shape = (d_y.shape[0], self._shape_of_b(ctx, key)[-1])
        return self._d_hidden.rows(0, prod(shape)).view(*shape)

    def _hidden_memory(self, temps: ExitStack, x: Tensor, experts: Tensor) -> Tensor:
        """Return scratch for h (R, n * rank), if each expert's matrix has n parts. experts: the A
        of all experts, (E, n * rank, in)."""
        shape = (x.shape[0], experts.shape[1])
        return temps.enter_context(self.dev.scratch("expert_hidden", shape, x.dtype))

    def _expanded(self, temps: ExitStack, ctx: LayerContext, key: str, b: Tensor) -> Tensor:
        """Return the B of all experts, (E, out, n * rank), times their scaling, as scratch of
        `temps`."""
        shape = self._shape_of_b(ctx, key)
        whole = temps.enter_context(self.dev.scratch("expert_lora_b", shape, b.dtype))
        adapter.expand(self.dev, _below_each_other(whole), b, *self._blocks(ctx, key))
        return whole

    def _shape_of_b(self, ctx: LayerContext, key: str) -> tuple[int, int, int]:
        matrix = self._adapted[ctx.layer.index, key]
        return matrix.groups, matrix.shape[0] // matrix.groups, _parts_of(matrix) * matrix.rank

    def _blocks(self, ctx: LayerContext, key: str) -> tuple:
        """Return the spans, scales and groups that functions of `adapter` take."""
        matrix = self._adapted[ctx.layer.index, key]
        n = _parts_of(matrix)
        return matrix.spans[:n], matrix.scales[:n], matrix.groups


def biases_of(w: PartWeights, key: str, count: int) -> Tensor | None:
    """Return the biases (E, out) of `count` experts; None without biases."""
    bias = w.bias(key)
    return bias and bias.view(count, bias.size // count)


def _parts_of(matrix: Adapted) -> int:
    return len(matrix.parts) // matrix.groups


def _by_expert(a: Tensor, starts: Tensor) -> Tensor:
    """Return the A of all experts, (E, n * rank, in)."""
    E = starts.size - 1
    return a.view(E, a.shape[0] // E, a.shape[1])


def _below_each_other(whole: Tensor) -> Tensor:
    return whole.view(whole.shape[0] * whole.shape[1], whole.shape[2])
