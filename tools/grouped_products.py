"""Products of rows that are sorted by expert, beside one dense product of the same FLOPs.

`row` measures a case on a GPU for `tools/gemm_gate.py --grouped`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmq.base.dtypes import BF16, E4M3, I32, STEP_SCALARS_WORDS, DType
from llmq.base.tensor import Accumulator, Tensor
from llmq.ops import grouped, matmul_fused
from llmq.ops.matmul import matmul, matmul_fp8

if TYPE_CHECKING:
    from gemm_gate import Bench


class Case(NamedTuple):
    """A matrix (N, K) of each of E experts, and R rows, which choose their experts at random.

    way: "forward", "input" or "weight", for the gradients of these.
    """

    R: int
    N: int
    K: int
    E: int
    way: str

    @property
    def nbytes(self) -> int:
        """Bytes of operands, and of two results."""
        R, N, K, E, _ = self
        return 2 * (3 * R * (N + K) + 3 * (E + 1) * N * K)


ROWS, REPEATS = 16384 * 8, 16
Ways = dict[str, Callable[[], None]]


def ways(bench: Bench, case: Case, dtype: DType) -> tuple[Ways, tuple[Tensor, Tensor] | None]:
    """The library's dense product, the generic kernel (BF16), and that for Hopper; and the results
    of the last two."""
    R, N, K, E, way = case
    counts = np.random.default_rng(1).multinomial(R, np.full(E, 1 / E))
    starts = bench.empty("starts", I32, E + 1)
    bench.dev.upload(starts, np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
    if way == "weight":
        return _of_weight(bench, case, starts, dtype)
    features, inner = (N, K) if way == "forward" else (K, N)
    last = way == "forward" or dtype != BF16  # codes lie with the sum's dimension last
    matrix = (features, inner) if last else (inner, features)
    a = _repeated(bench, "a", dtype, (ROWS // REPEATS, inner), REPEATS, 0.3)
    flat = _repeated(bench, "b", dtype, matrix, E, 0.0)
    b, one = flat.view(E, *matrix), flat.rows(0, matrix[0])
    out, other = bench.result("out", R, features), bench.result("other", R, features)
    if dtype == E4M3:
        scales = (bench.scale(), bench.scale())
        return {
            "dense": partial(matmul_fp8, bench.dev, other, a, one, *scales, fast_accumulation=True),
            "hopper": partial(
                matmul_fused.grouped, bench.dev, out, a, b, starts, None, None, *scales
            ),
        }, None
    generic = partial(grouped.grouped_matmul, bench.dev, other, a, b, starts, trans_b=last)
    return {
        "dense": partial(matmul, bench.dev, other, a, one, trans_b=last),
        "generic": generic,
        "hopper": partial(matmul_fused.grouped, bench.dev, out, a, b, starts, transposed=not last),
    }, (other, out)


def _repeated(
    bench: Bench, name: str, dtype: DType, shape: tuple[int, int], times: int, spread: float
) -> Tensor:
    """An operand so many times below itself, which is made faster than one as large."""
    rows, columns = shape
    one = bench.operand(f"{name}.1", dtype, rows, columns, spread)
    whole = bench.dev.alloc(name, (times * rows, columns), dtype, "Activations")
    for i in range(times):
        bench.dev.copy(whole.rows(i * rows, (i + 1) * rows), one)
    return whole


def _of_weight(
    bench: Bench, case: Case, starts: Tensor, dtype: DType
) -> tuple[Ways, tuple[Tensor, Tensor]]:
    _, N, K, E, _ = case
    d_y, x = (
        _repeated(bench, name, BF16, (ROWS // REPEATS, columns), REPEATS, 0.3)
        for name, columns in (("d_y", N), ("x", K))
    )
    scalars, dense = bench.empty("scalars", I32, STEP_SCALARS_WORDS), bench.result("dense", N, K)
    old, new = (
        Accumulator(bench.empty(name, BF16, E, N, K), True, scalars, 1) for name in ("old", "new")
    )
    return {
        "dense": partial(matmul, bench.dev, dense, d_y, x, trans_a=True),
        "generic": partial(grouped.grouped_gradient, bench.dev, old, d_y, x, starts),
        "hopper": partial(matmul_fused.grouped_gradient, bench.dev, new, d_y, x, starts),
    }, (old.tensor, new.tensor)


def row(bench: Bench, case: Case, dtype: DType, seconds: float) -> str:
    """TFLOP/s of each way, ours over the dense product, and the bytes that two kernels share."""
    runs, results = ways(bench, case, dtype)
    for run in runs.values():
        run()  # which tunes
    bench.dev.synchronize()
    equal = "-" if results is None else f"{bench.equal(*results):.1%}"
    found = bench.under_load(runs, seconds)
    rates = {
        name: 2 * case.R * case.N * case.K / load.seconds / 1e12 for name, load in found.items()
    }
    cells = [f"{rates[name]:.0f}" if name in rates else "-" for name in NAMES]
    return " | ".join([*cells, f"{rates['hopper'] / rates['dense']:.1%}", equal])


NAMES = ("dense", "generic", "hopper")
_MATRICES = {  # N, K, experts
    "30B-A3B up": (1536, 2048, 128),
    "30B-A3B down": (2048, 768, 128),
    "OLMoE up": (2048, 2048, 64),
    "OLMoE down": (2048, 1024, 64),
}
CASES: dict[str, tuple[Case, DType]] = {
    f"{name}, {way}, {dtype.name}": (Case(ROWS, *sizes, way), dtype)
    for dtype in (BF16, E4M3)
    for name, sizes in _MATRICES.items()
    for way in ("forward", "input", "weight")
    if dtype == BF16 or way != "weight"
}
