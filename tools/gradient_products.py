"""Weight gradients that are added by their product, and the product and the sum behind it.

`gradient` makes the operands of a case on a GPU; `tools/gemm_gate.py --gradients` times what it
returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from fused_products import Ways

from llmq.base.dtypes import E4M3, I32, STEP_SCALARS_WORDS
from llmq.base.tensor import Accumulator
from llmq.ops import matmul_fused, reduce
from llmq.ops.matmul import matmul_fp8

if TYPE_CHECKING:
    from gemm_gate import Bench


class Case(NamedTuple):
    """The gradient (M, N) of a weight, over K tokens."""

    M: int
    N: int
    K: int

    def nbytes(self, results: int) -> int:
        """The bytes of operands, and of two times `results` bytes for each of the M x N
        elements."""
        return (self.M + self.N) * self.K + 2 * results * self.M * self.N


def gradient(bench: Bench, case: Case) -> Ways:
    """With exact sums, as `--fp8-fast-accumulation activations` has them."""
    M, N, K = case
    dev = bench.dev
    a, b = bench.operand("a", E4M3, M, K, 0.3), bench.operand("b", E4M3, N, K, 0.0)
    scales = (bench.scale(),) * 2
    scalars = bench.empty("scalars", I32, STEP_SCALARS_WORDS)
    alone = bench.result("alone", M, N)
    old, new = (Accumulator(bench.result("d", M, N), True, scalars, 1) for _ in range(2))

    def product() -> None:
        matmul_fp8(dev, alone, a, b, *scales)

    def two() -> None:
        product()
        reduce.add(dev, old, alone)

    def one() -> None:
        matmul_fused.gradient(dev, new, a, b, *scales)

    return Ways(product, two, one, ([old.tensor], [new.tensor]))


RESULT_BYTES = 2 + 1  # the sum; and half of what the library's product alone is
# Name: what makes the case, the case, and bytes of its results.
CASES: dict[str, tuple[Callable[[Bench, Case], Ways], Case, int]] = {
    name: (gradient, Case(*sizes), RESULT_BYTES)
    for name, sizes in {
        "0.5B up": (9728, 896, 32768),
        "1.5B qkv": (2048, 1536, 32768),
        "1.5B o": (1536, 1536, 32768),
        "1.5B up": (17920, 1536, 32768),
        "1.5B down": (1536, 8960, 32768),
        "3B up": (22016, 2048, 16384),
        "3B down": (2048, 11008, 16384),
        "7B qkv": (4608, 3584, 16384),
        "7B up": (37888, 3584, 16384),
        "7B down": (3584, 18944, 16384),
    }.items()
}
