"""The work of a half of a block: in a step, in an evaluation, and when texts are continued.

A kind of half is a class in a file of its own and a line of `HALVES`. One object computes the
halves of its kind in all layers: what differs from layer to layer is in `ctx.layer`, with what the
architecture declares (`spec`), the tensors that `keep` has allocated (`saved`), and those of texts
that are continued (`cache`). A `LayerContext` has that, and the differences from pass to pass.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from llmq.arch.model_config import ModelConfig
from llmq.base.operand import Operand
from llmq.base.step_inputs import StepInputs
from llmq.base.tensor import Tensor
from llmq.formats.operands import Operands
from llmq.model.activations import HalfLayer, LayerContext, Recompute, Rotary
from llmq.model.balance import Balance
from llmq.model.block_linear import BlockLinear
from llmq.model.norms import BlockNorms
from llmq.options.options import StepOptions
from llmq.runtime.device import Device


class ModelContext(NamedTuple):
    """The objects with which all halves of a model work. norms: in front of halves, which make
    their input in forward, and again in backward. backend: of attention, as `directions`
    takes it. rope_tables: by layer, as `rope_tables` in halves/attention.py makes them. inputs: of
    the micro-step. balance: of experts; None where nothing is trained."""

    dev: Device
    config: ModelConfig
    options: StepOptions
    operands: Operands
    linear: BlockLinear
    norms: BlockNorms
    backend: str
    rope_tables: Sequence[Rotary | None]
    inputs: StepInputs
    balance: Balance | None


class Half(Protocol):
    """Turns the output of a norm into a branch of the residual stream. rows = B*T."""

    def __init__(self, shared: ModelContext): ...

    def keeps_input(self, recompute: Recompute) -> bool:
        """Whether the half's input may be kept for backward: False where it is made again."""

    def multiplied_again(self, recompute: Recompute) -> tuple[str, ...]:
        """Keys of the matrices whose products backward computes again."""

    def keep(self, layer: HalfLayer) -> Any:
        """Allocates what a layer keeps from forward to backward."""

    def forward(self, ctx: LayerContext, x: Operand) -> None:
        """ctx.layer.out from x (rows, C). With ctx.layer.cache it reads what the texts' earlier
        passes have written there, and writes what later ones read."""

    def recompute(self, ctx: LayerContext) -> Any:
        """The tensors that backward needs, kept or computed again; if the whole block is computed
        again, ctx.layer.out too."""

    def backward(
        self, ctx: LayerContext, inputs: Any, d_out: Tensor, d_x: Tensor | None, *, inside: bool
    ) -> None:
        """d_x (rows, C), if it is wanted, and the weights' gradients, from d_out (rows, C). inside:
        whether a gradient in front of the matrix that makes the output is wanted; else what leads
        there may be left out."""
