"""A gated short convolution in a transformer block, from the norm of the input to the addition to
the residual stream.

    x -> conv_in -> b, c, x -> b * x -> convolution -> times c -> conv_o -> out

A row of conv_in's product is (b, c, x). Backward recomputes all tensors except this product. The
object `operands` makes an operand of products from a tensor: fp8 codes and a scale, or the tensor.
"""

from contextlib import ExitStack
from typing import NamedTuple

from llmq.base.operand import Operand
from llmq.base.tensor import Tensor
from llmq.formats.operands import Activation
from llmq.model.activations import HalfLayer, LayerContext, Recompute, scratch_like
from llmq.model.halves.half import ModelContext
from llmq.ops.delta import short_conv
from llmq.ops.pointwise.elementwise import multiply


class _Saved(NamedTuple):
    """The tensors of one layer that backward reads. conv_in: (rows, 3C), output of the product with
    conv_in. conv_gated: (rows, C), the convolution's output times c, never kept."""

    conv_in: Activation
    conv_gated: Activation


class ShortConvHalf:
    """The short convolutions of all layers. Scratch lives as long as `temps`."""

    def __init__(self, shared: ModelContext):
        batch = shared.options.batch
        self.dev, self.operands, self.linear = shared.dev, shared.operands, shared.linear
        self.norms, self.C = shared.norms, shared.config.hidden_size
        self.B, self.T = batch.batch_size, batch.local_seq_len
        self.starts = shared.inputs.first_key

    def keeps_input(self, recompute: Recompute) -> bool:
        return not (recompute.norm or recompute.qkv)

    def multiplied_again(self, recompute: Recompute) -> tuple[str, ...]:
        keys = {"conv_in": recompute.qkv, "conv_o": recompute.block}
        return tuple(key for key, again in keys.items() if again)

    def keep(self, layer: HalfLayer) -> _Saved:
        return _Saved(
            conv_in=layer.activation("conv_in", 3 * self.C, kept=not layer.recompute.qkv),
            conv_gated=layer.activation("conv_gated", self.C, kept=False),
        )

    def _by_token(self, tensor: Tensor) -> Tensor:
        """Return a view of (rows, n) as (B, T, n)."""
        return tensor.view(self.B, self.T, tensor.shape[1])

    # -- forward ---------------------------------------------------------------------------------

    def forward(self, ctx: LayerContext, x: Operand) -> None:
        conv_in = ctx.layer.saved.conv_in.place(self.dev, ctx.temps)
        self.linear.forward(ctx, "conv_in", conv_in, x)
        gated, _ = self._gated(ctx, ctx.temps, conv_in)
        name, (out, addend) = ctx.layer.saved.conv_gated.tensor_id, ctx.layer.out
        x = self.operands.quantize(ctx.temps, name, gated, measured=False, transposed=False)
        self.linear.forward(ctx, "conv_o", out, x, addend)

    def _gated(self, ctx: LayerContext, temps: ExitStack, conv_in: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output product's input, and the convolution's output, (rows, C) each."""
        C, starts, before = self.C, self.starts, None
        if ctx.layer.cache is not None:  # the state is 0 at the beginning of a text
            starts, before = None, ctx.layer.cache["before"]
        gated = ctx.layer.saved.conv_gated.place(self.dev, ctx.temps)
        conv = scratch_like(self.dev, temps, "conv", gated)
        multiply(self.dev, gated, conv_in, conv_in, C, (0, 0, 2 * C))
        out, x = self._by_token(conv), self._by_token(gated)
        short_conv.forward(self.dev, out, x, ctx.w["conv"], starts, before, silu=False)
        multiply(self.dev, gated, conv, conv_in, C, (0, 0, C))
        return gated, conv

    # -- backward --------------------------------------------------------------------------------

    def recompute(self, ctx: LayerContext) -> tuple[Operand | None, Tensor, Tensor, Operand | None]:
        """Return x (rows, C), conv_in, the convolution's output, and conv_gated as the output
        product's operand. x and the operand are None if no gradient needs either."""
        r, x, o_input = ctx.layer.recompute, None, None
        conv_in = ctx.layer.saved.conv_in.place(self.dev, ctx.temps)
        if r.qkv or self.linear.needs_input(ctx, "conv_in"):
            x = self.norms.recompute(ctx, product=r.qkv)
        if r.qkv:
            self.linear.forward(ctx, "conv_in", conv_in, x)
        gated, conv = self._gated(ctx, ctx.temps, conv_in)
        if r.block or self.linear.needs_input(ctx, "conv_o"):
            name = ctx.layer.saved.conv_gated.tensor_id
            o_input = self.operands.quantize_again(ctx.temps, name, gated, product=r.block)
        if r.block:
            out, addend = ctx.layer.out
            self.linear.forward(ctx, "conv_o", out, o_input, addend)
        return x, conv_in, conv, o_input

    def backward(
        self, ctx: LayerContext, inputs: tuple, d_out: Tensor, d_x: Tensor | None, *, inside: bool
    ) -> None:
        dev, C, (x, conv_in, conv, o_input) = self.dev, self.C, inputs
        with ExitStack() as temps:
            d_in = d_gated = None
            if inside:
                d_in = scratch_like(dev, temps, "d_conv_in", conv_in)
                d_gated = scratch_like(dev, temps, "d_conv_gated", conv)
            with ExitStack() as of_output:
                d_o = self.operands.quantize(
                    of_output, ctx.layer.out_id, d_out, measured=True, transposed=True
                )
                self.linear.input_gradient(ctx, "conv_o", d_gated, d_o)
                self.linear.weight_gradients(ctx, "conv_o", d_o, o_input)
            if not inside:
                return
            multiply(dev, d_in, d_gated, conv, C, (C, 0, 0))
            multiply(dev, d_gated, d_gated, conv_in, C, (0, 0, C))
            with ExitStack() as inner:
                product = scratch_like(dev, inner, "conv_product", conv)
                d_product = scratch_like(dev, inner, "d_conv_product", conv)
                multiply(dev, product, conv_in, conv_in, C, (0, 0, 2 * C))
                short_conv.backward(
                    dev, self._by_token(d_product), ctx.g.get("conv"), self._by_token(d_gated),
                    self._by_token(product), ctx.w["conv"], self.starts, silu=False,
                )  # fmt: skip
                multiply(dev, d_in, d_product, conv_in, C, (0, 0, 2 * C))
                multiply(dev, d_in, d_product, conv_in, C, (2 * C, 0, 0))
            name = ctx.layer.id_of("d_conv_in")
            d_all = self.operands.quantize(temps, name, d_in, measured=False, transposed=True)
            self.linear.input_gradient(ctx, "conv_in", d_x, d_all)
            self.linear.weight_gradients(ctx, "conv_in", d_all, x)
