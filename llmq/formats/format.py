"""The interface of a number format, with the answers of bf16 and fp32: products take tensors as
they are.

It also says how frozen matrices are kept, which bf16 and fp32 do not.

An *operand* (`base/operand.py`) is what a product takes: a tensor, or the *codes* of one with their
*scale*. A half of a block says "here is a function that writes the tensor", and the format gives it
a place and makes an operand of what was written. Other formats take its methods' places:

    Format       the tensor itself
    E4m3         its codes, made of it once it is there, or by the kernel that makes it
    Int8Format   products make codes of tensors themselves
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import DType, parse_dtype
from llmq.base.operand import Operand, OutputForms, Result
from llmq.base.tensor import Tensor
from llmq.formats.frozen import Encoder, Frozen, Lies, piece_of
from llmq.formats.scales import NoScales
from llmq.options.options import TrainConfig
from llmq.runtime.device import Device

HEAD = "norm"  # the LM head's input

Write = Callable[[OutputForms], None]
"""Enqueues the kernel that makes a tensor, given where it goes; it is called once."""
InputAgain = Callable[..., Operand]
"""Makes the input of half a block again, for backward; `product` is as in Format.input_again."""


FORWARD, BACKWARD, WEIGHT = "forward", "d_x", "d_weight"
"""The three products of a layer: of its output, of its input's gradient and of its weight's."""


def id_of(layer: int, name: str) -> str:
    """The name of a block's tensor among those of all blocks."""
    return f"layers.{layer}.{name}"


class Activation(NamedTuple):
    """An activation of one layer, and what is kept of it from forward to backward. shape: (rows,
    features), rows = B*T. tensor: the whole of it, in this dtype, which may be of the codes that a
    product writes. codes: transposed ones, which are enough where backward only needs it for a
    weight's gradient. With neither it is scratch."""

    layer: int
    name: str
    shape: tuple[int, int]
    dtype: DType
    tensor: Tensor | None
    codes: Tensor | None

    @property
    def tensor_id(self) -> str:
        """Its name among those of all layers."""
        return id_of(self.layer, self.name)

    def place(self, dev: Device, temps: ExitStack) -> Tensor:
        """Where it is kept, else scratch that lives as long as temps."""
        if self.tensor is not None:
            return self.tensor
        return temps.enter_context(dev.scratch(self.name, self.shape, self.dtype))


