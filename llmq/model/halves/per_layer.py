"""A vector for each layer and token, and its addition to the residual stream: Gemma 4's E2B and
E4B.

    inputs = norm(C^-1/2 * per_layer_in @ x) + P^1/2 * table[token]       x: the embedding
    x -> per_layer_gate -> gelu -> times the layer's inputs -> per_layer_out -> out

No norm precedes per_layer_gate. P: channels of a layer's vector. One tensor holds the vectors of
all layers; backward replaces a layer's columns by their gradient.
"""

from contextlib import ExitStack
from typing import NamedTuple

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import F32, DType
from llmq.base.operand import Operand
from llmq.base.tensor import Tensor
from llmq.formats.operands import Activation
from llmq.model.activations import HalfLayer, LayerContext, Recompute, scratch_like
from llmq.model.halves.half import ModelContext
from llmq.model.linear import Linear
from llmq.model.parameters import PartGrads, PartWeights
from llmq.ops.pointwise import embedding, gelu, norm
from llmq.ops.pointwise.elementwise import multiply
from llmq.ops.product.matmul import matmul
from llmq.runtime.device import Device


class PerLayerInputs:
    """The vectors that all layers add to the stream. inputs: (rows, L*P). rstd: F32 (rows*L,),
    statistics of the vectors' norm."""

    BLOCKS = ("per_layer_table", "per_layer")

    def __init__(self, dev: Device, config: ModelConfig, rows: int, dtype: DType):
        self.dev, self.config, self.eps = dev, config, config.norm_eps
        L, self.P = config.num_layers, config.per_layer_size
        self.inputs = dev.alloc("per_layer_inputs", (rows, L * self.P), dtype, "Activations")
        self.rstd = dev.alloc("per_layer_rstd", (rows * L,), F32, "Activations")
        self.linear = Linear(dev, alpha=config.hidden_size**-0.5)

    def _by_layer(self, tensor: Tensor) -> Tensor:
        """Return a view of (rows, L*P) as (rows*L, P), for L layers."""
        return tensor.view(tensor.size // self.P, self.P)

    def _by_token(self, tokens: Tensor) -> Tensor:
        return self.inputs.view(*tokens.shape, self.inputs.shape[1])

    def forward(self, x: Tensor, tokens: Tensor, w: PartWeights) -> None:
        """Compute inputs from x (rows, C), the embeddings of tokens (B, T)."""
        dev, scale, (weight, eps) = self.dev, self.P**0.5, (w["per_layer_norm"], self.eps)
        out, table = self._by_token(tokens), w["per_layer_table"]
        embedding.forward(dev, out, tokens, table, None, scale=scale)
        with dev.scratch("per_layer_product", self.inputs.shape, x.dtype) as product:
            self.linear.forward(product, x, w["per_layer_in"])
            to, product = self._by_layer(self.inputs), self._by_layer(product)
            norm.post(dev, to, self.rstd, product, to, weight, eps)

    def backward(
        self, d_x: Tensor, x: Tensor, tokens: Tensor, w: PartWeights, g: PartGrads
    ) -> None:
        """Add the gradient of x to d_x (rows, C), and compute the weights' gradients. At this point
        `inputs` holds its gradient."""
        dev, table, shape = self.dev, g.get("per_layer_table"), self.inputs.shape
        if table is not None:
            if not table.accumulate:
                dev.zero(table.tensor)  # for the rows of tokens that do not occur in the batch
            of_rows = (table._replace(accumulate=True), self._by_token(tokens), tokens)
            padding, vocab = self.config.padding_row, self.config.padded_vocab
            embedding.backward(dev, *of_rows, self.P**0.5, padding, 0, vocab)
        with (
            dev.scratch("per_layer_product", shape, x.dtype) as product,
            dev.scratch("d_per_layer_product", shape, x.dtype) as d_product,
        ):
            self.linear.forward(product, x, w["per_layer_in"])
            norm.backward(
                dev, self._by_layer(d_product), g.get("per_layer_norm"), None,
                self._by_layer(self.inputs), self._by_layer(product), w["per_layer_norm"], None,
                self.rstd, None,
            )  # fmt: skip
            alpha = self.linear.alpha
            matmul(dev, d_x, d_product, w["per_layer_in"], accumulate=True, alpha=alpha)
            self.linear.weight_gradients(g.get("per_layer_in"), None, d_product, x)


class _Saved(NamedTuple):
    """The tensors of one layer that forward keeps. gate: (rows, P), before GELU. act: (rows, P),
    never kept."""

    gate: Activation
    act: Activation


class PerLayerHalf:
    """The computations that add the vectors, in all layers. Scratch lives as long as `temps`."""

    def __init__(self, shared: ModelContext):
        self.dev, self.operands, self.linear = shared.dev, shared.operands, shared.linear
        self.norms, self.inputs = shared.norms, shared.layer_inputs
        self.P = shared.config.per_layer_size

    def keeps_input(self, recompute: Recompute) -> bool:
        return not (recompute.norm or recompute.ffn)

    def multiplied_again(self, recompute: Recompute) -> tuple[str, ...]:
        return ("per_layer_gate",) if recompute.ffn else ()

    def keep(self, layer: HalfLayer) -> _Saved:
        return _Saved(
            gate=layer.activation("per_layer_gate", self.P, kept=not layer.recompute.ffn),
            act=layer.activation("per_layer_act", self.P, kept=False),
        )

    def forward(self, ctx: LayerContext, x: Operand) -> None:
        dev, saved, (out, addend) = self.dev, ctx.layer.saved, ctx.layer.out
        gate, act = (each.place(dev, ctx.temps) for each in saved)
        self.linear.forward(ctx, "per_layer_gate", gate, x)
        gelu.forward(dev, act, gate)
        self._times_inputs(ctx, act, act)
        name = saved.act.tensor_id
        x = self.operands.quantize(ctx.temps, name, act, measured=False, transposed=False)
        self.linear.forward(ctx, "per_layer_out", out, x, addend)

    def _times_inputs(self, ctx: LayerContext, out: Tensor, x: Tensor) -> None:
        at = (0, 0, ctx.layer.index * self.P)
        multiply(self.dev, out, x, self.inputs, self.P, at)

    def recompute(self, ctx: LayerContext) -> tuple[Operand | None, Tensor]:
        """Return x (rows, C), None if no gradient needs x; and gate (rows, P)."""
        gate, again, x = ctx.layer.saved.gate, ctx.layer.recompute.ffn, None
        gate = gate.place(self.dev, ctx.temps)
        if again or self.linear.needs_input(ctx, "per_layer_gate"):
            x = self.norms.recompute(ctx, product=again)
        if again:
            self.linear.forward(ctx, "per_layer_gate", gate, x)
        return x, gate

    def backward(
        self, ctx: LayerContext, inputs: tuple, d_out: Tensor, d_x: Tensor | None, *, inside: bool
    ) -> None:
        """Compute gradients as Half.backward does, and overwrite the layer's columns of the inputs
        with their gradient."""
        dev, layer, operands, (x, gate) = self.dev, ctx.layer, self.operands, inputs
        with ExitStack() as temps:
            act, d_gate = (scratch_like(dev, temps, f"per_layer_{n}", gate) for n in ("act", "d"))
            with ExitStack() as inner:
                gelu.forward(dev, act, gate)
                d_act, o_input = scratch_like(dev, inner, "d_per_layer_act", gate), None
                if self.linear.needs_input(ctx, "per_layer_out"):
                    self._times_inputs(ctx, d_gate, act)
                    name = layer.saved.act.tensor_id
                    o_input = operands.quantize_again(inner, name, d_gate, product=False)
                d_o = operands.quantize(inner, layer.out_id, d_out, measured=True, transposed=True)
                self.linear.input_gradient(ctx, "per_layer_out", d_act, d_o)
                self.linear.weight_gradients(ctx, "per_layer_out", d_o, o_input)
                self._times_inputs(ctx, d_gate, d_act)
                multiply(dev, self.inputs, d_act, act, self.P, (layer.index * self.P, 0, 0))
            gelu.backward(dev, d_gate, d_gate, gate)
            name = layer.id_of("d_per_layer_gate")
            d_gate = operands.quantize(temps, name, d_gate, measured=False, transposed=True)
            self.linear.input_gradient(ctx, "per_layer_gate", d_x, d_gate)
            self.linear.weight_gradients(ctx, "per_layer_gate", d_gate, x)
