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
from llmq.model.activations import HalfLayer, Recompute
from llmq.model.halves.half import Frame, Shared
from llmq.model.parameters import BlockGrads, BlockWeights

NOWHERE = OutputForms(None)


class _Kept(NamedTuple):
    """The tensors kept of one layer. mlp_up: (rows, F), or of a gated MLP (rows, 2F). mlp_act:
    (rows, F)."""

    mlp_up: Activation
    mlp_act: Activation


class MlpInputs(NamedTuple):
    """The tensors that backward needs. x: (rows, C), None where no gradient needs it. mlp_up:
    (rows, F), or of a gated MLP (rows, 2F)."""

    x: Operand | None
    mlp_up: Result


class MlpHalf:
    """The MLP halves of all layers. Scratch lives as long as `temps`."""

    def __init__(self, shared: Shared):
        self.dev, self.operands, self.linear = shared.dev, shared.operands, shared.linear
        self.activation = shared.config.activation

    def keeps_input(self, recompute: Recompute) -> bool:
        """Whether the half's input may be kept for backward."""
        return not (recompute.norm or recompute.ffn)

    def multiplied_again(self, recompute: Recompute) -> tuple[str, ...]:
        """Keys of the matrices whose products backward computes again."""
        return ("up",) if recompute.ffn else ()

    def keep(self, here: HalfLayer) -> _Kept:
        """The tensors that a layer keeps."""
        up, down, r = here.spec["up"], here.spec["down"], here.recompute
        dtype, kept = self.operands.result_dtype("mlp_up"), not r.swiglu and here.needs(down.input)
        return _Kept(
            mlp_up=here.activation("mlp_up", up.shape[0], kept=not r.ffn, dtype=dtype),
            mlp_act=here.activation("mlp_act", down.shape[1], kept=kept, may_be_codes=True),
        )

    def forward(self, frame: Frame, here: HalfLayer, w: BlockWeights, x: Operand) -> None:
        """here.out from x (rows, C)."""

        mlp_up = here.kept.mlp_up
        handed = Handed(
            place=partial(mlp_up.place, self.dev),
            kept=mlp_up.tensor,
            result=partial(self.operands.result, mlp_up.tensor_id),
            # Without scales, codes are made twice, and what reads them has to wait.
            ready=self.operands.writes_once,
        )

        def write(to: OutputForms) -> None:
            epilogue = Activated(name=self.activation, to=to)
            self.linear.forward(here.index, "up", handed, x, w, epilogue=epilogue)

        mlp_act = self.operands.input(frame.temps, here.kept.mlp_act, write)
        out, addend = here.out
        self.linear.forward(here.index, "down", out, mlp_act, w, addend)

    def recompute(
        self, frame: Frame, here: HalfLayer, w: BlockWeights, g: BlockGrads, x_again: InputAgain
    ) -> MlpInputs:
        """The tensors that backward needs, kept or computed again."""
        computed = here.recompute.ffn
        place = here.kept.mlp_up.place(self.dev, frame.temps)
        mlp_up = self.operands.result_again(here.kept.mlp_up.tensor_id, place)
        x = None
        if computed or self.linear.needs_input(here.index, "up", g):
            x = x_again(product=computed)
        if computed:
            epilogue = Activated(name=self.activation, to=None)  # the bits of the first time
            self.linear.forward(here.index, "up", mlp_up, x, w, epilogue=epilogue)
        return MlpInputs(x, mlp_up)

    def backward(
        self,
        here: HalfLayer,
        w: BlockWeights,
        g: BlockGrads,
        inputs: MlpInputs,
        d_out: Tensor,
        d_x: Tensor | None,
        *,
        inside: bool,
    ) -> None:
        """Do as `Half.backward`, which leaves nothing out; overwrites mlp_up, but for codes."""
        mlp_up = inputs.mlp_up
        write = partial(self._backward_down, here, w, g, mlp_up, d_out)
        with ExitStack() as temps:
            tensor_id, bias = here.id_of("d_mlp_up"), g.bias("up") is not None
            out, shape = mlp_up, here.kept.mlp_up.shape
            if isinstance(mlp_up, ProductCodes):  # their memory is too small
                scratch = self.dev.scratch("d_mlp_up", shape, self.operands.dtype)
                out = temps.enter_context(scratch) if bias else None
            gradient = self.operands.gradient
            d_mlp_up = gradient(
                temps, tensor_id, write, shape=shape, out=out, bias=bias, settles=True
            )
            self.linear.input_gradient(here.index, "up", d_x, d_mlp_up, w, g)
            self.linear.weight_gradients(here.index, "up", w, g, g.bias("up"), d_mlp_up, inputs.x)

    def _backward_down(
        self,
        here: HalfLayer,
        w: BlockWeights,
        g: BlockGrads,
        mlp_up: Result,
        d_out: Tensor,
        to: OutputForms,
    ) -> None:
        """The down product and the activation: `to` is the gradient of mlp_up (may be mlp_up). The
        activation is made once more where the down product's weight needs it."""
        with ExitStack() as temps:
            d_down = self.operands.of_tensor(
                temps, here.out_id, d_out, measured=True, transposed=True
            )

            def place(inner: ExitStack) -> Tensor:
                shape, dtype = here.kept.mlp_act.shape, self.operands.result_dtype("d_mlp_act")
                return inner.enter_context(self.dev.scratch("d_mlp_act", shape, dtype))

            handed = Handed(
                place=place,
                result=partial(self.operands.result, here.id_of("d_mlp_act")),
                written=partial(self.operands.written, here.id_of("d_mlp_up")),
            )

            def write(act: OutputForms) -> None:
                epilogue = ActivatedGradient(name=self.activation, up=mlp_up, to=to, again=act)
                down = (here.index, "down", handed, d_down, w, g)
                self.linear.input_gradient(*down, epilogue=epilogue)

            mlp_act = self.operands.kept(here.kept.mlp_act)
            if mlp_act is None and self.linear.needs_input(here.index, "down", g):
                mlp_act = self.operands.input_again(temps, here.kept.mlp_act, write, product=False)
            else:
                write(NOWHERE)
            self.linear.weight_gradients(here.index, "down", w, g, g.bias("down"), d_down, mlp_act)
