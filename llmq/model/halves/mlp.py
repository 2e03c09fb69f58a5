"""An MLP as a half of a block, between its norm and the residual stream.

    x -> up -> swiglu|geglu|gelu -> down -> out

The activation is the epilogue of the up product, and its gradient that of the down product's input
gradient (`ops/product.py`). `operands` turns a tensor into what products take: with fp8 codes and a
scale, without it itself. With --mlp-dtype e4m3 it also turns the memory of what products write for
the activation into fp8 codes and a scale: mlp_up, and the gradient of the activation's output.
"""

from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from llmq.base.operand import (
    Activated,
    ActivatedGradient,
    Handed,
    Operand,
    OutputForms,
    ProductCodes,
    Result,
)
from llmq.base.tensor import Tensor
from llmq.formats.format import Activation, InputAgain
from llmq.model.activations import Frame, HalfLayer, Recompute
from llmq.model.halves.half import Shared

NOWHERE = OutputForms(None)


class _Kept(NamedTuple):
    """The tensors kept of one layer. mlp_up: (rows, F), or of a gated MLP (rows, 2F). mlp_act:
    (rows, F)."""

    mlp_up: Activation
    mlp_act: Activation


class MlpHalf:
    """The MLP halves of all layers. Scratch lives as long as `temps`."""

    def __init__(self, shared: Shared):
        self.dev, self.operands, self.linear = shared.dev, shared.operands, shared.linear
        self.activation = shared.config.activation

    def keeps_input(self, recompute: Recompute) -> bool:
        return not (recompute.norm or recompute.ffn)

    def multiplied_again(self, recompute: Recompute) -> tuple[str, ...]:
        return ("up",) if recompute.ffn else ()

    def keep(self, here: HalfLayer) -> _Kept:
        up, down, r = here.spec["up"], here.spec["down"], here.recompute
        dtype, kept = self.operands.result_dtype("mlp_up"), not r.swiglu and here.needs(down.input)
        return _Kept(
            mlp_up=here.activation("mlp_up", up.shape[0], kept=not r.ffn, dtype=dtype),
            mlp_act=here.activation("mlp_act", down.shape[1], kept=kept, may_be_codes=True),
        )

    def forward(self, at: Frame, x: Operand) -> None:
        mlp_up = at.here.kept.mlp_up
        handed = Handed(
            place=partial(mlp_up.place, self.dev),
            kept=mlp_up.tensor,
            result=partial(self.operands.result, mlp_up.tensor_id),
            coded=self.operands.writes_codes,
        )

        def write(to: OutputForms) -> None:
            epilogue = Activated(name=self.activation, to=to)
            self.linear.forward(at, "up", handed, x, epilogue=epilogue)

        mlp_act = self.operands.input(at.temps, at.here.kept.mlp_act, write)
        out, addend = at.here.out
        self.linear.forward(at, "down", out, mlp_act, addend)

    def recompute(self, at: Frame, x_again: InputAgain) -> tuple[Operand | None, Result]:
        """x (rows, C), None where no gradient needs it, and mlp_up."""
        kept, computed, x = at.here.kept.mlp_up, at.here.recompute.ffn, None
        mlp_up = self.operands.result_again(kept.tensor_id, kept.place(self.dev, at.temps))
        if computed or self.linear.needs_input(at, "up"):
            x = x_again(product=computed)
        if computed:
            epilogue = Activated(name=self.activation, to=None)  # the bits of the first time
            self.linear.forward(at, "up", mlp_up, x, epilogue=epilogue)
        return x, mlp_up

    def backward(
        self, at: Frame, inputs: tuple, d_out: Tensor, d_x: Tensor | None, *, inside: bool
    ) -> None:
        """Leaves nothing out; overwrites mlp_up, but for codes."""
        (x, mlp_up), here = inputs, at.here
        write = partial(self._backward_down, at, mlp_up, d_out)
        with ExitStack() as temps:
            bias, out, shape = at.g.bias("up") is not None, mlp_up, here.kept.mlp_up.shape
            if isinstance(mlp_up, ProductCodes):  # their memory is too small
                scratch = self.dev.scratch("d_mlp_up", shape, self.operands.dtype)
                out = temps.enter_context(scratch) if bias else None
            how = {"shape": shape, "out": out, "bias": bias, "settles": True}
            d_mlp_up = self.operands.gradient(temps, here.id_of("d_mlp_up"), write, **how)
            self.linear.input_gradient(at, "up", d_x, d_mlp_up)
            self.linear.weight_gradients(at, "up", d_mlp_up, x)

    def _backward_down(self, at: Frame, mlp_up: Result, d_out: Tensor, to: OutputForms) -> None:
        """The down product and the activation: `to` is the gradient of mlp_up (may be mlp_up). The
        activation is made once more where the down product's weight needs it."""
        here, operands = at.here, self.operands
        with ExitStack() as temps:
            how = {"measured": True, "transposed": True}
            d_down = operands.of_tensor(temps, here.out_id, d_out, **how)

            def place(inner: ExitStack) -> Tensor:
                shape, dtype = here.kept.mlp_act.shape, operands.result_dtype("d_mlp_act")
                return inner.enter_context(self.dev.scratch("d_mlp_act", shape, dtype))

            handed = Handed(
                place=place,
                result=partial(operands.result, here.id_of("d_mlp_act")),
                written=partial(operands.written, here.id_of("d_mlp_up")),
            )

            def write(act: OutputForms) -> None:
                epilogue = ActivatedGradient(name=self.activation, up=mlp_up, to=to, again=act)
                self.linear.input_gradient(at, "down", handed, d_down, epilogue=epilogue)

            mlp_act = operands.kept(here.kept.mlp_act)
            if mlp_act is None and self.linear.needs_input(at, "down"):
                mlp_act = operands.input_again(temps, here.kept.mlp_act, write, product=False)
            else:
                write(NOWHERE)
            self.linear.weight_gradients(at, "down", d_down, mlp_act)
