"""The interface of a half of a block: attention, an MLP, experts, or another branch of the residual
stream.

Each kind of half is a class in a file of its own, with a line in `HALVES`. One object computes the
halves of one kind in all layers. `ctx.layer` describes the layer: the architecture's declaration
(`spec`), the tensors that `keep` has allocated (`saved`), and the generator's cache (`cache`).
`ctx` also holds the weights, gradients and scratch of the pass.
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
    """The objects that all halves of a model share. norms: the norms before halves, in forward and
    recomputed in backward. backend: backend of attention, as in halves/attention.directions.
    rope_tables: by layer, the result of halves/attention.rope_tables. inputs: the inputs of the
    micro-step. balance: the losses of experts' routers; None without experts or without training.
    layer_inputs: (rows, L*P), the vectors that all layers add (`per_layer.py`); None without such
    vectors."""

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
    layer_inputs: Tensor | None


class Half(Protocol):
    """The computation of a branch of the residual stream from the output of a norm. rows is B*T,
    the number of tokens."""

    def __init__(self, shared: ModelContext): ...

    def keeps_input(self, recompute: Recompute) -> bool:
        """Return True if backward may read the half's kept input; False if backward recomputes the
        input."""

    def multiplied_again(self, recompute: Recompute) -> tuple[str, ...]:
        """Return the keys of the matrices whose products backward recomputes."""

    def keep(self, layer: HalfLayer) -> Any:
        """Allocate the tensors of a layer that live from forward to backward."""

    def forward(self, ctx: LayerContext, x: Operand) -> None:
        """Compute ctx.layer.out from x (rows, C). If ctx.layer.cache is given, read keys, values or
        states of earlier tokens there, and store those of x."""

    def recompute(self, ctx: LayerContext) -> Any:
        """Return the tensors that backward reads, kept or recomputed. If the whole block is
        recomputed, write ctx.layer.out, too."""

    def backward(
        self, ctx: LayerContext, inputs: Any, d_out: Tensor, d_x: Tensor | None, *, inside: bool
    ) -> None:
        """Compute d_x (rows, C), unless d_x is None, and the gradients of weights, from d_out
        (rows, C). inside: False if only the weights of the output product need gradients."""
