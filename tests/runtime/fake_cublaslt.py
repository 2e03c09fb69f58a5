"""Stand-ins for cuBLASLt and the CUDA runtime, which compute in NumPy on host memory."""

import ctypes
import itertools
from types import SimpleNamespace

import numpy as np

from llmq.base.dtypes import BF16, E4M3, E4M3_MAX, E5M2, E5M2_MAX, F32
from llmq.runtime.product import COMPUTE_32F, CUDA_TYPES
from llmq.runtime.tuning import ALGORITHM_BYTES

# A code that two formats have is that of the first.
NUMPY_TYPES = {code: dtype.numpy for dtype, code in reversed(CUDA_TYPES.items())}
FP8 = (E4M3.numpy, E5M2.numpy)
FP8_MAX = {E4M3.numpy: E4M3_MAX, E5M2.numpy: E5M2_MAX}
WORKSPACE = 4096  # bytes
STREAM = 77
RESULT = np.dtype(
    [("algo", "u1", 64), ("workspace_size", "u8"), ("state", "i4"), ("waves", "f4"), ("r", "i4", 4)]
)


def memory(address: int, dtype: np.dtype, count: int) -> np.ndarray:
    """Elements at an address, in place."""
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(buffer, dtype)


class Refused(Exception):
    pass


