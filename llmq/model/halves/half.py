"""What a half of a block does in a step, and when a text is continued.

A kind of half is a class for each, in a file of its own and a line of `HALVES`. One object computes
the halves of its kind in all layers: what differs from layer to layer is in `here`, with what the
architecture declares (`here.spec`) and what `keep` has returned (`here.kept`).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

from llmq.arch.matrix import HalfSpec
from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import DType
from llmq.base.operand import Operand
from llmq.base.tensor import Tensor
from llmq.formats.format import Format, InputAgain
from llmq.model.activations import HalfLayer, Recompute
from llmq.model.block_linear import BlockLinear
from llmq.model.linear import Linear
from llmq.model.parameters import BlockGrads, BlockWeights
from llmq.options.options import TrainConfig
from llmq.runtime.device import Device


class Shared(NamedTuple):
    """What all halves of a model work with.

    backend: of attention, as `directions` takes it. starts: I32 (B,T), of documents; None: all are
    0.
    """

    dev: Device
    config: ModelConfig
    options: TrainConfig
    operands: Format
    linear: BlockLinear
    backend: str
    starts: Tensor | None


class Half(Protocol):
    """Turns the output of a norm into a branch of the residual stream. rows = B*T."""

    def __init__(self, shared: Shared): ...

    def keeps_input(self, recompute: Recompute) -> bool:
        """Whether the half's input may be kept for backward: False where it is made again."""

    def multiplied_again(self, recompute: Recompute) -> tuple[str, ...]:
        """Keys of the matrices whose products backward computes again."""

    def keep(self, here: HalfLayer) -> Any:
        """Allocates what a layer keeps from forward to backward."""

    def forward(self, temps: ExitStack, here: HalfLayer, w: BlockWeights, x: Operand) -> None:
        """here.out from x (rows, C). Scratch lives as long as temps."""

    def again(
        self,
        temps: ExitStack,
        here: HalfLayer,
        w: BlockWeights,
        g: BlockGrads,
        x_again: InputAgain,
    ) -> Any:
        """What backward needs, kept or computed again; if the whole block is, here.out too."""

    def backward(
        self,
        here: HalfLayer,
        w: BlockWeights,
        g: BlockGrads,
        again: Any,
        d_out: Tensor,
        d_x: Tensor | None,
        *,
        inside: bool,
    ) -> None:
        """d_x (rows, C), if it is wanted, and the weights' gradients, from d_out (rows, C).

        inside: whether a gradient in front of the matrix that makes the output is wanted; else
        what leads there may be left out.
        """


class HalfDecoder(Protocol):
    """The same for n tokens of one sequence, without gradients; with a cache if it needs one."""

    def __init__(
        self, dev: Device, config: ModelConfig, linear: Linear, dtype: DType, positions: int
    ): ...

    def forward(
        self,
        layer: int,
        spec: HalfSpec,
        w: BlockWeights,
        out: Tensor,
        x: Tensor,
        position: int,
    ) -> None:
        """out (n, C) from x (n, C), of the elements [position, position + n) of the sequence."""
