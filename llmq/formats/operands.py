"""The operands of a model's products in bf16 and fp32: products take tensors as they are.

An *operand* (`base/operand.py`) is what a product reads: a tensor, or the *codes* of a tensor with
their *scale*. A kernel that makes a tensor for a product stands between two calls:

    out = operands.buffers(temps, x)        the memory that the kernel writes
    kernel(dev, out.tensor, ..., abs_max=out.abs_max, fp8=out.fp8)
    x = operands.finalize(temps, out)       the operand, which may need one more launch

A tensor that is there already becomes an operand by `quantize`. Other number formats are classes of
the same interface:

    Operands      the tensor itself
    E4m3Operands  its codes, made of the tensor, or by the kernel that makes the tensor
    Int8Operands  products make codes of tensors themselves
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import DType, parse_dtype
from llmq.base.operand import Operand, OutBuffers, ProductOutput, Result
from llmq.base.tensor import Tensor
from llmq.formats.scales import NoScales
from llmq.options.options import StepOptions
from llmq.runtime.device import Device

HEAD = "norm"  # the LM head's input


FORWARD, BACKWARD, WEIGHT = "forward", "d_x", "d_weight"
"""The three products of a layer: of its output, of its input's gradient and of its weight's."""


def id_of(layer: int, name: str) -> str:
    """The name of a block's tensor among those of all blocks."""
    return f"layers.{layer}.{name}"


class Activation(NamedTuple):
    """An activation of one layer, and its memory from forward to backward. shape: (rows, features),
    rows = B*T. tensor: the whole activation, in this dtype, which may be of the codes that a
    product writes. codes: transposed ones, which are enough where backward needs the activation
    for a weight's gradient alone. With neither the activation is scratch."""

    layer: int
    name: str
    shape: tuple[int, int]
    dtype: DType
    tensor: Tensor | None
    codes: Tensor | None

    @property
    def tensor_id(self) -> str:
        """The activation's name among the tensors of all layers, as `id_of` has it."""
        return id_of(self.layer, self.name)

    def place(self, dev: Device, temps: ExitStack) -> Tensor:
        """The memory that keeps the activation, else scratch that lives as long as temps."""
        if self.tensor is not None:
            return self.tensor
        return temps.enter_context(dev.scratch(self.name, self.shape, self.dtype))


class Operands:
    """Makes the operands of all layers and of the head.

    tensor_id: names a tensor among all of them, as id_of and HEAD do. An operand's memory is
    scratch and lives as long as `temps`, but for what is kept for backward.

    shape: (rows, C), dtype: of the tensors between blocks; the head's have fewer rows. multiplied:
    the format of an input as products multiply it. fast: which products may sum with fewer bits.
    """

    weights: DType | None = None
    """The format of codes that products read of trained weights, if an update makes any."""
    makes_codes = False
    """True if codes of inputs are made before products: a product that is computed again then needs
    its input made again."""
    scales = NoScales()
    fast: frozenset[str] = frozenset()

    def __init__(self, dev: Device):
        self.dev = dev

    def prepare(self, config: ModelConfig, options: StepOptions, scalars: Tensor | None) -> None:
        """Allocate what products need of a model all the time. Arguments are `operands_of`'s."""
        rows = options.batch.micro_tokens
        self.dtype = parse_dtype(options.precision.model_dtype)
        self.shape = (rows, config.hidden_size)
        self.multiplied = self.dtype

    @property
    def head(self) -> Operands:
        return Operands(self.dev)

    # -- products --------------------------------------------------------------------------------

    def pair(self, which: str, a: Operand, b: Operand, salt: int = 0) -> tuple[Operand, Operand]:
        """Both operands in the form that a product multiplies. which: FORWARD, BACKWARD or
        WEIGHT. salt: a number of this weight's own, where operands are rounded stochastically."""
        return a, b

    def kept_codes(self, tensor_id: str) -> DType | None:
        """The format of transposed codes, if backward needs no more of an input."""
        return None

    def result_dtype(self, name: str) -> DType:
        """The format of a product's result for a kernel behind it: mlp_up, d_mlp_act."""
        return self.dtype

    # -- tensors that kernels make ----------------------------------------------------------------

    def buffers(self, temps: ExitStack, x: Activation) -> OutBuffers:
        """Buffers of a product's input in forward; memory that x has is kept for backward."""
        return OutBuffers(x.tensor_id, x.place(self.dev, temps))

    def buffers_again(self, temps: ExitStack, x: Activation, *, product: bool) -> OutBuffers:
        """Buffers of a product's input that backward makes again, with the content it had in
        forward, for its weight's gradient. product: the product is computed again, too."""
        return self.buffers(temps, x)

    def gradient_buffers(
        self,
        temps: ExitStack,
        tensor_id: str,
        shape: tuple[int, int],
        out: Tensor | None,
        *,
        bias: bool = False,
        both: bool = True,
        of_product: bool = False,
    ) -> OutBuffers:
        """Buffers of the gradient of a product's output. out: memory of this shape (rows,
        features); None: where codes are enough. bias: the tensor itself is wanted besides, because
        a bias's gradient is its sum. both: whether the kernel can write a tensor and its codes.
        of_product: whether the kernel is the epilogue of a product, which can make codes whose
        scale is not known beforehand."""
        return self.measured(tensor_id, out)

    def measured(self, tensor_id: str, out: Tensor) -> OutBuffers:
        """Buffers of a kernel that writes the tensor `out` (rows, features); `quantize` makes the
        operand of it later."""
        return OutBuffers(tensor_id, out)

    def finalize(self, temps: ExitStack, out: OutBuffers) -> Operand:
        """The operand of a tensor that its kernel has written to these buffers."""
        return out.tensor

    def kept(self, x: Activation) -> Operand | None:
        """The kept input of a product, for the weight's gradient in backward; None if forward has
        not kept the input."""
        return x.tensor

    # -- tensors that are there already ----------------------------------------------------------

    def quantize(
        self, temps: ExitStack, tensor_id: str, x: Tensor, *, measured: bool, transposed: bool
    ) -> Operand:
        """The operand of a tensor (n, features) that is there already. measured: its kernel wrote
        to the buffers that `measured` gives. transposed: a weight's gradient needs the operand, and
        not only a product."""
        return x

    def quantize_again(
        self, temps: ExitStack, tensor_id: str, x: Tensor, *, product: bool
    ) -> Operand:
        """The operand of a product's input x (n, features) in backward. product: as in
        buffers_again."""
        return x

    # -- results of products that an activation reads ---------------------------------------------

    def product_output(
        self, tensor_id: str, shape: tuple[int, int], tensor: Tensor | None = None
    ) -> ProductOutput:
        """The output (rows, features) of a product in front of an activation. tensor: memory of it
        that backward reads, which is written in any case; None: there is none."""
        name = tensor_id.rpartition(".")[2]
        return ProductOutput(name, shape, self.result_dtype(name), tensor)

    def result_again(self, tensor_id: str, out: Tensor) -> Result:
        """The output of such a product in backward; its memory `out` holds forward's values, or is
        to be written again."""
        return out

    def largest(self) -> dict[tuple[int, str], float]:
        """The largest values recorded of the blocks' tensors, by layer and name; waits for the
        device. Nothing without fp8."""
        return {}
