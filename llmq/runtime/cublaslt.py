"""Matrix products through cuBLASLt: one plan a shape, run by its fastest algorithm.

cuBLASLt thinks in columns: a row-major matrix (rows, cols) is its column-major (cols, rows) with
leading dimension cols. So out = op(a) @ op(b) is asked for as out^T = op(b)^T @ op(a)^T, operands
swapped and transposition flags as they are.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmq.dtypes import BF16, F32, DType
from llmq.errors import LlmqError
from llmq.runtime.algorithm_file import algorithm_file
from llmq.runtime.kernel import POINTER_ALIGN
from llmq.runtime.tensor import Tensor

CANDIDATES = 12  # algorithms asked of the heuristic
RUNS = 5  # timed runs of each
MIN_GAIN = 0.99  # an algorithm further down must take less than this share of the best one's time

COMPUTE_32F = 68  # cublasComputeType_t: products summed in F32, and no TF32 for F32 operands
CUDA_TYPES = {F32: 0, BF16: 14}  # cudaDataType_t
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2  # cudaMemcpyKind


class Product(NamedTuple):
    """Everything that tells one plan from another; all matrices are contiguous."""

    M: int
    N: int
    K: int
    trans_a: bool
    trans_b: bool
    operand: DType
    out: DType
    bias: bool
    accumulate: bool
    workspace: int  # bytes that the library may use

    @property
    def layouts(self) -> tuple[tuple[int, int, int], ...]:
        """Column-major (rows, columns, leading dimension) of b, a and out, in cuBLASLt's order."""
        b = (self.K, self.N) if self.trans_b else (self.N, self.K)
        a = (self.M, self.K) if self.trans_a else (self.K, self.M)
        return tuple((rows, columns, rows) for rows, columns in (b, a, (self.N, self.M)))

    def __str__(self) -> str:
        flags = "".join("t" if flag else "n" for flag in (self.trans_a, self.trans_b))
        text = f"{self.M}x{self.N}x{self.K} {flags} {self.operand.name}->{self.out.name}"
        text += (" bias" if self.bias else "") + (" accumulate" if self.accumulate else "")
        return f"{text}, {self.workspace} bytes of workspace"


class Operands(NamedTuple):
    """The tensors of one call."""

    out: Tensor
    a: Tensor
    b: Tensor
    bias: Tensor | None
    workspace: Tensor


class Plan:
    """cuBLASLt's description of one product, and the algorithm that computes it."""

    __slots__ = ("algorithm", "beta", "bias", "desc", "layouts", "product")

    def __init__(self, product: Product, desc: int, layouts: tuple[int, ...]):
        self.product = product
        self.desc = desc
        self.layouts = layouts  # of b, a, out
        self.algorithm: np.ndarray | None = None  # uint8 (64,)
        self.beta = np.array([1.0 if product.accumulate else 0.0], np.float32)
        self.bias = np.zeros(1, np.int64)  # address of this call's bias


