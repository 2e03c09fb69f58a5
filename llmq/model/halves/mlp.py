"""An MLP in a transformer block, from the norm of the input to the addition to the residual stream.

    x -> up -> swiglu|geglu|gelu|relu2 -> down -> out

Dimensions: rows = B*T, C channels, F width; the up product of a gated MLP has 2F columns. The
activation function is the epilogue of the up product; its gradient is the epilogue of the down
product's input gradient (`ops/product/product.py`). The object `operands` makes an operand of
products from a tensor: fp8 codes and a scale, or the tensor. With --mlp-dtype e4m3, two products
also write fp8 codes: mlp_up, and the gradient of the activation's output.
"""

from contextlib import ExitStack
from typing import NamedTuple

from llmq.base.operand import (
    NOWHERE,
    Activated,
    ActivatedGradient,
    Operand,
    OutBuffers,
    ProductCodes,
    Result,
)
from llmq.base.tensor import Tensor
from llmq.formats.operands import Activation
from llmq.model.activations import HalfLayer, LayerContext, Recompute
from llmq.model.halves.half import ModelContext
from llmq.ops.product.product import activate


class _Saved(NamedTuple):
    """The tensors of one layer that backward reads. mlp_up: (rows, F), or in a gated MLP (rows,
    2F). mlp_act: (rows, F)."""

    mlp_up: Activation
    mlp_act: Activation


class MlpHalf:
    """The MLPs of all layers. Scratch lives as long as `temps`."""

    def __init__(self, shared: ModelContext):
        self.dev, self.operands, self.linear = shared.dev, shared.operands, shared.linear
        self.norms, self.activation = shared.norms, shared.config.activation

    def keeps_input(self, recompute: Recompute) -> bool:
        return not (recompute.norm or recompute.ffn)

    def multiplied_again(self, recompute: Recompute) -> tuple[str, ...]:
        return ("up",) if recompute.ffn else ()

    def keep(self, layer: HalfLayer) -> _Saved:
        up, down, r = layer.spec["up"], layer.spec["down"], layer.recompute
        dtype, kept = self.operands.result_dtype("mlp_up"), not r.swiglu and layer.needs(down.input)
        return _Saved(
            mlp_up=layer.activation("mlp_up", up.shape[0], kept=not r.ffn, dtype=dtype),
            mlp_act=layer.activation("mlp_act", down.shape[1], kept=kept, may_be_codes=True),
        )

    def forward(self, ctx: LayerContext, x: Operand) -> None:
        """Compute the MLP's output (rows, C) from x, its normed input (rows, C)."""
        operands, saved, (out, addend) = self.operands, ctx.layer.saved, ctx.layer.out
        up = saved.mlp_up  # (rows, 2F)
        up = operands.product_output(up.tensor_id, up.shape, up.tensor)
        act = operands.buffers(ctx.temps, saved.mlp_act)  # (rows, F)
        swiglu = Activated(name=self.activation, to=act)
        self.linear.forward(ctx, "up", up, x, epilogue=swiglu)
        act = operands.finalize(ctx.temps, act)
        self.linear.forward(ctx, "down", out, act, addend)

    def recompute(self, ctx: LayerContext) -> tuple[Operand | None, Result]:
        """Return x (rows, C), None if no gradient needs x; and mlp_up."""
        kept, again, x = ctx.layer.saved.mlp_up, ctx.layer.recompute.ffn, None
        up = self.operands.result_again(kept.tensor_id, kept.place(self.dev, ctx.temps))
        if again or self.linear.needs_input(ctx, "up"):
            x = self.norms.recompute(ctx, product=again)
        if again:  # with the same bits as forward's product and activation
            alone = Activated(name=self.activation, to=None)
            self.linear.forward(ctx, "up", up, x, epilogue=alone)
        if ctx.layer.made_again:
            with ExitStack() as temps:
                act = self.operands.buffers_again(temps, ctx.layer.saved.mlp_act, product=True)
                activate(self.dev, up, Activated(name=self.activation, to=act))
                act = self.operands.finalize(temps, act)
                self.linear.forward(ctx, "down", ctx.layer.out.out, act)
        return x, up

    def backward(
        self, ctx: LayerContext, inputs: tuple, d_out: Tensor, d_x: Tensor | None, *, inside: bool
    ) -> None:
        """d_out: gradient of the MLP's output (rows, C). d_x: receives the gradient of the input
        (rows, C). inputs: the result of recompute; mlp_up is overwritten unless it holds codes.
        inside: ignored."""
        (x, up), operands, saved = inputs, self.operands, ctx.layer.saved
        with ExitStack() as temps:
            d_up = self._up_gradient_buffers(temps, ctx, up)  # (rows, 2F)
            with ExitStack() as inner:
                d_down = operands.quantize(
                    inner, ctx.layer.out_id, d_out, measured=True, transposed=True
                )
                act, act_again = operands.kept(saved.mlp_act), NOWHERE  # (rows, F)
                if act is None and self.linear.needs_input(ctx, "down"):
                    act_again = operands.buffers_again(inner, saved.mlp_act, product=False)
                d_act = operands.product_output(ctx.layer.id_of("d_mlp_act"), saved.mlp_act.shape)
                swiglu = ActivatedGradient(name=self.activation, up=up, to=d_up, again=act_again)
                self.linear.input_gradient(ctx, "down", d_act, d_down, epilogue=swiglu)
                if act_again is not NOWHERE:
                    act = operands.finalize(inner, act_again)
                self.linear.weight_gradients(ctx, "down", d_down, act)
            d_up = operands.finalize(temps, d_up)
            self.linear.input_gradient(ctx, "up", d_x, d_up)
            self.linear.weight_gradients(ctx, "up", d_up, x)

    def _up_gradient_buffers(self, temps: ExitStack, ctx: LayerContext, up: Result) -> OutBuffers:
        """Return buffers for mlp_up's gradient: the memory of mlp_up, unless this memory holds
        codes and is too small."""
        saved, bias = ctx.layer.saved.mlp_up, ctx.g.bias("up") is not None
        out = up
        if isinstance(up, ProductCodes):
            scratch = self.dev.scratch("d_mlp_up", saved.shape, self.operands.dtype)
            out = temps.enter_context(scratch) if bias else None
        return self.operands.gradient_buffers(
            temps, ctx.layer.id_of("d_mlp_up"), saved.shape, out, bias=bias, of_product=True
        )
