"""An MLP as a half of a block, between its norm and the residual stream.

    x -> up -> swiglu|geglu|gelu -> down -> out

Where `BlockLinear.activates`, a product and the activation behind it are one operation.
`operands` turns a tensor into what products take: with fp8 codes and a scale, without it itself.
With --mlp-dtype e4m3 it also turns the memory of what products write for the activation into fp8
codes and a scale: mlp_up, and the gradient of the activation's output.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from llmq.arch.matrix import HalfSpec
from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import E4M3, DType, parse_dtype
from llmq.base.operand import Activated, ActivatedGradient, Operand, ProductCodes, Target
from llmq.base.tensor import Tensor
from llmq.model.activations import Activation, HalfLayer, Recompute
from llmq.model.halves.half import Shared
from llmq.model.linear import Linear
from llmq.model.operands import InputAgain, Result
from llmq.model.parameters import BlockGrads, BlockWeights
from llmq.ops import gelu, swiglu
from llmq.runtime.device import Device

NOWHERE = Target(None)


def activation(config: ModelConfig) -> tuple[Callable[..., None], Callable[..., None]]:
    """The calls of the model's activation: forward, backward."""
    if not config.gated:
        return gelu.forward, gelu.backward
    geglu = config.activation == "geglu"
    return partial(swiglu.forward, gelu=geglu), partial(swiglu.backward, gelu=geglu)


class _Kept(NamedTuple):
    """Of one layer. mlp_up: (rows, F), or of a gated MLP (rows, 2F). mlp_act: (rows, F)."""

    mlp_up: Activation
    mlp_act: Activation


class MlpAgain(NamedTuple):
    """What backward needs. x: (rows, C), None where no gradient needs it. mlp_up: (rows, F), or of
    a gated MLP (rows, 2F)."""

    x: Operand | None
    mlp_up: Result