class CublasLt:
    """The matrix-product library of one rank; for the rank's thread, with its GPU current.

    The matmul method takes a stream and the arguments of the library kernel `matmul` that
    llmq/ops/matmul.py declares.
    """

    def __init__(
        self,
        device_name: str,
        *,
        tune: bool,
        cache_path: Path | None,
        library: Any = None,
        cuda: Any = None,
    ):
        """tune: time the heuristic's best candidates when a product is first seen, on its own
        operands; else take the heuristic's first. device_name: with cuBLASLt's version, what a
        tuned algorithm holds for. cache_path: file of tuned algorithms, or None. library and cuda
        stand in for nvmath and CuPy in tests. Raises LlmqError where they cannot be loaded.
        """
        try:
            if library is None:
                from nvmath.bindings import cublasLt as library
            if cuda is None:
                from cupy_backends.cuda.api import runtime as cuda
            self._handle = library.create()
        except Exception as error:  # the loader raises what it likes
            raise LlmqError(
                f"cuBLASLt is not available ({error}); install nvidia-cublas and nvmath-python of "
                "CuPy's CUDA release"
            ) from error
        self._lt = library
        self._cuda = cuda
        self._tune_new = tune
        self._file = algorithm_file(cache_path)
        self._name = f"{device_name}, cuBLASLt {library.get_version()}"
        self._plans: dict[Product, Plan] = {}
        self._alpha = np.ones(1, np.float32)

    def matmul(self, stream: int, *args: Any) -> None:
        """Enqueue out = op(a) @ op(b) [+ bias] [+ out] on the stream (an integer).

        Raises RuntimeError for a product that cuBLASLt cannot compute, and inside a graph capture
        for one that would have to be tuned first.
        """
        plan = self.prepare(stream, *args)
        self._run(stream, plan, plan.algorithm, Operands(*args[:5]))

    def prepare(
        self,
        stream: int,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        workspace: Tensor,
        M: int,
        N: int,
        K: int,
        trans_a: int,
        trans_b: int,
        accumulate: int,
    ) -> Plan:
        """The plan of matmul(...) with these arguments, made and tuned if it is a new one.

        Tuning synchronizes; it overwrites out, unless accumulate: then out keeps its content.
        """
        transposed = (bool(trans_a), bool(trans_b))
        rest = (a.dtype, out.dtype, bias is not None, bool(accumulate), workspace.nbytes)
        product = Product(M, N, K, *transposed, *rest)
        plan = self._plans.get(product)
        if plan is None:
            plan = self._describe(product)
            plan.algorithm = self._choose(stream, plan, Operands(out, a, b, bias, workspace))
            self._plans[product] = plan
        return plan

    def close(self) -> None:
        """Free the library's descriptors and its handle."""
        for plan in self._plans.values():
            for layout in plan.layouts:
                self._lt.matrix_layout_destroy(layout)
            self._lt.matmul_desc_destroy(plan.desc)
        self._plans.clear()
        self._lt.destroy(self._handle)

    def _describe(self, product: Product) -> Plan:
        lt = self._lt
        desc = lt.matmul_desc_create(COMPUTE_32F, CUDA_TYPES[F32])
        attribute = lt.MatmulDescAttribute
        # The first operand of out^T = op(b)^T @ op(a)^T is b.
        values = {attribute.TRANSA: product.trans_b, attribute.TRANSB: product.trans_a}
        if product.bias:
            values[attribute.EPILOGUE] = lt.Epilogue.BIAS
            # Not an address yet: the heuristic reads from it how the bias will be aligned.
            values[attribute.BIAS_POINTER] = POINTER_ALIGN
        for name, value in values.items():
            buffer = np.array([value], lt.get_matmul_desc_attribute_dtype(name))
            lt.matmul_desc_set_attribute(desc, name, buffer.ctypes.data, buffer.nbytes)
        dtypes = (product.operand, product.operand, product.out)
        layouts = tuple(
            lt.matrix_layout_create(CUDA_TYPES[dtype], *layout)
            for dtype, layout in zip(dtypes, product.layouts, strict=True)
        )
        return Plan(product, desc, layouts)

    def _choose(self, stream: int, plan: Plan, operands: Operands) -> np.ndarray:
        """The algorithm to run, uint8 (64,): remembered, or tuned, or the heuristic's first."""
        if not self._tune_new:
            return self._candidates(plan, 1)[0]
        key = f"{self._name}, {plan.product}"
        remembered = self._file.get(key)
        if remembered is not None:
            algorithm = np.frombuffer(remembered, np.uint8)
            if self._accepts(plan, algorithm):
                return algorithm
        fastest = self._tune(stream, plan, operands)
        chosen = self._file.publish(key, fastest.tobytes(), instead_of=remembered)
        return np.frombuffer(chosen, np.uint8)

    def _candidates(self, plan: Plan, count: int) -> list[np.ndarray]:
        """Up to `count` algorithms, best first by the heuristic's estimate."""
        lt = self._lt
        attribute = lt.MatmulPreferenceAttribute
        values = {
            attribute.MAX_WORKSPACE_BYTES: plan.product.workspace,
            # Split sums must meet in F32. The other schemes would round them to BF16 in between.
            attribute.REDUCTION_SCHEME_MASK: lt.ReductionScheme.COMPUTE_TYPE,
            attribute.MIN_ALIGNMENT_A_BYTES: POINTER_ALIGN,
            attribute.MIN_ALIGNMENT_B_BYTES: POINTER_ALIGN,
            attribute.MIN_ALIGNMENT_C_BYTES: POINTER_ALIGN,
            attribute.MIN_ALIGNMENT_D_BYTES: POINTER_ALIGN,
        }
        results = np.zeros(count, lt.matmul_heuristic_result_dtype)
        found = np.zeros(1, np.int32)
        preference = lt.matmul_preference_create()
        try:
            for name, value in values.items():
                buffer = np.array([value], lt.get_matmul_preference_attribute_dtype(name))
                lt.matmul_preference_set_attribute(
                    preference, name, buffer.ctypes.data, buffer.nbytes
                )
            lt.matmul_algo_get_heuristic(
                self._handle,
                plan.desc,
                *self._all_layouts(plan),
                preference,
                count,
                results.ctypes.data,
                found.ctypes.data,
            )
        except lt.cuBLASLtError as error:
            raise RuntimeError(self._no_algorithm(plan)) from error
        finally:
            lt.matmul_preference_destroy(preference)
        usable = [r["algo"].tobytes() for r in results[: found[0]] if r["state"] == 0]
        if not usable:
            raise RuntimeError(self._no_algorithm(plan))
        return [np.frombuffer(algorithm, np.uint8) for algorithm in usable]

    def _tune(self, stream: int, plan: Plan, operands: Operands) -> np.ndarray:
        """The fastest of the heuristic's candidates, each timed on the operands of this call."""
        cuda, out = self._cuda, operands.out
        if cuda.streamIsCapturing(stream):
            raise RuntimeError(
                f"matmul: {plan.product} was not seen before this graph capture, in which it "
                "cannot be tuned; run it once outside of the graph, or switch tuning off"
            )
        if plan.product.accumulate:
            saved = np.empty(out.nbytes, np.uint8)
            cuda.memcpyAsync(saved.ctypes.data, out.ptr, out.nbytes, DEVICE_TO_HOST, stream)
        events = [cuda.eventCreate() for _ in range(RUNS + 1)]
        best, best_time = None, float("inf")
        for algorithm in self._candidates(plan, CANDIDATES):
            time = self._time(stream, plan, algorithm, operands, events)
            if time < best_time * MIN_GAIN:
                best, best_time = algorithm, time
        for event in events:
            cuda.eventDestroy(event)
        if plan.product.accumulate:
            cuda.memcpyAsync(out.ptr, saved.ctypes.data, out.nbytes, HOST_TO_DEVICE, stream)
        cuda.streamSynchronize(stream)
        if best is None:
            raise RuntimeError(self._no_algorithm(plan))
        return best

    def _time(
        self,
        stream: int,
        plan: Plan,
        algorithm: np.ndarray,
        operands: Operands,
        events: list[int],
    ) -> float:
        """Median milliseconds of a run; infinite if cuBLASLt refuses to run it after all."""
        cuda = self._cuda
        try:
            self._run(stream, plan, algorithm, operands)  # loads the code
        except self._lt.cuBLASLtError:
            return float("inf")
        cuda.streamSynchronize(stream)
        cuda.eventRecord(events[0], stream)
        for event in events[1:]:
            self._run(stream, plan, algorithm, operands)
            cuda.eventRecord(event, stream)
        cuda.eventSynchronize(events[-1])
        pairs = itertools.pairwise(events)
        return statistics.median(cuda.eventElapsedTime(start, stop) for start, stop in pairs)

    def _accepts(self, plan: Plan, algorithm: np.ndarray) -> bool:
        """Whether cuBLASLt accepts a remembered algorithm for this product and workspace."""
        lt = self._lt
        result = np.zeros(1, lt.matmul_heuristic_result_dtype)
        try:
            lt.matmul_algo_check(
                self._handle,
                plan.desc,
                *self._all_layouts(plan),
                algorithm.ctypes.data,
                result.ctypes.data,
            )
        except lt.cuBLASLtError:
            return False
        return int(result["workspace_size"][0]) <= plan.product.workspace

    def _run(self, stream: int, plan: Plan, algorithm: np.ndarray, operands: Operands) -> None:
        lt = self._lt
        out, a, b, bias, workspace = operands
        if bias is not None:
            plan.bias[0] = bias.ptr
            pointer = lt.MatmulDescAttribute.BIAS_POINTER
            lt.matmul_desc_set_attribute(plan.desc, pointer, plan.bias.ctypes.data, 8)
        layout_b, layout_a, layout_out = plan.layouts
        lt.matmul(
            self._handle,
            plan.desc,
            self._alpha.ctypes.data,
            b.ptr,
            layout_b,
            a.ptr,
            layout_a,
            plan.beta.ctypes.data,
            out.ptr,
            layout_out,
            out.ptr,
            layout_out,
            algorithm.ctypes.data,
            workspace.ptr,
            workspace.nbytes,
            stream,
        )

    def _all_layouts(self, plan: Plan) -> tuple[int, ...]:
        """The layouts of A, B, C and D; C is D."""
        return (*plan.layouts, plan.layouts[-1])

    def _no_algorithm(self, plan: Plan) -> str:
        return f"matmul: {self._name} has no algorithm for {plan.product}"
