"""ternary: forward multiplies weights -1, 0 and 1 with signed bytes (BitNet b1.58).

    out      = x_q   (rows, in)  @ weight_q (out, in)^T
    d_x      = d_out (rows, out) @ weight_q
    d_weight = d_out^T           @ x_q

weight_q is codes times the mean |w| of the weight's Hugging Face module. x_q is signed bytes times
a scale for each token. Gradients ignore both roundings (straight-through): backward multiplies
weight_q and x_q in the model's dtype. Weights, activations and gradients are stored in the model's
dtype; each product encodes its operands anew.
"""

from contextlib import ExitStack

from llmq.arch.matrix import Matrix
from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import F32, I8
from llmq.base.operand import Int8Rows, Operand
from llmq.base.tensor import Tensor
from llmq.formats.operands import FORWARD, WEIGHT, Operands
from llmq.ops.quantize import quantize_int8, ternary
from llmq.options.options import StepOptions


def rounded_keys(config: ModelConfig, of: str) -> set[str]:
    """Return the keys of the matrices that are rounded to ternary values. of: the value of
    --ternary-of."""
    halves = (half for layer in range(config.num_layers) for half in config.halves(layer))
    return {
        matrix.key
        for half in halves
        if of in ("all", "mlp" if half.name == "mlp" else "attention")
        for matrix in half.matrices
    }


class TernaryOperands(Operands):
    """Operands that stay tensors until a product needs codes or rounded values."""

    def prepare(self, config: ModelConfig, options: StepOptions, scalars: Tensor | None) -> None:
        super().prepare(config, options, scalars)
        self.multiplied = I8
        self._rounded = rounded_keys(config, options.precision.ternary_of)

    def pair(
        self, temps: ExitStack, which: str, a: Operand, b: Operand, matrix: Matrix, salt: int
    ) -> tuple[Operand, Operand]:
        if matrix.key not in self._rounded:
            return a, b
        if which == WEIGHT:
            return a, self._bytes_as_tensor(temps, b)
        scale = temps.enter_context(self.dev.scratch("ternary_scale", b.shape[:1], F32))
        ternary.scales(self.dev, scale, b, [part.rows for part in matrix.parts])
        if which == FORWARD:
            codes = temps.enter_context(self.dev.scratch("ternary_codes", b.shape, I8))
            ternary.codes(self.dev, codes, b, scale)
            return self._bytes(temps, a), Int8Rows(codes, scale)
        weight = temps.enter_context(self.dev.scratch("ternary_weight", b.shape, b.dtype))
        ternary.round_(self.dev, weight, b, scale)
        return a, weight

    def _bytes(self, temps: ExitStack, x: Tensor) -> Int8Rows:
        codes = temps.enter_context(self.dev.scratch("int8_codes", x.shape, I8))
        scale = temps.enter_context(self.dev.scratch("int8_scales", x.shape[:1], F32))
        quantize_int8.rows(self.dev, codes, scale, x)
        return Int8Rows(codes, scale)

    def _bytes_as_tensor(self, temps: ExitStack, x: Tensor) -> Tensor:
        out = temps.enter_context(self.dev.scratch("int8_decoded", x.shape, x.dtype))
        with ExitStack() as own:
            made = self._bytes(own, x)
            quantize_int8.decode(self.dev, out, *made)
        return out