class MlpHalf:
    """The MLP halves of all layers. Scratch lives as long as `temps`."""

    def __init__(self, shared: Shared):
        config, options = shared.config, shared.options
        self.dev, self.operands, self.linear = shared.dev, shared.operands, shared.linear
        self.activate, self.activate_backward = activation(config)
        self.gelu = config.activation == "geglu"
        self._coded = options.mlp_dtype == "e4m3"
        gradient = options.gradient_dtype
        self._gradient_dtype = parse_dtype(gradient) if self._coded else self.operands.dtype

    def keeps_input(self, recompute: Recompute) -> bool:
        """Whether the half's input may be kept for backward."""
        return not (recompute.norm or recompute.ffn)

    def multiplied_again(self, recompute: Recompute) -> tuple[str, ...]:
        """Keys of the matrices whose products backward computes again."""
        return ("up",) if recompute.ffn else ()

    def keep(self, here: HalfLayer) -> _Kept:
        """What a layer keeps."""
        up, down, r = here.spec["up"], here.spec["down"], here.recompute
        coded, kept = E4M3 if self._coded else None, not r.swiglu and here.needs(down.input)
        return _Kept(
            mlp_up=here.activation("mlp_up", up.shape[0], kept=not r.ffn, dtype=coded),
            mlp_act=here.activation("mlp_act", down.shape[1], kept=kept, may_be_codes=True),
        )

    def forward(self, temps: ExitStack, here: HalfLayer, w: BlockWeights, x: Operand) -> None:
        """here.out from x (rows, C)."""

        def write(to: Target) -> None:
            # Without scales, codes are made twice, and what reads them has to wait.
            known = self.operands.scales.ready or not self._coded
            if known and self.linear.activates(here.index, "up", x, w):

                def activate(mlp_up: Result | None) -> None:
                    out = Activated(mlp_up, to, self.gelu)
                    self.linear.forward(here.index, "up", out, x, w)

                self.operands.result(here.kept.mlp_up.slot, here.kept.mlp_up.tensor, activate)
                return
            with ExitStack() as inner:
                place = here.kept.mlp_up.place(self.dev, inner)
                multiply = partial(self.linear.forward, here.index, "up", x=x, w=w)
                mlp_up = self.operands.result(here.kept.mlp_up.slot, place, multiply)
                self.activate(self.dev, to.out, mlp_up, abs_max=to.abs_max, fp8=to.fp8)

        mlp_act = self.operands.input(temps, here.kept.mlp_act, write)
        out, addend = here.out
        self.linear.forward(here.index, "down", out, mlp_act, w, addend)

    def again(
        self, temps: ExitStack, here: HalfLayer, w: BlockWeights, g: BlockGrads, x_again: InputAgain
    ) -> MlpAgain:
        """What backward needs: kept, or computed again."""
        computed = here.recompute.ffn
        place = here.kept.mlp_up.place(self.dev, temps)
        mlp_up = self.operands.result_again(here.kept.mlp_up.slot, place)
        x = None
        if computed or self.linear.needs_input(here.index, "up", g):
            x = x_again(product=computed)
        if computed:
            self.linear.forward(here.index, "up", mlp_up, x, w)
        return MlpAgain(x, mlp_up)

    def backward(
        self,
        here: HalfLayer,
        w: BlockWeights,
        g: BlockGrads,
        again: MlpAgain,
        d_out: Tensor,
        d_x: Tensor | None,
        *,
        inside: bool,
    ) -> None:
        """As `Half.backward`, which leaves nothing out; overwrites mlp_up, but for codes."""
        mlp_up = again.mlp_up

        def write(to: Target) -> None:
            self._backward_down(here, w, g, mlp_up, d_out, to)

        with ExitStack() as temps:
            slot, bias = here.slot("d_mlp_up"), g.bias("up") is not None
            out, shape = mlp_up, here.kept.mlp_up.shape
            if isinstance(mlp_up, ProductCodes):  # their memory is too small
                scratch = self.dev.scratch("d_mlp_up", shape, self.operands.dtype)
                out = temps.enter_context(scratch) if bias else None
            gradient = self.operands.gradient
            d_mlp_up = gradient(temps, slot, write, shape=shape, out=out, bias=bias)
            self.linear.input_gradient(here.index, "up", d_x, d_mlp_up, w, g)
            self.linear.weight_gradients(here.index, "up", g, g.bias("up"), d_mlp_up, again.x)

    def _backward_down(
        self,
        here: HalfLayer,
        w: BlockWeights,
        g: BlockGrads,
        mlp_up: Result,
        d_out: Tensor,
        to: Target,
    ) -> None:
        """The down product and the activation: `to` is the gradient of mlp_up (may be mlp_up)."""
        with ExitStack() as temps:
            d_down = self.operands.half_gradient(temps, here.out_slot, d_out)

            def write(act: Target) -> None:
                self._d_mlp_up(here, w, g, mlp_up, d_down, to, act)

            mlp_act = self.operands.kept(here.kept.mlp_act)
            if mlp_act is None and self.linear.needs_input(here.index, "down", g):
                mlp_act = self.operands.input_again(temps, here.kept.mlp_act, write, product=False)
            else:
                write(NOWHERE)
            self.linear.weight_gradients(here.index, "down", g, g.bias("down"), d_down, mlp_act)

    def _d_mlp_up(
        self,
        here: HalfLayer,
        w: BlockWeights,
        g: BlockGrads,
        mlp_up: Result,
        d_down: Operand,
        to: Target,
        act: Target,
    ) -> None:
        """`to` from d_down; and the activation once more, where `act` wants it."""
        # With the activation's codes in it as well, one kernel takes longer than two.
        if act.fp8 is None and self.linear.activates(here.index, "down", d_down, w, backward=True):
            d_x = ActivatedGradient(mlp_up, to, act.out, self.gelu)
            self.linear.input_gradient(here.index, "down", d_x, d_down, w, g)
            return
        multiply = partial(self.linear.input_gradient, here.index, "down", d_out=d_down, w=w, g=g)
        with ExitStack() as temps:
            place = act.out  # may go where its gradient is, which is not needed again
            if place is None:
                scratch = self.dev.scratch(
                    "d_mlp_act", here.kept.mlp_act.shape, self._gradient_dtype
                )
                place = temps.enter_context(scratch)
            d_mlp_act = self.operands.result(here.slot("d_mlp_act"), place, multiply)
            backward = partial(
                self.activate_backward, self.dev, to.out, d_mlp_act, mlp_up,
                abs_max=to.abs_max, fp8=to.fp8, out=act.out, out_fp8=act.fp8,
            )  # fmt: skip
            self.operands.written(here.slot("d_mlp_up"), backward)


class MlpDecoder:
    """The MLP halves of all layers, of one sequence."""

    def __init__(
        self, dev: Device, config: ModelConfig, linear: Linear, dtype: DType, positions: int
    ):
        """positions: of no use here, where no token sees another."""
        self.dev, self.linear, self.dtype = dev, linear, dtype
        self.activate, _ = activation(config)

    def forward(
        self,
        layer: int,
        spec: HalfSpec,
        w: BlockWeights,
        out: Tensor,
        x: Tensor,
        position: int,
    ) -> None:
        """out (n, C) from x (n, C)."""
        n, dev = x.shape[0], self.dev
        with (
            dev.scratch("mlp_up", (n, spec["up"].shape[0]), self.dtype) as mlp_up,
            dev.scratch("mlp_act", (n, spec["down"].shape[1]), self.dtype) as mlp_act,
        ):
            self.linear.forward(mlp_up, x, w["up"], w.bias("up"))
            self.activate(dev, mlp_act, mlp_up)
            self.linear.forward(out, mlp_act, w["down"], w.bias("down"))
