"""Products with the MLP's activation in them, and the two kernels that each of them replaces.

A function for each direction makes the operands of a case on a GPU; `tools/gemm_gate.py --swiglu`
times what it returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from llmq.base.dtypes import BF16, E4M3, F32, I32, DType
from llmq.base.operand import Fp8Out
from llmq.base.tensor import Tensor
from llmq.ops import matmul_swiglu, swiglu
from llmq.ops.matmul import matmul, matmul_fp8
from llmq.ops.matmul_adapted import matmul_adapted

if TYPE_CHECKING:
    from gemm_gate import Bench

LARGEST = 8.0  # of the activation, beyond which codes saturate; its inputs have variance 1


class Case(NamedTuple):
    """A product of (M, K) with all F columns of the MLP; R: of its adapters, 0: none."""

    M: int
    F: int
    K: int
    R: int
    dtype: DType

    def nbytes(self, results: int) -> int:
        """Of operands, and of two times `results` bytes for each of the M x F elements."""
        inputs = self.dtype.itemsize * self.K + BF16.itemsize * self.R
        return (self.M + 2 * self.F) * inputs + 2 * results * self.M * self.F


class Ways(NamedTuple):
    """product: alone, by the best that there was; two: with the activation's kernel behind it;
    one: both in one kernel. results: of two and of one, the same tensors of both."""

    product: Callable[[], None]
    two: Callable[[], None]
    one: Callable[[], None]
    results: tuple[list[Tensor], list[Tensor]]


class Results(NamedTuple):
    """Of the activation. Fp8 codes as with the recipe `delayed`: in both layouts, or with adapters,
    which want BF16 beside, in that of the next product."""

    up_gate: Tensor
    out: Tensor | None
    abs_max: Tensor | None
    fp8: Fp8Out | None

    @classmethod
    def made(cls, bench: Bench, case: Case, scale: Tensor) -> Results:
        M, F = case.M, case.F
        up_gate, out = bench.result("up_gate", M, 2 * F), bench.result("out", M, F)
        if case.dtype == BF16:
            return cls(up_gate, out, None, None)
        codes = bench.empty("codes", E4M3, M, F)
        transposed = None if case.R else bench.empty("transposed", E4M3, F, M)
        fp8 = Fp8Out(codes, transposed, scale, bench.empty("saturated", I32, 1))
        return cls(up_gate, out if case.R else None, bench.empty("abs_max", F32, 1), fp8)

    def tensors(self) -> list[Tensor]:
        fp8 = () if self.fp8 is None else (self.fp8.codes, self.fp8.transposed, self.fp8.saturated)
        return [x for x in (self.up_gate, self.out, self.abs_max, *fp8) if x is not None]


def forward(bench: Bench, case: Case) -> Ways:
    """The up product."""
    M, F, K, R, dtype = case
    dev = bench.dev
    a = bench.operand("a", dtype, M, K, 0.3)
    b = bench.operand("b", dtype, 2 * F, K, 0.0, size=1 / math.sqrt(K))
    h = tail = None
    if R:
        h = bench.operand("h", BF16, M, R, 0.0)
        tail = bench.operand("tail", BF16, 2 * F, R, 0.0, size=0.05)
    scales: tuple[Tensor, ...] = ()
    if dtype == E4M3:
        scales = (bench.scale(bench.deviation("a", "b") ** -0.5 * K**-0.25),) * 2
    scale = bench.scale(LARGEST / 448)
    old, new = (Results.made(bench, case, scale) for _ in range(2))

    def product() -> None:
        if R:
            matmul_adapted(dev, old.up_gate, a, b, h, tail, *scales)
        elif scales:
            matmul_fp8(dev, old.up_gate, a, b, *scales, fast_accumulation=True)
        else:
            matmul(dev, old.up_gate, a, b, trans_b=True)

    def two() -> None:
        product()
        swiglu.forward(dev, old.out, old.up_gate, abs_max=old.abs_max, fp8=old.fp8)

    def one() -> None:
        matmul_swiglu.forward(
            dev, new.up_gate, new.out, a, b, h, tail, *scales, abs_max=new.abs_max, fp8=new.fp8
        )

    return Ways(product, two, one, (old.tensors(), new.tensors()))


FORWARD_BYTES = 2 * 2 + 2 + 2  # for each element of the activation: up_gate, out, codes
# Name: what makes the case, the case, and bytes of its results.
CASES: dict[str, tuple[Callable[[Bench, Case], Ways], Case, int]] = {
    "0.5B forward, fp8": (forward, Case(32768, 4864, 896, 0, E4M3), FORWARD_BYTES),
    "1.5B forward, fp8": (forward, Case(32768, 8960, 1536, 0, E4M3), FORWARD_BYTES),
    "7B forward, fp8": (forward, Case(16384, 18944, 3584, 0, E4M3), FORWARD_BYTES),
    "7B LoRA forward, fp8": (forward, Case(4096, 18944, 3584, 32, E4M3), FORWARD_BYTES),
    "0.5B forward, bf16": (forward, Case(32768, 4864, 896, 0, BF16), FORWARD_BYTES),
    "1.5B forward, bf16": (forward, Case(32768, 8960, 1536, 0, BF16), FORWARD_BYTES),
    "7B forward, bf16": (forward, Case(16384, 18944, 3584, 0, BF16), FORWARD_BYTES),
}