class Format:
    """Makes the operands of all layers and of the head.

    tensor_id: names a tensor among all of them, as id_of and HEAD do. An operand's memory is
    scratch and lives as long as `temps`, but for what is kept for backward.

    shape: (rows, C), dtype: of the tensors between blocks; the head's have fewer rows. multiplied:
    the format of an input as products multiply it. fast: which products may sum with fewer bits.
    """

    weights: DType | None = None
    """The format of codes that products read of trained weights, if an update makes any."""
    makes_codes = False
    """Whether codes of inputs are made before products, so that a product that is computed again
    needs its input made again."""
    scales = NoScales()
    fast: frozenset[str] = frozenset()

    def __init__(self, dev: Device):
        self.dev = dev

    def prepare(self, config: ModelConfig, options: TrainConfig, scalars: Tensor | None) -> None:
        """Allocate what products need of a model all the time. Arguments are `format_of`'s."""
        rows = options.batch_size * options.local_seq_len
        self.shape, self.dtype = (rows, config.hidden_size), parse_dtype(options.model_dtype)
        self.multiplied = self.dtype

    @property
    def head(self) -> Format:
        return Format(self.dev)

    # -- products --------------------------------------------------------------------------------

    def pair(self, which: str, a: Operand, b: Operand, salt: int) -> tuple[Operand, Operand]:
        """The matrices that a product multiplies of its operands. which: FORWARD, BACKWARD or
        WEIGHT. salt: a number of this weight's own, where operands are rounded stochastically."""
        return a, b

    def kept_codes(self, tensor_id: str) -> DType | None:
        """The format of transposed codes, if they are enough to keep of an input that no product
        needs again."""
        return None

    def result_dtype(self, name: str) -> DType:
        """The format of what a product writes for a kernel behind it: mlp_up, d_mlp_act."""
        return self.dtype

    @property
    def writes_codes(self) -> bool:
        """Whether `result` has codes written, by products of which no other kernel is a part."""
        return False

    # -- inputs ----------------------------------------------------------------------------------

    def input(self, temps: ExitStack, x: Activation, write: Write) -> Operand:
        """A product's input, in the forward pass; what x has room for is kept for backward."""
        out = x.place(self.dev, temps)
        write(OutputForms(out))
        return out

    def kept(self, x: Activation) -> Operand | None:
        """In backward: a product's input for its weight's gradient, None if it was not kept."""
        return x.tensor

    def input_again(
        self, temps: ExitStack, x: Activation, write: Write, *, product: bool
    ) -> Operand:
        """A product's input, in backward, for its weight's gradient. write makes it again with the
        content it had in forward. product: the product is computed again, too."""
        return self.input(temps, x, write)

    # -- tensors that are there already ----------------------------------------------------------

    def of_tensor(
        self, temps: ExitStack, tensor_id: str, x: Tensor, *, measured: bool, transposed: bool
    ) -> Operand:
        """The operand of a tensor (n, features) that is there already. measured: its kernel wrote
        to the target that `measured` gives. transposed: a weight's gradient needs it, and not only
        a product."""
        return x

    def of_tensor_again(
        self, temps: ExitStack, tensor_id: str, x: Tensor, *, product: bool
    ) -> Operand:
        """Make an operand as of_tensor does, in backward, for an input of a product; product: as in
        input_again."""
        return x

    def measured(self, tensor_id: str, out: Tensor) -> OutputForms:
        """The forms in which a kernel writes a tensor of which of_tensor makes an operand later."""
        return OutputForms(out)

    # -- results and gradients -------------------------------------------------------------------

    def result(
        self, tensor_id: str, out: Tensor | None, multiply: Callable[[Result | None], None]
    ) -> Result | None:
        """The forms in which a product writes `out`, which may be of codes; multiply enqueues it.
        out: None of a product that has the activation in it and whose result is not kept."""
        multiply(out)
        return out

    def result_again(self, tensor_id: str, out: Tensor) -> Result:
        """The same in backward: where it was kept, or is to be written again."""
        return out

    def written(self, tensor_id: str, launch: Callable[[], None]) -> None:
        """Enqueue the kernel that writes the target of `gradient`, given this tensor_id."""
        launch()

    def gradient(
        self,
        temps: ExitStack,
        tensor_id: str,
        write: Write,
        *,
        shape: tuple[int, int],
        out: Tensor | None,
        bias: bool = False,
        both: bool = True,
        settles: bool = False,
    ) -> Operand:
        """The gradient of a product's output. out: memory of its shape; None: if its result is
        codes, and bias is False. bias: the tensor itself is wanted besides, because a bias's
        gradient is its sum. both: whether the kernel can write a tensor and its codes. settles:
        whether it is the epilogue of a product, which goes by `settle` and is enqueued by
        `written`."""
        write(self.measured(tensor_id, out))
        return self.of_tensor(temps, tensor_id, out, measured=True, transposed=True)

    def largest(self) -> dict[tuple[int, str], float]:
        """The largest values recorded of the blocks' tensors, by layer and name; waits for the
        device. Nothing without fp8."""
        return {}

    # -- frozen matrices -------------------------------------------------------------------------

    def layout(self, matrix: Frozen) -> Lies:
        """The tensors that a matrix is kept as."""

    def piece(self, matrix: Frozen) -> int:
        """How many of its elements are encoded at a time."""
        return piece_of(matrix.size)

    def start(self, matrices: Iterable[Frozen], *, multiplied: bool) -> None:
        """Before the first is encoded: allocates what is needed beside them. multiplied: whether
        products read them as they are kept."""

    def encode(self, made: Encoder) -> None:
        """Read a matrix in pieces, and put its tensors."""

    def decode(
        self, matrix: Frozen, kept: Mapping[str, Tensor], out: Tensor, scale: Tensor | None = None
    ) -> None:
        """out, of the matrix's shape, from its tensors. scale: F32 (1,) out, if it is of e4m3."""

    def weight(self, kept: Mapping[str, Tensor], transposed: Tensor) -> Operand:
        """The operand that a product reads of it. transposed: its codes (..., in, out)."""

    @staticmethod
    def rounded(matrix: Frozen, x: np.ndarray) -> np.ndarray:
        """The elements x (n,) of a matrix encoded and decoded, F32 (n,), by the references."""
