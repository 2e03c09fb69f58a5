"""Block-scaled products (MXFP8) of codes that have one scale a tensor: all block scales are one.

GeForce cards of Blackwell multiply block-scaled codes at twice the speed of others. The scale of a
block of 32 codes along K is a byte, 2^(byte - 127), and cuBLASLt wants these bytes in tiles of 128
x 4. If all are alike, nothing but their number matters. The scales of the tensors are then the
factor `alpha`, which has to be in device memory, and with it `beta`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from llmq.base.dtypes import E4M3, F32, U8, DType
from llmq.base.tensor import Tensor
from llmq.runtime.kernel import ceil_div
from llmq.runtime.product import Operands, Product
from llmq.runtime.tuning import DEVICE_TO_HOST, HOST_TO_DEVICE

ONE = 127  # the byte of the scale 1
BLOCK = 32  # codes that share a scale
BETA = 4  # where beta is among the scalars, in numbers of F32: 16 bytes behind alpha
SCALARS = 8  # numbers of F32 that alpha and beta take
M, N, K = 144, 272, 160  # of the trial: its blocks of scales do not fill their tiles
TRIAL_BYTES = 1 << 20


def scales_bytes(rows: int, depth: int) -> int:
    """Bytes of the block scales of codes (rows, depth): whole tiles of 128 rows and 4 blocks."""
    return 128 * ceil_div(rows, 128) * 4 * ceil_div(depth, 4 * BLOCK)


def computes_right(
    cuda: Any, stream: int, workspace: Tensor, run: Callable[[Product, Operands], None]
) -> bool:
    """Whether a block-scaled product of small integers is what it must be, to the bit: with a beta
    of 0 whatever is in the result's memory, and with one of 1. Waits for the stream. workspace: U8,
    that of a product; what the trial needs lies at its start. run: enqueues."""
    if workspace.nbytes < 2 * TRIAL_BYTES:
        return False
    offset = 0

    def put(name: str, array: np.ndarray, dtype: DType) -> Tensor:
        nonlocal offset
        at = workspace.offset + offset
        tensor = Tensor(name, array.shape, dtype, workspace.storage, at)
        offset += 256 * ceil_div(tensor.nbytes, 256)
        cuda.memcpyAsync(tensor.ptr, array.ctypes.data, array.nbytes, HOST_TO_DEVICE, stream)
        cuda.streamSynchronize(stream)
        return tensor

    a, b = (_integers(shape, step) for shape, step in (((M, K), 5), ((N, K), 7)))
    codes = [put(name, x.astype(E4M3.numpy), E4M3) for name, x in (("a", a), ("b", b))]
    ones = np.full(max(scales_bytes(rows, K) for rows in (M, N)), ONE, np.uint8)
    scales = put("scales", ones, U8)
    out = put("out", np.full((M, N), np.nan, np.float32), F32)
    rest = workspace.rows(TRIAL_BYTES, workspace.nbytes)
    product = Product(
        M, N, K, False, True, E4M3, E4M3, F32, False, True, rest.nbytes, block_scaled=True
    )
    want = 0.25 * (a @ b.T)  # exact, in any order
    for beta, factor in ((0.0, 1), (1.0, 2)):
        both = np.zeros(SCALARS, np.float32)
        both[0], both[BETA] = 0.25, beta
        scalars = put("scalars", both, F32)
        run(product, Operands(out, *codes, None, None, rest, scales, scales, scalars=scalars))
        got = np.empty((M, N), np.float32)
        cuda.memcpyAsync(got.ctypes.data, out.ptr, out.nbytes, DEVICE_TO_HOST, stream)
        cuda.streamSynchronize(stream)
        if not np.array_equal(got, factor * want):
            return False
    return True


def _integers(shape: tuple[int, int], step: int) -> np.ndarray:
    """From -4 to 4, in an order that no row or column repeats soon."""
    rows, columns = np.indices(shape)
    return ((step * rows + 3 * columns + rows * columns // 11) % 9 - 4).astype(np.float32)