class FakeCublasLt:
    """The used part of nvmath.bindings.cublasLt, over host memory.

    costs: what each of its algorithms adds to the clock; None: it is refused when run. fast_costs:
    that of FP8 products with fast accumulation, the same if not given; block_costs: of block-scaled
    ones, none if not given. ignores_alpha: what a library does with block scales that is wrong.
    """

    cuBLASLtError = Refused
    MatmulDescAttribute = SimpleNamespace(
        POINTER_MODE=2,
        TRANSA=3,
        TRANSB=4,
        EPILOGUE=7,
        BIAS_POINTER=8,
        A_SCALE_POINTER=17,
        B_SCALE_POINTER=18,
        D_SCALE_POINTER=20,
        AMAX_D_POINTER=21,
        FAST_ACCUM=25,
        BIAS_DATA_TYPE=26,
        A_SCALE_MODE=31,
        B_SCALE_MODE=32,
    )
    MatmulMatrixScale = SimpleNamespace(VEC32_UE8M0=2)
    PointerMode = SimpleNamespace(DEVICE=1)
    MatmulPreferenceAttribute = SimpleNamespace(
        MAX_WORKSPACE_BYTES=1,
        REDUCTION_SCHEME_MASK=3,
        MIN_ALIGNMENT_A_BYTES=5,
        MIN_ALIGNMENT_B_BYTES=6,
        MIN_ALIGNMENT_C_BYTES=7,
        MIN_ALIGNMENT_D_BYTES=8,
    )
    MatrixLayoutAttribute = SimpleNamespace(BATCH_COUNT=5, STRIDED_BATCH_OFFSET=6)
    Epilogue = SimpleNamespace(BIAS=4)
    ReductionScheme = SimpleNamespace(COMPUTE_TYPE=2)
    matmul_heuristic_result_dtype = RESULT

    def __init__(self, costs=(1.0,), version=130100, fast_costs=None, block_costs=()):
        self.costs = costs
        self.fast_costs = fast_costs or costs
        self.block_costs = block_costs
        self.ignores_alpha = False
        self.version = version
        self.clock = 0.0
        self.runs = []  # the algorithm of each product
        self.fast = []  # the fast accumulation flag of each FP8 product
        self.asked = []  # preferences of each heuristic call
        self.alive = {}
        self.batches = {}  # attributes of matrix layouts, by handle
        self.handles = itertools.count(1000)

    def _new(self, value):
        handle = next(self.handles)
        self.alive[handle] = value
        return handle

    def create(self):
        return self._new("library")

    def destroy(self, handle):
        assert self.alive.pop(handle) == "library"

    def get_version(self):
        return self.version

    def matmul_desc_create(self, compute_type, scale_type):
        assert (compute_type, scale_type) == (COMPUTE_32F, CUDA_TYPES[F32])
        return self._new({})

    def matrix_layout_create(self, dtype, rows, columns, leading):
        assert leading == rows
        return self._new((NUMPY_TYPES[dtype], rows, columns))

    def get_matrix_layout_attribute_dtype(self, name):
        return {5: np.int32, 6: np.int64}[name]

    def matrix_layout_set_attribute(self, handle, name, buffer, size):
        dtype = np.dtype(self.get_matrix_layout_attribute_dtype(name))
        assert size == dtype.itemsize and handle in self.alive
        self.batches.setdefault(handle, {})[name] = int(memory(buffer, dtype, 1)[0])

    def matmul_preference_create(self):
        return self._new({})

    def _free(self, handle):
        del self.alive[handle]

    matmul_desc_destroy = matrix_layout_destroy = matmul_preference_destroy = _free

    def get_matmul_desc_attribute_dtype(self, name):
        types = {7: np.uint32, 25: np.int8} | dict.fromkeys((8, 17, 18, 20, 21), np.int64)
        return types.get(name, np.int32)

    def get_matmul_preference_attribute_dtype(self, name):
        return {1: np.uint64}.get(name, np.uint32)

    def matmul_desc_set_attribute(self, handle, name, buffer, size):
        dtype = np.dtype(self.get_matmul_desc_attribute_dtype(name))
        assert size == dtype.itemsize
        self.alive[handle][name] = int(memory(buffer, dtype, 1)[0])

    def matmul_preference_set_attribute(self, handle, name, buffer, size):
        dtype = np.dtype(self.get_matmul_preference_attribute_dtype(name))
        assert size == dtype.itemsize
        self.alive[handle][name] = int(memory(buffer, dtype, 1)[0])

    def matmul_algo_get_heuristic(self, library, desc, a, b, c, d, preference, count, results, n):
        assert self.alive[library] == "library"
        self._check_added(c, d)
        pointers = (8, 17, 18, 20, 21)
        assert all(self.alive[desc].get(pointer, 16) % 16 == 0 for pointer in pointers)
        self.asked.append(dict(self.alive[preference]))
        found = min(count, len(self._costs(self.alive[desc])))
        for i, entry in enumerate(memory(results, RESULT, found)):
            entry["algo"] = i
        memory(n, np.dtype(np.int32), 1)[0] = found

    def matmul_algo_check(self, library, desc, a, b, c, d, algorithm, result):
        index = memory(algorithm, np.dtype(np.uint8), ALGORITHM_BYTES)[0]
        if index >= len(self._costs(self.alive[desc])):
            raise Refused("not supported")
        memory(result, RESULT, 1)["workspace_size"] = 2 * WORKSPACE * (index == 9)

    def matmul(self, library, desc, alpha, a, a_, b, b_, beta, c, c_, d, d_, algorithm, *rest):
        count = self.batches.get(d_, {}).get(5, 1)
        for i in range(count):
            matrices = zip((a, b, c, d), (a_, b_, c_, d_), strict=True)
            a_i, b_i, c_i, d_i = (address + self._place(i, of, count) for address, of in matrices)
            places = (a_i, a_, b_i, b_, beta, c_i, c_, d_i, d_)
            self._multiply(desc, alpha, *places, algorithm, *rest)

    def _place(self, i, layout, count):
        """Bytes from the first of `count` matrices to this one."""
        of = self.batches.get(layout, {5: 1, 6: 0})
        assert of[5] == count
        return i * of[6] * self.alive[layout][0].itemsize

    def _multiply(self, desc, alpha, a, a_, b, b_, beta, c, c_, d, d_, algorithm, *rest):
        self._check_added(c_, d_)
        codes = self.alive[d_][0] in FP8
        assert not (codes and c)
        _, nbytes, stream = rest
        planned = {WORKSPACE, *(asked[1] for asked in self.asked)}
        assert stream == STREAM and (nbytes in planned or not self.asked)
        index = int(memory(algorithm, np.dtype(np.uint8), ALGORITHM_BYTES)[0])
        cost = self._costs(self.alive[desc])[index]
        if cost is None:
            raise Refused("not supported")
        self.runs.append(index)
        self.clock += cost

        def columns(address, layout):
            dtype, rows, columns = self.alive[layout]
            return memory(address, dtype, rows * columns).reshape(columns, rows).T

        def scalar(address):
            return memory(address, np.dtype(np.float32), 1)[0]

        left, right, out = columns(a, a_), columns(b, b_), columns(d, d_)
        attributes = self.alive[desc]
        if left.dtype in FP8:
            self._check_fp8(attributes, left.dtype, right.dtype)
        if attributes.get(31):
            self._check_block_scales(attributes, left.shape, right.shape)
        left = left.T if attributes[3] else left
        right = right.T if attributes[4] else right
        total = left.astype(np.float32) @ right.astype(np.float32)
        total *= 1 if self.ignores_alpha and attributes.get(31) else scalar(alpha)
        for pointer in (17, 18):
            if pointer in attributes and not attributes.get(31):
                total *= scalar(attributes[pointer])
        if scalar(beta):
            total += scalar(beta) * columns(c, c_).astype(np.float32)
        if attributes.get(7) == 4:
            dtype = NUMPY_TYPES.get(attributes.get(26), out.dtype)
            total += memory(attributes[8], dtype, len(out)).astype(np.float32)[:, None]
        if codes:
            assert not scalar(beta)
            memory(attributes[21], np.dtype(np.float32), 1)[0] = np.abs(total).max()
            total = np.clip(total * scalar(attributes[20]), -FP8_MAX[out.dtype], FP8_MAX[out.dtype])
        else:
            assert not {20, 21} & attributes.keys()
        out[...] = total.astype(out.dtype)

    def _costs(self, attributes):
        if attributes.get(31):
            return self.block_costs
        return self.fast_costs if attributes.get(25) else self.costs

    def _check_block_scales(self, attributes, left, right):
        """Scales of blocks of 32 codes are all one, as many as there are in tiles of 128 x 4."""
        assert attributes[31] == attributes[32] == 2 and attributes[2] == 1
        for pointer, (depth, rows) in ((17, left), (18, right)):
            assert depth % 32 == 0
            count = -(-rows // 128) * 128 * -(-depth // 128) * 4
            assert (memory(attributes[pointer], np.dtype(np.uint8), count) == 127).all()

    def _check_added(self, c, d):
        """The rules of cuBLASLt for the layouts of C and D: C is in BF16 where D are codes."""
        dtype, *sizes = self.alive[d]
        assert c == d or (dtype in FP8 and self.alive[c] == (BF16.numpy, *sizes))
        assert dtype not in FP8 or c != d

    def _check_fp8(self, attributes, left, right):
        """The rules of cuBLASLt for products of FP8 codes."""
        assert right in FP8 and (left, right) != (E5M2.numpy, E5M2.numpy)
        assert (attributes[3], attributes[4]) == (1, 0)  # "TN"
        assert not attributes[17] % 16 and not attributes[18] % 16
        assert attributes.get(7) is None or NUMPY_TYPES[attributes[26]] == BF16.numpy
        if not attributes.get(31):
            self.fast.append(attributes[25])


class FakeCuda:
    """The used part of CuPy's CUDA runtime; events read the library's clock."""

    def __init__(self, library):
        self.library = library
        self.capturing = False
        self.events = {}

    def streamIsCapturing(self, stream):
        assert stream == STREAM
        return self.capturing

    def eventCreate(self):
        self.events[len(self.events)] = None
        return len(self.events) - 1

    def eventRecord(self, event, stream):
        self.events[event] = self.library.clock

    def eventElapsedTime(self, start, stop):
        return self.events[stop] - self.events[start]

    def memcpyAsync(self, dst, src, size, kind, stream):
        assert stream == STREAM and kind in (1, 2)
        ctypes.memmove(dst, src, size)

    def ignore(self, *args):
        pass

    eventDestroy = eventSynchronize = streamSynchronize = ignore
