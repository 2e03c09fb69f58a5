"""Operands of a model's matrix products; in bf16 and fp32, products read tensors unchanged.

An *operand* (`base/operand.py`) is what a product reads: a tensor, or the *codes* of a tensor with
their *scale*. A kernel that computes a tensor for a product is launched between two calls:

    out = operands.buffers(temps, x)        the memory that the kernel writes
    kernel(dev, out.tensor, ..., abs_max=out.abs_max, fp8=out.fp8)
    x = operands.finalize(temps, out)       the operand, which may need one more launch

The method `quantize` makes an operand of a tensor that has been computed before. Each number format
has a class with this interface:

    Operands      operands are the tensors
    E4m3Operands  operands are codes, made from a tensor or by the kernel that makes the tensor
    Int8Operands  operands are tensors, from which each product makes codes
    TernaryOperands  operands are codes or rounded tensors, made before each product
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

from llmq.arch.matrix import Matrix
from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import DType, parse_dtype
from llmq.base.operand import Operand, OutBuffers, ProductOutput, Result
from llmq.base.tensor import Tensor
from llmq.formats.scales import StaticScales
from llmq.options.options import StepOptions
from llmq.runtime.device import Device

HEAD = "norm"  # the LM head's input


FORWARD, BACKWARD, WEIGHT = "forward", "d_x", "d_weight"
"""The three products of a layer: its output, its input's gradient, its weight's gradient."""


def id_of(layer: int, name: str) -> str:
    """Return the name of a layer's tensor, unique in the model."""
    return f"layers.{layer}.{name}"


class Activation(NamedTuple):
    """An activation of one layer, with the memory that keeps the activation until backward. shape:
    (rows, features), rows = B*T. tensor: memory for the whole activation, in `dtype`; `dtype` may
    be the dtype of codes that a product writes. codes: memory for transposed codes, which is enough
    if backward reads the activation only for a weight gradient. If tensor and codes are None, the
    activation lives only in scratch memory."""

    layer: int
    name: str
    shape: tuple[int, int]
    dtype: DType
    tensor: Tensor | None
    codes: Tensor | None

    @property
    def tensor_id(self) -> str:
        """Return the activation's name among the tensors of all layers: `id_of`."""
        return id_of(self.layer, self.name)

    def place(self, dev: Device, temps: ExitStack) -> Tensor:
        """Return the memory that keeps the activation. If the activation has no memory, return
        scratch that lives as long as temps."""
        if self.tensor is not None:
            return self.tensor
        return temps.enter_context(dev.scratch(self.name, self.shape, self.dtype))


class Operands:
    """The maker of operands for the products of all layers and of the LM head.

    tensor_id: a tensor's unique name, from `id_of`, or HEAD. An operand's memory is scratch that
    lives as long as `temps`, except for memory kept for backward.

    shape, dtype: shape (rows, C) and dtype of the tensors between blocks; the head's tensors have
    fewer rows. multiplied: the dtype of the values that products multiply. fast: names of the
    products that may accumulate in fewer bits.
    """

    weights: DType | None = None
    """Dtype of the codes that updates make of trained weights; None if updates make no codes."""
    makes_codes = False
    """True if inputs are encoded before products. Recomputing a product then needs the product's
    input recomputed, too."""
    scales = StaticScales()
    fast: frozenset[str] = frozenset()

    def __init__(self, dev: Device):
        self.dev = dev

    def prepare(self, config: ModelConfig, options: StepOptions, scalars: Tensor | None) -> None:
        """Allocate the memory that operands keep for the whole run. The arguments are explained in
        `operands_of`."""
        rows = options.batch.micro_tokens
        self.dtype = parse_dtype(options.precision.model_dtype)
        self.shape = (rows, config.hidden_size)
        self.multiplied = self.dtype

    @property
    def head(self) -> Operands:
        return Operands(self.dev)

    # -- products --------------------------------------------------------------------------------

    def pair(
        self, temps: ExitStack, which: str, a: Operand, b: Operand, matrix: Matrix, salt: int
    ) -> tuple[Operand, Operand]:
        """Return both operands encoded as a product with a block's matrix needs. which: FORWARD,
        BACKWARD or WEIGHT. salt: a number unique to this weight, for stochastic rounding."""
        return a, b

    def kept_codes(self, tensor_id: str) -> DType | None:
        """Return the dtype of an input's transposed codes, if backward reads the input only as
        these codes; else None."""
        return None

    def result_dtype(self, name: str) -> DType:
        """Return the dtype in which a product writes its output for an activation function. name:
        "mlp_up" or "d_mlp_act"."""
        return self.dtype

    # -- tensors that kernels make ----------------------------------------------------------------

    def buffers(self, temps: ExitStack, x: Activation) -> OutBuffers:
        """Return the buffers for a product's input x in forward. Memory in x is kept for
        backward."""
        return OutBuffers(x.tensor_id, x.place(self.dev, temps))

    def buffers_again(self, temps: ExitStack, x: Activation, *, product: bool) -> OutBuffers:
        """Return the buffers for a product's input that backward recomputes, with forward's values,
        for a weight gradient. product: True if the product is recomputed, too."""
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
        """Return the buffers for the gradient of a product's output. out: memory (rows, features)
        of the gradient; None if codes are enough. bias: True if a bias gradient is summed from the
        tensor. both: True if the kernel can write a tensor and the tensor's codes. of_product: True
        if the kernel is the epilogue of a product, which can make codes with a scale that is not
        known beforehand."""
        return self.measured(tensor_id, out)

    def measured(self, tensor_id: str, out: Tensor) -> OutBuffers:
        """Return the buffers of a kernel that writes the tensor `out` (rows, features); a later
        call of `quantize` makes the operand."""
        return OutBuffers(tensor_id, out)

    def finalize(self, temps: ExitStack, out: OutBuffers) -> Operand:
        """Return the operand of a tensor that a kernel has written to the buffers `out`."""
        return out.tensor

    def kept(self, x: Activation) -> Operand | None:
        """Return a product's input that forward kept for the weight gradient; None if forward kept
        no memory of the input."""
        return x.tensor

    # -- tensors that are there already ----------------------------------------------------------

    def quantize(
        self, temps: ExitStack, tensor_id: str, x: Tensor, *, measured: bool, transposed: bool
    ) -> Operand:
        """Return the operand of a computed tensor x (n, features). measured: True if x's kernel
        wrote to the buffers that the method `measured` returned. transposed: True if a weight
        gradient reads the operand, too."""
        return x

    def quantize_again(
        self, temps: ExitStack, tensor_id: str, x: Tensor, *, product: bool
    ) -> Operand:
        """Return the operand of a product's input x (n, features) in backward. product: True if the
        product is recomputed, too."""
        return x

    # -- results of products that an activation reads ---------------------------------------------

    def product_output(
        self, tensor_id: str, shape: tuple[int, int], tensor: Tensor | None = None
    ) -> ProductOutput:
        """Return the output (rows, features) of a product before an activation function. tensor:
        memory for the output if backward reads the output, else None. The product always writes
        this memory."""
        name = tensor_id.rpartition(".")[2]
        return ProductOutput(name, shape, self.result_dtype(name), tensor)

    def result_again(self, tensor_id: str, out: Tensor) -> Result:
        """Return the output of a product before an activation function, for backward. out: memory
        that holds forward's values, or into which backward writes the same values again."""
        return out

    def largest(self) -> dict[tuple[int, str], float]:
        """Return the largest recorded
        x
         of the blocks' tensors, by (layer, name). The call waits for the device. Without fp8 the
         result is empty."""
        return {}
