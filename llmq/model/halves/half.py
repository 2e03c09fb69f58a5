"""Interface of a half of a block: attention, an MLP, experts, or another branch of the stream.

A kind of half is a class in a file of its own and a line of `HALVES`. One object computes the
halves of its kind in all layers. `ctx.layer` is the layer: the architecture's declaration (`spec`),
the tensors that `keep` has allocated (`saved`), and the generator's cache (`cache`). `ctx` also has
the weights, gradients and scratch of the pass.
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
    """Objects that all halves of a model share. norms: the norms in front of halves, in forward and
    again in backward. backend: attention's, see halves/attention.directions. rope_tables: by layer,
    see halves/attention.rope_tables. inputs: the micro-step's inputs. balance: losses of experts'
    routers; None without experts or training. layer_inputs: (rows, L*P), the vectors that all
    layers add, see `per_layer.py`; None without per-layer embeddings."""

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
    """Turns the output of a norm into a branch of the residual stream. rows = B*T."""

    def __init__(self, shared: ModelContext): ...

    def keeps_input(self, recompute: Recompute) -> bool:
        """True if backward may read the half's kept input; False if backward computes the input
        again."""

    def multiplied_again(self, recompute: Recompute) -> tuple[str, ...]:
        """Keys of the matrices whose products backward computes again."""

    def keep(self, layer: HalfLayer) -> Any:
        """Allocate the tensors of a layer that live from forward to backward."""

    def forward(self, ctx: LayerContext, x: Operand) -> None:
        """Write ctx.layer.out from x (rows, C). With ctx.layer.cache, read the earlier tokens'
        keys, values or states there, and store those of x."""

    def recompute(self, ctx: LayerContext) -> Any:
        """The tensors that backward reads, kept or computed again. If the whole block is computed
        again, write ctx.layer.out, too."""

    def backward(
        self, ctx: LayerContext, inputs: Any, d_out: Tensor, d_x: Tensor | None, *, inside: bool
    ) -> None:
        """Compute d_x (rows, C), unless None, and gradients of weights from d_out (rows, C).
        inside: False if only the output product's weights need gradients."""
