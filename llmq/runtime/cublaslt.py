"""cuBLASLt computes matrix products: each product has a plan, which names its fastest algorithm.

cuBLASLt is column-major, and reads a row-major matrix (rows, cols) as a column-major (cols, rows)
with leading dimension cols. A product out = op(a) @ op(b) is therefore computed as out^T = op(b)^T
@ op(a)^T, with swapped operands and unchanged transposition flags.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from llmq.base.errors import LlmqError
from llmq.base.stopwatch import START
from llmq.base.tensor import POINTER_ALIGN, Tensor
from llmq.runtime.product import (
    BETA,
    Algorithm,
    Operands,
    Plan,
    Product,
    computes_right,
    describe,
    free,
    set_attribute,
)
from llmq.runtime.tuning import CHOICE_BYTES, Unsupported, algorithm_file, fastest

CANDIDATES = 48  # number of algorithms requested from the library's heuristic


def _method(names: str) -> Callable[..., None]:
    """Return a method that enqueues a product. names: the method's arguments in order, equal to the
    arguments of the library kernel of this name in llmq/ops/product/matmul.py. If `names` lacks
    trans_a and trans_b, the product is a @ b^T."""
    fields = names.split()

    def enqueue(self: CublasLt, stream: int, *args: Any) -> None:
        values = dict(zip(fields, args, strict=False))
        out, a, b = (values[name] for name in ("out", "a", "b"))
        scales = values.pop("scales", None)
        if scales is not None:
            values |= {"scale_a": scales, "scale_b": scales, "fast_accumulation": False}
        product = Product(
            *(values[size] for size in "MNK"),
            trans_a=bool(values.get("trans_a", False)),
            trans_b=bool(values.get("trans_b", True)),
            a=a.dtype,
            b=b.dtype,
            out=out.dtype,
            bias=values["bias"] is not None,
            accumulate=bool(values["accumulate"]),
            workspace=values["workspace"].nbytes,
            fast_accumulation=bool(values.get("fast_accumulation", False)),
            addend=values["addend"] is not None,
            block_scaled=scales is not None,
            batch=values.get("batch", 1),
        )
        operands = {name: values[name] for name in Operands._fields if name in values}
        self._multiply(stream, product, Operands(**operands))

    return enqueue


class CublasLt:
    """The matrix-product library of one rank, for the rank's thread with its GPU current. Methods
    that enqueue products take a stream (an integer handle) and the arguments of their kernels.
    These methods raise Unsupported if cuBLASLt cannot compute the product, and RuntimeError inside
    a graph capture if the product is not tuned yet."""

    def __init__(
        self,
        device_name: str,
        *,
        tune: bool,
        cache_path: Path | None,
        library: Any = None,
        cuda: Any = None,
    ):
        """tune: True to time the heuristic's best algorithms at the first call of a product, on the
        operands of the call; False to take the heuristic's first algorithm. device_name: name that,
        with cuBLASLt's version, becomes part of the key of a tuned algorithm. cache_path: file of
        tuned algorithms, or None. library, cuda: replacements of nvmath and CuPy for tests. Raises
        LlmqError if nvmath or CuPy cannot be loaded."""
        try:
            with START.part("loading cuBLASLt"):
                if library is None:
                    from nvmath.bindings import cublasLt as library
                if cuda is None:
                    from cupy.cuda import runtime as cuda
                self._handle = library.create()
        except Exception as error:  # the loader raises errors of many classes
            raise LlmqError(
                f"cuBLASLt is not available ({error}); install nvidia-cublas and nvmath-python of "
                "CuPy's CUDA release"
            ) from error
        self._lt = library
        self.errors = (library.cuBLASLtError,)  # classes of errors of enqueued calls
        self._cuda = cuda
        self._tune_new = tune
        self._file = algorithm_file(cache_path)
        self._name = f"{device_name}, cuBLASLt {library.get_version()}"
        self.plans: dict[Product, Plan] = {}
        self._factors = np.empty(2, np.float32)  # alpha and beta of a call
        self._block_scales_work: bool | None = None  # None until a test has run

    matmul = _method(
        "out a b bias addend workspace M N K trans_a trans_b accumulate alpha beta batch"
    )
    """Enqueue out = alpha * op(a) @ op(b) [+ bias] [+ beta * (addend | out)]. batch: number of
    products."""

    fp8 = _method(
        "out a b scale_a scale_b bias factor largest addend workspace M N K accumulate "
        "fast_accumulation alpha"
    )
    """Enqueue out = alpha * scale_a * scale_b * (a @ b^T) [+ bias] [+ addend | + out]. If out holds
    codes, `factor` multiplies the results before rounding, and `largest` receives the largest
    magnitude before the multiplication. fast_accumulation: True to allow fast accumulation; tuning
    decides whether products use it, and without tuning all do. GPUs before Ada cannot compute fp8
    products."""

    mxfp8 = _method(
        "out a b scales scalars bias addend workspace M N K accumulate fast_accumulation"
    )
    """Enqueue out = alpha * (a @ b^T) [+ bias] [+ addend | + out]. scales: the block scales of both
    operands, which are all 1. scalars: F32 array with alpha, and at index BETA the number 1 if
    something is added, else 0. fast_accumulation: has no effect, because sums are F32. Raises
    Unsupported also if the library's results are wrong."""

    def close(self) -> None:
        for plan in self.plans.values():
            free(self._lt, plan)
        self.plans.clear()
        self._lt.destroy(self._handle)

    def _multiply(self, stream: int, product: Product, operands: Operands) -> None:
        """Enqueue the product. The first call of a product makes its plan and tunes the plan on
        these operands. Tuning waits for the stream and overwrites `out`; with accumulate, the
        content of `out` is restored."""
        plan = self.plans.get(product)
        if plan is None:
            plan = describe(self._lt, product)
            try:
                plan.choice = self._choose(stream, plan, operands)
            except Unsupported:
                free(self._lt, plan)
                raise
            self._accumulate_fast(plan, plan.choice.fast)
            self.plans[product] = plan
        self._run(stream, plan, plan.choice.algorithm, operands)

    def _try_block_scales(self, stream: int, workspace: Tensor) -> None:
        """Raise Unsupported if block-scaled products have wrong results; the first call tests this
        for all calls."""

        def run(product: Product, operands: Operands) -> None:
            plan = describe(self._lt, product)
            try:
                algorithm = self._candidates(plan, 1, False)[0].algorithm
                self._run(stream, plan, algorithm, operands)
            finally:
                free(self._lt, plan)

        if self._block_scales_work is None:
            try:
                right = computes_right(self._cuda, stream, workspace, run)
            except (Unsupported, self._lt.cuBLASLtError):
                right = False
            self._block_scales_work = right
        if not self._block_scales_work:
            raise Unsupported(f"matmul: {self._name} does not compute block-scaled products")

    @START.part("choosing products")
    def _choose(self, stream: int, plan: Plan, operands: Operands) -> Algorithm:
        """Return the algorithm to run: an algorithm from the file, else the fastest one, or the
        heuristic's first without tuning."""
        if not self._tune_new:
            return self._candidates(plan, 1, plan.product.fast_accumulation)[0]
        key = f"{self._name}, {plan.product}"
        remembered = self._file.get(key)
        if remembered is not None and len(remembered) == CHOICE_BYTES:
            choice = Algorithm.frombytes(remembered)
            if self._accepts(plan, choice):
                return choice
        fastest = self._tune(stream, plan, operands)
        chosen = self._file.publish(key, fastest.tobytes(), instead_of=remembered)
        return Algorithm.frombytes(chosen)

    def _accumulate_fast(self, plan: Plan, fast: bool) -> None:
        """Switch fast accumulation of an FP8 product on or off in the plan."""
        if plan.product.fp8 and not plan.product.block_scaled:
            name = self._lt.MatmulDescAttribute.FAST_ACCUM
            set_attribute(self._lt, "matmul_desc", plan.desc, name, fast)

    def _candidates(self, plan: Plan, count: int, fast: bool) -> list[Algorithm]:
        """Return up to `count` algorithms for the plan, ordered by the heuristic's estimate, best
        first."""
        lt = self._lt
        self._accumulate_fast(plan, fast)
        attribute = lt.MatmulPreferenceAttribute
        values = {
            attribute.MAX_WORKSPACE_BYTES: plan.product.workspace,
            # Algorithms that split K must add partial sums in F32; other reduction schemes round
            # partial sums to BF16.
            attribute.REDUCTION_SCHEME_MASK: lt.ReductionScheme.COMPUTE_TYPE,
        }
        for matrix in "ABCD":
            values[getattr(attribute, f"MIN_ALIGNMENT_{matrix}_BYTES")] = POINTER_ALIGN
        results = np.zeros(count, lt.matmul_heuristic_result_dtype)
        count_found = np.zeros(1, np.int32)
        preference = lt.matmul_preference_create()
        try:
            for name, value in values.items():
                set_attribute(lt, "matmul_preference", preference, name, value)
            lt.matmul_algo_get_heuristic(
                self._handle,
                plan.desc,
                *plan.layouts,
                preference,
                count,
                results.ctypes.data,
                count_found.ctypes.data,
            )
        except lt.cuBLASLtError as error:
            raise Unsupported(self._no_algorithm(plan)) from error
        finally:
            lt.matmul_preference_destroy(preference)
        usable = [r["algo"].tobytes() for r in results[: count_found[0]] if r["state"] == 0]
        if not usable:
            raise Unsupported(self._no_algorithm(plan))
        return [Algorithm(np.frombuffer(algorithm, np.uint8), fast) for algorithm in usable]

    def _tune(self, stream: int, plan: Plan, operands: Operands) -> Algorithm:
        """Return the fastest of the heuristic's candidates, timed on the operands of this call."""
        cuda = self._cuda
        if cuda.streamIsCapturing(stream):
            raise RuntimeError(
                f"matmul: {plan.product} was not seen before this graph capture, in which it "
                "cannot be tuned; run it once outside of the graph, or switch tuning off"
            )
        if plan.product.block_scaled:
            self._try_block_scales(stream, operands.workspace)
        # exact algorithms come first, to win ties
        candidates = self._candidates(plan, CANDIDATES, False)
        if plan.product.fast_accumulation:
            candidates += self._candidates(plan, CANDIDATES, True)

        def run(choice: Algorithm) -> None:
            self._accumulate_fast(plan, choice.fast)
            self._run(stream, plan, choice.algorithm, operands)

        kept = (operands.out,) if plan.product.accumulate else ()
        best = fastest(cuda, stream, candidates, run, self._lt.cuBLASLtError, kept)
        if best is None:
            raise Unsupported(self._no_algorithm(plan))
        return best

    def _accepts(self, plan: Plan, choice: Algorithm) -> bool:
        """True if cuBLASLt accepts a remembered algorithm for this product and workspace."""
        lt = self._lt
        self._accumulate_fast(plan, choice.fast)
        result = np.zeros(1, lt.matmul_heuristic_result_dtype)
        try:
            lt.matmul_algo_check(
                self._handle,
                plan.desc,
                *plan.layouts,
                choice.algorithm.ctypes.data,
                result.ctypes.data,
            )
        except lt.cuBLASLtError:
            return False
        return int(result["workspace_size"][0]) <= plan.product.workspace

    def _run(self, stream: int, plan: Plan, algorithm: np.ndarray, operands: Operands) -> None:
        lt = self._lt
        out, a, b, bias, addend, workspace, scale_a, scale_b, *others = operands
        factor, largest, scalars, *factors = others
        # alpha and beta lie in host memory; the library reads the two before it returns.
        self._factors[:] = factors[0], factors[1] if plan.product.adds else 0.0
        alpha, beta = self._factors.ctypes.data, self._factors[1:].ctypes.data
        if scalars is not None:
            alpha, beta = scalars.ptr, scalars.ptr + BETA * scalars.dtype.itemsize
        added = out if addend is None else addend
        # Addresses differ in each call. lt.matmul reads the descriptor before it returns, so a
        # captured graph keeps the addresses of its own call.
        if bias is not None:
            self._point(plan, lt.MatmulDescAttribute.BIAS_POINTER, bias)
        if scale_a is not None:
            self._point(plan, lt.MatmulDescAttribute.A_SCALE_POINTER, scale_b)
            self._point(plan, lt.MatmulDescAttribute.B_SCALE_POINTER, scale_a)
        if factor is not None:
            self._point(plan, lt.MatmulDescAttribute.D_SCALE_POINTER, factor)
            self._point(plan, lt.MatmulDescAttribute.AMAX_D_POINTER, largest)
        layout_b, layout_a, layout_added, layout_out = plan.layouts
        lt.matmul(
            self._handle,
            plan.desc,
            alpha,
            b.ptr,
            layout_b,
            a.ptr,
            layout_a,
            beta,
            0 if plan.product.makes_codes else added.ptr,
            layout_added,
            out.ptr,
            layout_out,
            algorithm.ctypes.data,
            workspace.ptr,
            workspace.nbytes,
            stream,
        )

    def _point(self, plan: Plan, attribute: int, tensor: Tensor) -> None:
        plan.address[0] = tensor.ptr
        self._lt.matmul_desc_set_attribute(plan.desc, attribute, plan.address.ctypes.data, 8)

    def _no_algorithm(self, plan: Plan) -> str:
        hint = "; use --mlp-dtype bf16" if plan.product.makes_codes else ""
        return f"matmul: {self._name} has no algorithm for {plan.product}{hint}"
