"""The gated activation of pairs that are cut off: gpt-oss's, beside its formula in arch/experts."""

from llmq.base.tensor import Tensor
from llmq.ops.common import VECTOR_BYTES, expect_float
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div, expect

THREADS = 256

FORWARD = Kernel(
    "clamped_swiglu.cu",
    "clamped_swiglu_forward",
    args="T* out, const T* pairs, i64 n, f32 alpha, f32 limit",
)
BACKWARD = Kernel(
    "clamped_swiglu.cu",
    "clamped_swiglu_backward",
    args="T* d_pairs, const T* d_out, const T* pairs, i64 n, f32 alpha, f32 limit",
)


def forward(dev: Device, out: Tensor, pairs: Tensor, alpha: float, limit: float) -> None:
    """out = (u + 1) * g * sigmoid(alpha * g), with g at most limit, u from -limit to limit.

    Args (T is BF16 or F32):
        out    out  T (*S, F)    F a multiple of 16 bytes
        pairs  in   T (*S, 2F)   g0 u0 g1 u1 ...; NaN stays NaN
    """
    _check("clamped_swiglu.forward", "out", out, pairs)
    args = (out, pairs, out.size, alpha, limit)
    dev.launch(FORWARD, _blocks(out), THREADS, args)


def backward(
    dev: Device, d_pairs: Tensor, d_out: Tensor, pairs: Tensor, alpha: float, limit: float
) -> None:
    """The gradient of forward, which is 0 of what is cut off.

    Args as forward's, and d_pairs out, as pairs, which it may be; d_out in, as out.
    """
    op = "clamped_swiglu.backward"
    _check(op, "d_out", d_out, pairs)
    expect(op, "d_pairs", d_pairs, pairs.dtype, pairs.shape)
    args = (d_pairs, d_out, pairs, d_out.size, alpha, limit)
    dev.launch(BACKWARD, _blocks(d_out), THREADS, args)


def _blocks(narrow: Tensor) -> int:
    return ceil_div(narrow.nbytes, VECTOR_BYTES * THREADS)


def _check(op: str, name: str, narrow: Tensor, pairs: Tensor) -> None:
    expect_float(op, name, narrow)
    *rows, F = narrow.shape
    if F * narrow.dtype.itemsize % VECTOR_BYTES:
        raise ValueError(f"{op}: {name} must have rows of a multiple of 16 bytes, got {F} elements")
    expect(op, "pairs", pairs, narrow.dtype, (*rows, 2 * F))
