"""Products with the MLP's activation in them, and the two kernels that each replaces.

A function for each of them makes the operands of a case on a GPU; `tools/gemm_gate.py --swiglu`
times what it returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from llmq.base.dtypes import BF16, E4M3, F32, I32, DType
from llmq.base.operand import Fp8Out
from llmq.base.tensor import Tensor
from llmq.ops import matmul_fused, swiglu
from llmq.ops.matmul import matmul, matmul_fp8

if TYPE_CHECKING:
    from gemm_gate import Bench

LARGEST = 8.0  # of what is computed, beyond which codes saturate; its inputs have variance 1


class Case(NamedTuple):
    """A product of (M, K) with all F columns of the MLP; R: of its adapters, 0: none."""

    M: int
    F: int
    K: int
    R: int
    dtype: DType

    def nbytes(self, results: int) -> int:
        """The bytes of operands, and of two times `results` bytes for each of the M x F
        elements."""
        inputs = self.dtype.itemsize * self.K + BF16.itemsize * self.R
        return (self.M + 2 * self.F) * inputs + 2 * results * self.M * self.F


class Ways(NamedTuple):
    """product: alone, by the best that there was; two: with the other kernel behind it; one: both
    in one kernel. results: of two and of one, the same tensors of both."""

    product: Callable[[], None]
    two: Callable[[], None]
    one: Callable[[], None]
    results: tuple[list[Tensor], list[Tensor]]


class Results(NamedTuple):
    """Fp8 codes as with the recipe `delayed`: in both layouts, or with adapters, which want BF16
    beside, in that of the next product."""

    out: Tensor | None
    abs_max: Tensor | None
    fp8: Fp8Out | None

    @classmethod
    def made(cls, bench: Bench, case: Case, columns: int, scale: Tensor) -> Results:
        M, out = case.M, None
        if case.dtype == BF16 or case.R:
            out = bench.result("out", M, columns)
        if case.dtype == BF16:
            return cls(out, None, None)
        codes = bench.empty("codes", E4M3, M, columns)
        transposed = None if case.R else bench.empty("transposed", E4M3, columns, M)
        fp8 = Fp8Out(codes, transposed, scale, bench.empty("saturated", I32, 1))
        return cls(out, bench.empty("abs_max", F32, 1), fp8)

    def tensors(self) -> list[Tensor]:
        fp8 = () if self.fp8 is None else (self.fp8.codes, self.fp8.transposed, self.fp8.saturated)
        return [x for x in (self.out, self.abs_max, *fp8) if x is not None]


def _scales(bench: Bench, case: Case, spread: float) -> tuple[Tensor, ...]:
    """The scales of the product's fp8 codes. spread: the standard deviation of its result."""
    if case.dtype == BF16:
        return ()
    return (bench.scale((spread / bench.deviation("a", "b")) ** 0.5 * case.K**-0.25),) * 2


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
    scales = _scales(bench, case, 1.0)
    scale = bench.scale(LARGEST / 448)
    up_gate, same_up_gate = (bench.result("up_gate", M, 2 * F) for _ in range(2))
    old, new = (Results.made(bench, case, F, scale) for _ in range(2))

    def product() -> None:
        if R:
            matmul_fused.adapted(dev, up_gate, a, b, h, tail, *scales)
        elif scales:
            matmul_fp8(dev, up_gate, a, b, *scales, fast_accumulation=True)
        else:
            matmul(dev, up_gate, a, b, trans_b=True)

    def two() -> None:
        product()
        swiglu.forward(dev, old.out, up_gate, abs_max=old.abs_max, fp8=old.fp8)

    def one() -> None:
        matmul_fused.swiglu(
            dev, same_up_gate, new.out, a, b, h, tail, *scales, abs_max=new.abs_max, fp8=new.fp8
        )

    results = ([up_gate, *old.tensors()], [same_up_gate, *new.tensors()])
    return Ways(product, two, one, results)


def backward(bench: Bench, case: Case, *, again: bool = False) -> Ways:
    """The down product's input gradient. again: with the activation's codes, transposed."""
    M, F, K, R, dtype = case
    dev = bench.dev
    a = bench.operand("a", dtype, M, K, 0.3)
    shape = (K, F) if dtype == BF16 else (F, K)
    b = bench.operand("b", dtype, *shape, 0.0, size=1 / math.sqrt(K))
    h = tail = None
    if R:
        h = bench.operand("h", BF16, M, R, 0.0)
        tail = bench.operand("tail", BF16, R, F, 0.0, size=0.05)
    scales = _scales(bench, case, 1.0)
    scale = bench.scale(LARGEST / 448)
    up_gate = bench.operand("up_gate", BF16, M, 2 * F, 0.0)
    d_out = bench.result("d_out", M, F)
    old, new = (Results.made(bench, case, 2 * F, scale) for _ in range(2))
    old_act, new_act = (
        Fp8Out(None, bench.empty("act", E4M3, F, M), scale, bench.empty("saturated", I32, 1))
        if again
        else None
        for _ in range(2)
    )

    def product() -> None:
        if R:
            matmul_fused.adapted(dev, d_out, a, b, h, tail, *scales, transposed=True)
        elif scales:
            matmul_fp8(dev, d_out, a, b, *scales, fast_accumulation=True)
        else:
            matmul(dev, d_out, a, b)

    def two() -> None:
        product()
        swiglu.backward(
            dev, old.out, d_out, up_gate, abs_max=old.abs_max, fp8=old.fp8, out_fp8=old_act
        )

    def one() -> None:
        matmul_fused.swiglu_backward(
            dev, new.out, a, b, up_gate, h, tail, *scales,
            abs_max=new.abs_max, fp8=new.fp8, out_fp8=new_act,
        )  # fmt: skip

    def results(made: Results, act: Fp8Out | None) -> list[Tensor]:
        return made.tensors() + ([] if act is None else [act.transposed, act.saturated])

    return Ways(product, two, one, (results(old, old_act), results(new, new_act)))


# For each element of the activation: up_gate, out and its codes; d_up_gate and its codes, and of
# up_gate and d_out, which both ways share, half.
FORWARD_BYTES, BACKWARD_BYTES = 2 * 2 + 2 + 2, 2 * (2 + 2) + 3
AGAIN_BYTES, again = BACKWARD_BYTES + 1, partial(backward, again=True)  # with act's
# Name: what makes the case, the case, and bytes of its results.
CASES: dict[str, tuple[Callable[[Bench, Case], Ways], Case, int]] = {
    "0.5B forward, fp8": (forward, Case(32768, 4864, 896, 0, E4M3), FORWARD_BYTES),
    "1.5B forward, fp8": (forward, Case(32768, 8960, 1536, 0, E4M3), FORWARD_BYTES),
    "7B forward, fp8": (forward, Case(16384, 18944, 3584, 0, E4M3), FORWARD_BYTES),
    "7B LoRA forward, fp8": (forward, Case(4096, 18944, 3584, 32, E4M3), FORWARD_BYTES),
    "0.5B forward, bf16": (forward, Case(32768, 4864, 896, 0, BF16), FORWARD_BYTES),
    "1.5B forward, bf16": (forward, Case(32768, 8960, 1536, 0, BF16), FORWARD_BYTES),
    "7B forward, bf16": (forward, Case(16384, 18944, 3584, 0, BF16), FORWARD_BYTES),
    "0.5B backward, fp8": (backward, Case(32768, 4864, 896, 0, E4M3), BACKWARD_BYTES),
    "1.5B backward, fp8": (backward, Case(32768, 8960, 1536, 0, E4M3), BACKWARD_BYTES),
    "7B backward, fp8": (backward, Case(16384, 18944, 3584, 0, E4M3), BACKWARD_BYTES),
    "0.5B backward, fp8, again": (again, Case(32768, 4864, 896, 0, E4M3), AGAIN_BYTES),
    "1.5B backward, fp8, again": (again, Case(32768, 8960, 1536, 0, E4M3), AGAIN_BYTES),
    "7B backward, fp8, again": (again, Case(16384, 18944, 3584, 0, E4M3), AGAIN_BYTES),
    "7B LoRA backward, fp8": (backward, Case(4096, 18944, 3584, 16, E4M3), BACKWARD_BYTES),
    "0.5B backward, bf16": (backward, Case(32768, 4864, 896, 0, BF16), BACKWARD_BYTES),
    "1.5B backward, bf16": (backward, Case(32768, 8960, 1536, 0, BF16), BACKWARD_BYTES),
    "7B backward, bf16": (backward, Case(16384, 18944, 3584, 0, BF16), BACKWARD_BYTES),
}
